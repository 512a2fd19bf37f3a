"""Frozen weights in a training step.

Only their inputs have gradients. A quantized weight is dequantized for the backward pass after the
gradient arrives: otherwise XLA would hold the dequantized weights of all layers at once. In
bfloat16 both operands of the backward product are bfloat16, as in PyTorch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.train.partition import NamesOf, Placeholder, identity_path
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.types.arrays import add_dependency, as_weight
from jaxllm.weights.types.base import LinearFn, WeightBase
from jaxllm.weights.types.wrapper import WeightWrapper


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


def freeze_params(params: Params, names: NamesOf = identity_path) -> Params:
    """Wrap each matrix that contains nothing trained in `FrozenWeight`.

    names: as `Model.unsharded_paths`; matrices stacked over pipeline stages have one
        more axis.
    """
    return map_leaves(lambda path, leaf: _freeze(leaf, 3 if len(names(path)) > 1 else 2), params)


def _freeze(leaf: Any, ndim: int) -> Any:
    if not _has_holes(leaf):
        return FrozenWeight(leaf) if leaf.ndim == ndim else leaf
    if isinstance(leaf, WeightWrapper) and not isinstance(leaf.weight, Placeholder):
        changed: Any = leaf
        return changed.replace(weight=_freeze(leaf.weight, ndim))
    return leaf


def _has_holes(leaf: Any) -> bool:
    found = jax.tree.leaves(leaf, is_leaf=lambda x: isinstance(x, Placeholder))
    return any(isinstance(x, Placeholder) for x in found)


def _wait_for(x_RI: jax.Array, weight: Any) -> Any:
    """Return the weight with its expansion ordered after x."""
    return add_dependency(x_RI, weight) if as_weight(weight).native_matrix() is None else weight


def _multiply(linear: LinearFn, x_RI: jax.Array, weight: Any) -> jax.Array:
    """Return `linear(x, weight)`, whose gradient for x is that of the dense product."""

    @jax.custom_vjp
    def multiply(x_RI: jax.Array, weight: Any) -> jax.Array:
        return linear(x_RI, _wait_for(x_RI, weight))

    def forward(x_RI: jax.Array, weight: Any) -> tuple[jax.Array, Any]:
        return multiply(x_RI, weight), weight

    def backward(weight: Any, slope_RO: jax.Array) -> tuple[jax.Array, Any]:
        weight = add_dependency(slope_RO, weight) if isinstance(weight, WeightBase) else weight
        half = x_RI.dtype == jnp.bfloat16
        kept = jnp.bfloat16 if half else jnp.float32
        slope_RI = jax.lax.dot_general(
            slope_RO.astype(kept),
            as_weight(weight).to_dense(kept),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return slope_RI.astype(x_RI.dtype), None

    multiply.defvjp(forward, backward)
    found: Callable[..., jax.Array] = multiply
    return found(x_RI, weight)
