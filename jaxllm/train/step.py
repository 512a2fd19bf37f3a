"""The compiled training step: gradient accumulation, optimizer update, check for finite values.

Trained parameters are kept and updated in float32; the model runs in its compute dtype. A step
whose loss or gradient is not finite changes nothing.

Only the inputs of frozen weights have gradients. A quantized weight is dequantized for the backward
pass after the gradient arrives: otherwise XLA would hold the dequantized weights of all layers at
once. In bfloat16 both operands of the backward product are bfloat16, as in PyTorch.
"""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxllm.train.data.rows import Rows
from jaxllm.train.objective import LossOutput, Objective
from jaxllm.train.optimizer import import_optax
from jaxllm.train.partition import NamesOf, Placeholder, TrainedParams, combine, identity_path
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, map_leaves, put
from jaxllm.weights.types.arrays import add_dependency, as_weight, contract
from jaxllm.weights.types.base import LinearFn, WeightBase
from jaxllm.weights.types.wrapper import WeightWrapper


class TrainState(struct.PyTreeNode):
    """The state between steps. step: int32, number of steps done."""

    trained: TrainedParams
    optimizer: Any
    step: jax.Array


class Metrics(struct.PyTreeNode):
    """The metrics of a step, float32 scalars.

    Attributes:
        weight: divisor of the loss, usually the number of labels.
        grad_norm: global norm of the gradient before clipping.
        finite: bool, whether the step was applied.
        extras: the objective's further metrics.
    """

    loss: jax.Array
    weight: jax.Array
    grad_norm: jax.Array
    finite: jax.Array
    extras: dict[str, jax.Array]


class OptimizerConfig(Protocol):
    """A dataclass that makes an optax optimizer: `optimizer.Optimizer` or your own."""

    def build(self) -> Any: ...


class Constraint(Protocol):
    """A frozen dataclass that corrects the trained arrays after each update."""

    def __call__(
        self, old: TrainedParams, new: TrainedParams, step: jax.Array
    ) -> TrainedParams: ...


class Setup(NamedTuple):
    """The static arguments of a compiled step, hashed by value."""

    model: Model
    objective: Objective
    optimizer: OptimizerConfig
    constraint: Constraint | None = None


def init_state(trained: TrainedParams, setup: Setup) -> TrainState:
    """Return the state before the first step, with copies of the arrays, since steps donate them.

    On a mesh the optimizer state of an array has the sharding of the array.
    """
    arrays = {path: jnp.array(x, jnp.float32) for path, x in trained.items()}
    state = TrainState(arrays, setup.optimizer.build().init(arrays), jnp.zeros((), jnp.int32))
    place = setup.model.cache_sharding
    if place is None:
        return state
    return put(state, lambda path, x: _canonical_sharding(x) if x.ndim else place(path, x))


def _canonical_sharding(x: jax.Array) -> jax.sharding.Sharding:
    """Return an array's sharding in the form in which a compiled step returns it.

    Any other form of the same sharding would make the second step compile again.
    """
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding):
        return sharding
    sizes = sharding.mesh.shape
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in sharding.spec]
    entries = [tuple(name for name in e if sizes[name] > 1) for e in entries]
    if not any(entries):
        return NamedSharding(sharding.mesh, P())
    entries += [()] * (x.ndim - len(entries))
    axes = [None if not e else e[0] if len(e) == 1 else e for e in entries]
    return NamedSharding(sharding.mesh, P(*axes))


