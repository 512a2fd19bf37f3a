"""FSDP shards: a weight split over data-parallel devices, gathered only while it is used.

This is ZeRO stage 3 (Rajbhandari et al. 2020), as in FSDP (Zhao et al. 2023): weight, gradient and
optimizer state are stored in shards. The weight is gathered for each product and dropped after it,
then gathered again for the product's gradient, which is reduce-scattered.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import struct

from jaxllm.weights.types.arrays import add_dependency, as_weight
from jaxllm.weights.types.base import LinearFn, WeightBase
from jaxllm.weights.types.wrapper import WeightWrapper


class FsdpShard(WeightWrapper, struct.PyTreeNode):
    """A device's part of a weight's arrays, inside `jax.shard_map`."""

    format_prefix = "scattered/"

    weight: Any
    axis_name: str = struct.field(pytree_node=False)  # the mesh axis
    num_shards: int = struct.field(pytree_node=False)  # its size
    # The axis along which each array is split, in their order; None: it is replicated.
    sharded_dims: tuple[int | None, ...] = struct.field(pytree_node=False)

    @property
    def inner(self) -> WeightBase:
        """The whole weight, with shapes only: it has no numbers."""

        def full_shape(piece: Any, at: int | None) -> jax.ShapeDtypeStruct:
            shape = list(piece.shape)
            if at is not None:
                shape[at] *= self.num_shards
            return jax.ShapeDtypeStruct(tuple(shape), piece.dtype)

        pieces, form = jax.tree.flatten(self.weight)
        every = [full_shape(*each) for each in zip(pieces, self.sharded_dims, strict=True)]
        return as_weight(jax.tree.unflatten(form, every))

    def gather(self) -> Any:
        """All-gather the weight."""
        pieces, form = jax.tree.flatten(self.weight)
        whole = [
            x if at is None else jax.lax.all_gather(x, self.axis_name, axis=at, tiled=True)
            for x, at in zip(pieces, self.sharded_dims, strict=True)
        ]
        return jax.tree.unflatten(form, whole)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return as_weight(self.gather()).to_dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        return as_weight(self.gather()).take(index)

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        return self.apply_with(x_RI, lambda x, weight: as_weight(weight).matmul(x))

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        return self.apply_gathered(lambda weight, x: linear(x, weight), x_RI)

    def apply_gathered(
        self, function: Callable[..., jax.Array], x: jax.Array, *given: Any
    ) -> jax.Array:
        """Return `function(weight, x, *given)` of the gathered weight, which is not stored.

        The weight is gathered only after x is available, and for the gradient only after its
        cotangent is. Otherwise XLA could gather all weights first, and merge the two gathers.

        Args:
            function: must not close over arrays.
        """

        def multiply(part: FsdpShard, *given: Any) -> jax.Array:
            return function(part.gather(), *given)

        def forward(part: FsdpShard, x: jax.Array, *given: Any) -> tuple[jax.Array, Any]:
            return multiply(add_dependency(x, part), x, *given), (part, x, *given)

        def backward(arguments: Any, slope: jax.Array) -> Any:
            part, *given = arguments
            return jax.vjp(multiply, add_dependency(slope, part), *given)[1](slope)

        later = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
        later.defvjp(forward, backward)
        y: jax.Array = later(self, x, *given)
        return y
