"""The one compiled step: gradients of accumulated batches, the optimiser's update, a check.

What is trained is kept and updated in float32; the model runs in its own formats. A step whose loss
or gradient is not finite changes nothing.
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
    """All that goes from step to step. step: int32, how many are done."""

    trained: Trained
    optimizer: Any
    step: jax.Array


class Metrics(struct.PyTreeNode):
    """What a step measured, float32 scalars. norm: of the gradient, before it was clipped. weight:
    what the loss was divided by, as a rule tokens. finite: whether the state was changed.
    """

    loss: jax.Array
    weight: jax.Array
    norm: jax.Array
    finite: jax.Array
    also: dict[str, jax.Array]


class Transformation(Protocol):
    """What makes an optimiser, and can be compared: `optimizer.Optimizer`, or one of your own."""

    def made(self) -> Any: ...


class Constraint(Protocol):
    """What the trained must be after each update, given what it was before: a frozen dataclass."""

    def __call__(self, before: Trained, after: Trained, step: jax.Array) -> Trained: ...


class Setup(NamedTuple):
    """What a compiled step is made for: all of it hashes by value."""

    model: nn.Module
    objective: Objective
    optimizer: Transformation
    constraint: Constraint | None = None


def start(trained: Trained, setup: Setup) -> TrainState:
    """The state before the first step. The arrays are copies: steps write into the state.

    On a mesh what an optimiser keeps of an array is where the array is.
    """
    own = {path: jnp.array(x, jnp.float32) for path, x in trained.items()}
    state = TrainState(own, setup.optimizer.made().init(own), jnp.zeros((), jnp.int32))
    if not isinstance(setup.model, Placed):
        return state
    place = setup.model.place
    return put(state, lambda path, x: _said(x) if x.ndim else place(path, x))


def _said(x: jax.Array) -> jax.sharding.Sharding:
    """Where an array is, as a compiled step will say it when it gives it back: the second step
    would be compiled anew if that were said otherwise.
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
    """One step over `rows` `[A, B, T]`, A batches whose gradients are added up: `(state, metrics)`.

    The gradient is that of the sum of all losses over the sum of all weights: it does not matter
    how tokens were divided among batches. key: of the run; each step and batch has its own. The
    state that is given is used up.
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
    weight = jnp.where(
        measured.weight == 0, 1.0, measured.weight
    )  # nothing counts: nothing is lost
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
    """The objective of one batch `[B, T]` as it stands, without what only training draws."""
    return setup.objective(setup.model, join(trained, rest), given, rows, key)


def as_trained(params: Params, key: jax.Array, step: jax.Array) -> Params:
    """The parameters with each leaf as a step of training multiplies with it: what it draws goes by
    its path, whatever other leaves there are.
    """

    def change(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        return leaf.training(jax.random.fold_in(key, zlib.crc32(path.encode())), step)

    return map_leaves(change, params)