@partial(jax.jit, static_argnames="setup", donate_argnums=0)
def train_step(
    state: TrainState,
    frozen_params: Params,
    extra_inputs: Any,
    rows: Rows,
    key: jax.Array,
    *,
    setup: Setup,
) -> tuple[TrainState, Metrics]:
    """Run one step and return `(state, metrics)`; the given state is donated.

    The gradient is that of the sum of all losses divided by the sum of all weights, so it does not
    depend on how tokens are divided among batches.

    Args:
        rows: `[A, B, T]`, A batches whose gradients are accumulated.
        key: of the run; each step and batch folds in its own number.
    """
    optax = import_optax()
    key = jax.random.fold_in(key, state.step)
    batches, still = (
        rows.token_BT.shape[0],
        freeze_params(frozen_params, setup.model.unsharded_paths),
    )

    def compute_loss(
        trained: TrainedParams, rows: Rows, key: jax.Array
    ) -> tuple[jax.Array, LossOutput]:
        weight_key, loss_key = jax.random.split(key)
        params = prepare_weights(combine(trained, still), weight_key, state.step)
        # On a mesh, shard_map sums a weight's gradient over devices.
        params = params if setup.model.is_sharded else wrap_trained(params)
        measured = setup.objective(setup.model, params, extra_inputs, rows, loss_key)
        return measured.total, measured

    def batch_gradient(rows: Rows, number: jax.Array) -> tuple[LossOutput, TrainedParams]:
        batch_key = jax.random.fold_in(key, number)
        (_, measured), gradient = jax.value_and_grad(compute_loss, has_aux=True)(
            state.trained, rows, batch_key
        )
        return measured, gradient

    if batches == 1:
        summed = batch_gradient(jax.tree.map(lambda x: x[0], rows), jnp.zeros((), jnp.int32))
    else:
        blank = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(
                batch_gradient, jax.tree.map(lambda x: x[0], rows), jnp.zeros((), jnp.int32)
            ),
        )

        def add(carry: Any, each: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, batch_gradient(*each)), None

        summed, _ = jax.lax.scan(add, blank, (rows, jnp.arange(batches)))
    measured, gradient = summed
    weight = jnp.where(measured.weight == 0, 1.0, measured.weight)  # without labels the loss is 0
    share = 1 / weight  # a product is computed again where it is read; a quotient would be stored

    def mean(total: TrainedParams) -> TrainedParams:
        return jax.tree.map(lambda x: x * share, total)

    norm = optax.tree.norm(mean(gradient))
    method = optax.with_extra_args_support(setup.optimizer.build())

    def update(carry: Any) -> Any:
        _, trained, optimizer = carry
        with jax.numpy_dtype_promotion("standard"):  # optax divides its counter by floats
            updates, optimizer = method.update(mean(gradient), optimizer, trained, norm=norm)
            changed = optax.apply_updates(trained, updates)
        if setup.constraint is not None:
            changed = setup.constraint(trained, changed, state.step)
        return jnp.zeros((), bool), changed, optimizer

    # A loop that runs once or never, in place: a choice between old and new would copy the old.
    finite = jnp.isfinite(measured.total) & jnp.isfinite(norm)
    _, trained, optimizer = jax.lax.while_loop(
        lambda carry: carry[0], update, (finite, state.trained, state.optimizer)
    )
    also = {name: value / weight for name, value in measured.extras.items()}
    metrics = Metrics(measured.total / weight, measured.weight, norm, finite, also)
    return TrainState(trained, optimizer, state.step + finite.astype(jnp.int32)), metrics


@partial(jax.jit, static_argnames="setup")
def eval_step(
    trained: TrainedParams,
    frozen_params: Params,
    extra_inputs: Any,
    rows: Rows,
    key: jax.Array,
    *,
    setup: Setup,
) -> LossOutput:
    """Evaluate the objective on one batch `[B, T]`, without the randomness of training."""
    return setup.objective(setup.model, combine(trained, frozen_params), extra_inputs, rows, key)


def prepare_weights(params: Params, key: jax.Array, step: jax.Array) -> Params:
    """Return the parameters with each weight in its training form (`WeightBase.for_training_step`).

    Random numbers depend on the path of the weight and not on the other weights.
    """

    def change(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, WeightBase):
            return leaf
        return leaf.for_training_step(jax.random.fold_in(key, zlib.crc32(path.encode())), step)

    return map_leaves(change, params)


