"""FSDP shards: a weight split over data-parallel devices, gathered only while it is used.

This is ZeRO stage 3 (Rajbhandari et al. 2020), as in FSDP (Zhao et al. 2023): weight, gradient and
optimizer state are stored in shards. The weight is gathered for each product and dropped after it,
then gathered again for the product's gradient, which is reduce-scattered.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import struct

from jaxllm.weights.leaves.arrays import after, as_leaf
from jaxllm.weights.leaves.leaf import Leaf, Linear
from jaxllm.weights.leaves.wrapped import Wrapped


class Scattered(Wrapped, struct.PyTreeNode):
    """A device's part of a weight's arrays, inside `jax.shard_map`."""

    kind = "scattered/"

    weight: Any
    axis: str = struct.field(pytree_node=False)  # the mesh axis
    parts: int = struct.field(pytree_node=False)  # its size
    # The axis along which each array is split, in their order; None: it is replicated.
    cut: tuple[int | None, ...] = struct.field(pytree_node=False)

    @property
    def stored(self) -> Leaf:
        """The whole weight, with shapes only: it has no numbers."""

        def whole(piece: Any, at: int | None) -> jax.ShapeDtypeStruct:
            shape = list(piece.shape)
            if at is not None:
                shape[at] *= self.parts
            return jax.ShapeDtypeStruct(tuple(shape), piece.dtype)

        pieces, form = jax.tree.flatten(self.weight)
        every = [whole(*each) for each in zip(pieces, self.cut, strict=True)]
        return as_leaf(jax.tree.unflatten(form, every))

    def gathered(self) -> Any:
        """All-gather the weight."""
        pieces, form = jax.tree.flatten(self.weight)
        whole = [
            x if at is None else jax.lax.all_gather(x, self.axis, axis=at, tiled=True)
            for x, at in zip(pieces, self.cut, strict=True)
        ]
        return jax.tree.unflatten(form, whole)

    def dense(self, dtype: Any = None) -> jax.Array:
        return as_leaf(self.gathered()).dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        return as_leaf(self.gathered()).take(index)

    def product(self, x_RI: jax.Array) -> jax.Array:
        return self.through(x_RI, lambda x, weight: as_leaf(weight).product(x))

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        return self.applied(lambda weight, x: linear(x, weight), x_RI)

    def applied(self, function: Callable[..., jax.Array], x: jax.Array, *given: Any) -> jax.Array:
        """Return `function(weight, x, *given)` of the gathered weight, which is not stored.

        The weight is gathered only after x is available, and for the gradient only after its
        cotangent is. Otherwise XLA could gather all weights first, and merge the two gathers.

        Args:
            function: must not close over arrays.
        """

        def multiply(part: Scattered, *given: Any) -> jax.Array:
            return function(part.gathered(), *given)

        def forward(part: Scattered, x: jax.Array, *given: Any) -> tuple[jax.Array, Any]:
            return multiply(after(x, part), x, *given), (part, x, *given)

        def backward(arguments: Any, slope: jax.Array) -> Any:
            part, *given = arguments
            return jax.vjp(multiply, after(slope, part), *given)[1](slope)

        later = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
        later.defvjp(forward, backward)
        y: jax.Array = later(self, x, *given)
        return y
