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

from jaxllm.train.trained import Hole, Names
from jaxllm.weights.leaves.arrays import after, as_leaf
from jaxllm.weights.leaves.leaf import Leaf, Linear
from jaxllm.weights.leaves.wrapped import Wrapped
from jaxllm.weights.paths import Params, map_leaves, own_name


class Frozen(Wrapped, struct.PyTreeNode):
    """A matrix `[O, I]`, an array or a weight type, without a gradient."""

    kind = "frozen/"
    nests = True

    weight: Any

    def dense(self, dtype: Any = None) -> jax.Array:
        return jax.lax.stop_gradient(self.stored.dense(dtype))

    def take(self, index: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(self.stored.take(index))

    def product(self, x_RI: jax.Array) -> jax.Array:
        return self.through(x_RI, lambda x, weight: as_leaf(weight).product(x))

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        if not jnp.issubdtype(x_RI.dtype, jnp.floating):
            return linear(x_RI, self.weight)
        return _product(linear, x_RI, self.weight)

    def beside(self) -> dict[str, jax.Array]:
        return {}


def frozen(rest: Params, names: Names = own_name) -> Params:
    """Wrap each matrix that contains nothing trained in `Frozen`.

    names: as `Placed.names`; matrices stacked over pipeline stages have one more axis.
    """
    return map_leaves(lambda path, leaf: _around(leaf, 3 if len(names(path)) > 1 else 2), rest)


def _around(leaf: Any, ndim: int) -> Any:
    if not _has_holes(leaf):
        return Frozen(leaf) if leaf.ndim == ndim else leaf
    if isinstance(leaf, Wrapped) and not isinstance(leaf.weight, Hole):
        changed: Any = leaf
        return changed.replace(weight=_around(leaf.weight, ndim))
    return leaf


def _has_holes(leaf: Any) -> bool:
    found = jax.tree.leaves(leaf, is_leaf=lambda x: isinstance(x, Hole))
    return any(isinstance(x, Hole) for x in found)


def _ready(x_RI: jax.Array, weight: Any) -> Any:
    """Return the weight with its expansion ordered after x."""
    return weight if as_leaf(weight).has_kernels else after(x_RI, weight)


def _product(linear: Linear, x_RI: jax.Array, weight: Any) -> jax.Array:
    """Return `linear(x, weight)`, whose gradient for x is that of the dense product."""

    @jax.custom_vjp
    def multiply(x_RI: jax.Array, weight: Any) -> jax.Array:
        return linear(x_RI, _ready(x_RI, weight))

    def forward(x_RI: jax.Array, weight: Any) -> tuple[jax.Array, Any]:
        return multiply(x_RI, weight), weight

    def backward(weight: Any, slope_RO: jax.Array) -> tuple[jax.Array, Any]:
        weight = after(slope_RO, weight) if isinstance(weight, Leaf) else weight
        half = x_RI.dtype == jnp.bfloat16
        kept = jnp.bfloat16 if half else jnp.float32
        slope_RI = jax.lax.dot_general(
            slope_RO.astype(kept),
            as_leaf(weight).dense(kept),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return slope_RI.astype(x_RI.dtype), None

    multiply.defvjp(forward, backward)
    found: Callable[..., jax.Array] = multiply
    return found(x_RI, weight)
