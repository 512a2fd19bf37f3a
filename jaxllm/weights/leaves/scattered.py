"""A weight of which devices that have rows of their own have a part each, whole only in use.

ZeRO's third stage (Rajbhandari et al. 2020), as FSDP has it (Zhao et al. 2023): what is kept of a
weight, its gradient and its optimiser's state is a part; it is gathered for each product and thrown
away after it, gathered again for the product's gradient, which is summed in parts.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import struct

from jaxllm.weights.leaves.arrays import after, as_leaf
from jaxllm.weights.leaves.leaf import Leaf, Linear
from jaxllm.weights.leaves.wrapped import Wrapped


class Scattered(Wrapped, struct.PyTreeNode):
    """A device's part of a weight's pieces, inside `jax.shard_map`.

    axis: of the mesh, of so many `parts`. cut: along which axis of each piece, in their order; None
    for a piece that is whole.
    """

    kind = "scattered/"

    weight: Any
    axis: str = struct.field(pytree_node=False)
    parts: int = struct.field(pytree_node=False)
    cut: tuple[int | None, ...] = struct.field(pytree_node=False)

    @property
    def stored(self) -> Leaf:
        """The weight as a leaf, whole, for what its shapes say: it has no numbers."""

        def whole(piece: Any, at: int | None) -> jax.ShapeDtypeStruct:
            shape = list(piece.shape)
            if at is not None:
                shape[at] *= self.parts
            return jax.ShapeDtypeStruct(tuple(shape), piece.dtype)

        pieces, form = jax.tree.flatten(self.weight)
        every = [whole(*each) for each in zip(pieces, self.cut, strict=True)]
        return as_leaf(jax.tree.unflatten(form, every))

    def gathered(self) -> Any:
        """The weight, whole on each device."""
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
        """`function(weight, x, *given)` of the whole weight, which is not kept for the gradient.

        function: closes over no arrays. The weight is gathered once x is there, and for the
        gradient once that is, and not before: XLA could otherwise gather all weights first, and
        does once what it sees twice.
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