class FrozenWeight(WeightWrapper, struct.PyTreeNode):
    """A matrix `[O, I]`, an array or a weight type, without a gradient."""

    format_prefix = "frozen/"
    allows_composite = True

    weight: Any

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return jax.lax.stop_gradient(self.inner.to_dense(dtype))

    def take(self, index: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(self.inner.take(index))

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        if not jnp.issubdtype(x_RI.dtype, jnp.floating):
            return linear(x_RI, self.weight)
        return _multiply(linear, x_RI, self.weight)


class TrainedWeight(WeightWrapper, struct.PyTreeNode):
    """A trained array `[O, I]`: in bfloat16 its gradient is a product of bfloat16 matrices."""

    format_prefix = "trained/"

    weight: jax.Array

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return self.inner.to_dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        return self.inner.take(index)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        if x_RI.dtype != self.weight.dtype:
            return linear(x_RI, self.weight)
        return _multiply(linear, x_RI, self.weight, trained=True)


def wrap_trained(params: Params) -> Params:
    """Wrap each plain matrix of the model, after the frozen ones, in `TrainedWeight`."""

    def wrap(path: str, leaf: Any) -> Any:
        plain = path.endswith(".weight") and not isinstance(leaf, WeightBase) and leaf.ndim == 2
        return TrainedWeight(leaf) if plain else leaf

    return map_leaves(wrap, params)


def freeze_params(params: Params, names: NamesOf = identity_path) -> Params:
    """Wrap each matrix that contains nothing trained in `FrozenWeight`.

    names: as `Model.unsharded_paths`; matrices stacked over pipeline stages have one
        more axis.
    """

    def freeze(path: str, leaf: Any) -> Any:
        if path.endswith(".bias"):  # those of experts have two axes
            return leaf
        return _freeze(leaf, 3 if len(names(path)) > 1 else 2)

    return map_leaves(freeze, params)


def _freeze(leaf: Any, ndim: int) -> Any:
    if not _has_holes(leaf):
        return FrozenWeight(leaf) if leaf.ndim == ndim else leaf
    if isinstance(leaf, WeightWrapper) and not isinstance(leaf.weight, Placeholder):
        changed: Any = leaf
        return changed.replace(weight=_freeze(leaf.weight, ndim))
    return leaf


def _has_holes(leaf: Any) -> bool:
    leaves = jax.tree.leaves(leaf, is_leaf=lambda x: isinstance(x, Placeholder))
    return any(isinstance(x, Placeholder) for x in leaves)


def _wait_for(x_RI: jax.Array, weight: Any) -> Any:
    """Return the weight with its expansion ordered after x."""
    return add_dependency(x_RI, weight) if as_weight(weight).native_matrix() is None else weight


def _multiply(
    linear: LinearFn, x_RI: jax.Array, weight: Any, *, trained: bool = False
) -> jax.Array:
    """Return `linear(x, weight)`; its gradients are computed from the dense weight."""

    @jax.custom_vjp
    def multiply(x_RI: jax.Array, weight: Any) -> jax.Array:
        return linear(x_RI, weight if trained else _wait_for(x_RI, weight))

    def forward(x_RI: jax.Array, weight: Any) -> tuple[jax.Array, Any]:
        return multiply(x_RI, weight), (weight, x_RI if trained else None)

    def backward(saved: Any, slope_RO: jax.Array) -> tuple[jax.Array, Any]:
        weight, inputs_RI = saved
        weight = add_dependency(slope_RO, weight) if isinstance(weight, WeightBase) else weight
        half = x_RI.dtype == jnp.bfloat16
        slope_RO = slope_RO.astype(jnp.bfloat16 if half else jnp.float32)
        slope_RI = contract(slope_RO, as_weight(weight).to_dense(slope_RO.dtype), 1, 0)
        if not trained:
            return slope_RI.astype(x_RI.dtype), None
        slope_OI = contract(slope_RO, inputs_RI.astype(slope_RO.dtype), 0, 0)
        return slope_RI.astype(x_RI.dtype), slope_OI.astype(x_RI.dtype)

    multiply.defvjp(forward, backward)
    product: Callable[..., jax.Array] = multiply
    return product(x_RI, weight)
