"""The compiled training step: gradient accumulation, optimizer update, check for finite values.

Trained parameters are kept and updated in float32; the model runs in its compute dtype. A step
whose loss or gradient is not finite changes nothing.
"""

import zlib
from functools import partial
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.train.data.rows import Rows
from jaxllm.train.frozen import frozen
from jaxllm.train.objective import Measured, Objective
from jaxllm.train.optimizer import check_optax
from jaxllm.train.trained import Trained, join
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.paths import Params, Placed, map_leaves, names_of, put


class TrainState(struct.PyTreeNode):
    """The state between steps. step: int32, number of steps done."""

    trained: Trained
    optimizer: Any
    step: jax.Array


class Metrics(struct.PyTreeNode):
    """The metrics of a step, float32 scalars.

    Attributes:
      weight: divisor of the loss, usually the number of labels.
      norm: global norm of the gradient before clipping.
      finite: bool, whether the step was applied.
      also: the objective's further metrics.
    """

    loss: jax.Array
    weight: jax.Array
    norm: jax.Array
    finite: jax.Array
    also: dict[str, jax.Array]


class Transformation(Protocol):
    """A dataclass that makes an optax optimizer: `optimizer.Optimizer` or your own."""

    def made(self) -> Any: ...


class Constraint(Protocol):
    """A frozen dataclass that corrects the trained arrays after each update."""

    def __call__(self, before: Trained, after: Trained, step: jax.Array) -> Trained: ...


class Setup(NamedTuple):
    """The static arguments of a compiled step, hashed by value."""

    model: nn.Module
    objective: Objective
    optimizer: Transformation
    constraint: Constraint | None = None


def start(trained: Trained, setup: Setup) -> TrainState:
    """Return the state before the first step, with copies of the arrays, since steps donate them.

    On a mesh the optimizer state of an array has the sharding of the array.
    """
    own = {path: jnp.array(x, jnp.float32) for path, x in trained.items()}
    state = TrainState(own, setup.optimizer.made().init(own), jnp.zeros((), jnp.int32))
    if not isinstance(setup.model, Placed):
        return state
    place = setup.model.place
    return put(state, lambda path, x: _said(x) if x.ndim else place(path, x))


def _said(x: jax.Array) -> jax.sharding.Sharding:
    """Return an array's sharding in the form in which a compiled step returns it.

    Any other form of the same sharding would make the second step compile again.
    """
    where = x.sharding
    if not isinstance(where, NamedSharding):
        return where
    sizes = where.mesh.shape
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in where.spec]
    entries = [tuple(name for name in e if sizes[name] > 1) for e in entries]
    if not any(entries):
        return NamedSharding(where.mesh, P())
    entries += [()] * (x.ndim - len(entries))
    said = [None if not e else e[0] if len(e) == 1 else e for e in entries]
    return NamedSharding(where.mesh, P(*said))


@partial(jax.jit, static_argnames="setup", donate_argnums=0)
def train_step(
    state: TrainState, rest: Params, given: Any, rows: Rows, key: jax.Array, *, setup: Setup
) -> tuple[TrainState, Metrics]:
    """Run one step and return `(state, metrics)`; the given state is donated.

    The gradient is that of the sum of all losses divided by the sum of all weights, so it does not
    depend on how tokens are divided among batches.

    Args:
      rows: `[A, B, T]`, A batches whose gradients are accumulated.
      key: of the run; each step and batch folds in its own number.
    """
    optax = check_optax()
    key = jax.random.fold_in(key, state.step)
    batches, still = rows.token_BT.shape[0], frozen(rest, names_of(setup.model))

    def total(trained: Trained, rows: Rows, key: jax.Array) -> tuple[jax.Array, Measured]:
        used, own = jax.random.split(key)
        params = as_trained(join(trained, still), used, state.step)
        measured = setup.objective(setup.model, params, given, rows, own)
        return measured.total, measured

    def one(rows: Rows, number: jax.Array) -> tuple[Measured, Trained]:
        own = jax.random.fold_in(key, number)
        (_, measured), gradient = jax.value_and_grad(total, has_aux=True)(state.trained, rows, own)
        return measured, gradient

    if batches == 1:
        summed = one(jax.tree.map(lambda x: x[0], rows), jnp.zeros((), jnp.int32))
    else:
        blank = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(one, jax.tree.map(lambda x: x[0], rows), jnp.zeros((), jnp.int32)),
        )

        def add(carry: Any, each: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, one(*each)), None

        summed, _ = jax.lax.scan(add, blank, (rows, jnp.arange(batches)))
    measured, gradient = summed
    weight = jnp.where(measured.weight == 0, 1.0, measured.weight)  # without labels the loss is 0
    gradient = jax.tree.map(lambda g: g / weight, gradient)
    norm = optax.tree.norm(gradient)
    with jax.numpy_dtype_promotion("standard"):  # optax divides its counter by floats
        method = setup.optimizer.made()
        updates, optimizer = method.update(gradient, state.optimizer, state.trained)
        trained = optax.apply_updates(state.trained, updates)
    if setup.constraint is not None:
        trained = setup.constraint(state.trained, trained, state.step)
    finite = jnp.isfinite(measured.total) & jnp.isfinite(norm)
    trained, optimizer = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (trained, optimizer),
        (state.trained, state.optimizer),
    )
    also = {name: value / weight for name, value in measured.also.items()}
    metrics = Metrics(measured.total / weight, measured.weight, norm, finite, also)
    return TrainState(trained, optimizer, state.step + finite.astype(jnp.int32)), metrics


@partial(jax.jit, static_argnames="setup")
def measure(
    trained: Trained, rest: Params, given: Any, rows: Rows, key: jax.Array, *, setup: Setup
) -> Measured:
    """Evaluate the objective on one batch `[B, T]`, without the randomness of training."""
    return setup.objective(setup.model, join(trained, rest), given, rows, key)


def as_trained(params: Params, key: jax.Array, step: jax.Array) -> Params:
    """Return the parameters with each weight in its training form (`Leaf.training`).

    Random numbers depend on the path of the weight and not on the other weights.
    """

    def change(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        return leaf.training(jax.random.fold_in(key, zlib.crc32(path.encode())), step)

    return map_leaves(change, params)
