"""Fully sharded data parallelism (FSDP): matrices that are also sharded over the axis `data`.

This is ZeRO stage 3 (Rajbhandari et al. 2020), as in FSDP (Zhao et al. 2023). A stored matrix is
split over `data` along one of its axes, in addition to the splits by other mesh axes. Inside
`jax.shard_map` a device's part is a `FsdpShard`: gathered for each product and dropped after it,
then gathered again for the product's gradient. The gradient is reduce-scattered, so it has the same
sharding, and so has the optimizer state. Vectors are replicated: they are small, and modules use
them directly.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxllm.errors import ConfigError
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_specs import param_specs
from jaxllm.sharding.shard_list import ShardList
from jaxllm.sharding.shard_params import ParamSharder
from jaxllm.weights.formats import Weight
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.load import NotLocal
from jaxllm.weights.types.arrays import add_dependency, as_weight
from jaxllm.weights.types.base import LinearFn, WeightBase
from jaxllm.weights.types.wrapper import WeightWrapper

DATA = "data"


class FsdpShard(WeightWrapper, struct.PyTreeNode):
    """A device's part of a weight's arrays, inside `jax.shard_map`."""

    format_prefix = "scattered/"
    is_sharded = True

    weight: Any
    axis_name: str = struct.field(pytree_node=False)  # the mesh axis
    num_shards: int = struct.field(pytree_node=False)  # its size
    # The axis along which each array is split, in their order; None: it is replicated.
    sharded_dims: tuple[int | None, ...] = struct.field(pytree_node=False)

    @property
    def inner(self) -> WeightBase:
        """The whole weight, with shapes only: it has no numbers."""

        def full_shape(x: Any, dim: int) -> jax.ShapeDtypeStruct:
            shape = list(x.shape)
            shape[dim] *= self.num_shards
            return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

        return as_weight(self._map_shards(full_shape))

    def gather(self) -> Any:
        """All-gather the weight."""
        return self._map_shards(
            lambda x, dim: jax.lax.all_gather(x, self.axis_name, axis=dim, tiled=True)
        )

    def _map_shards(self, function: Callable[[Any, int], Any]) -> Any:
        """Return the weight with `function(x, dim)` in place of each array that is sharded."""
        arrays, structure = jax.tree.flatten(self.weight)
        pairs = zip(arrays, self.sharded_dims, strict=True)
        return jax.tree.unflatten(
            structure, [x if dim is None else function(x, dim) for x, dim in pairs]
        )

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return as_weight(self.gather()).to_dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        return as_weight(self.gather()).take(index)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn, *args: Any) -> jax.Array:
        """Return the product; `linear` must not close over arrays.

        The weight is gathered only after x is available, and for the gradient only after its
        cotangent is. Otherwise XLA could gather all weights first, and merge the two gathers.
        """

        def multiply(shard: FsdpShard, x_RI: jax.Array, *args: Any) -> jax.Array:
            return linear(x_RI, shard.gather(), *args)

        def forward(shard: FsdpShard, x_RI: jax.Array, *args: Any) -> tuple[jax.Array, Any]:
            y_RO = multiply(add_dependency(x_RI, shard), x_RI, *args)
            return y_RO, (shard, x_RI, *args)

        def backward(arguments: Any, cotangent: jax.Array) -> Any:
            shard, *rest = arguments
            return jax.vjp(multiply, add_dependency(cotangent, shard), *rest)[1](cotangent)

        gather_and_multiply = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
        gather_and_multiply.defvjp(forward, backward)
        y_RO: jax.Array = gather_and_multiply(self, x_RI, *args)
        return y_RO


class FsdpSharder(ParamSharder):
    """Shards parameters as they are read, matrices over `data` as well."""

    def place_weight(self, path: str, weight: Weight) -> Weight:
        return self._shard_over_data(path, super().place_weight(path, weight))

    def place_adapter(self, path: str, weight: Weight) -> Weight:
        return self._shard_over_data(path, super().place_adapter(path, weight))

    def load_tensor(
        self,
        path: str,
        tensor: LazyTensor,
        read: Callable[[LazyTensor], Weight],
        sliceable_axes: tuple[int, ...],
    ) -> Weight:
        return self._shard_over_data(path, super().load_tensor(path, tensor, read, sliceable_axes))

    def _shard_over_data(self, path: str, weight: Weight) -> Weight:
        if isinstance(weight, NotLocal):
            return weight
        split, mesh = self._model.find_rule(path), self.find_mesh(path)
        specs = add_data_axis(
            path, weight, param_specs(path, weight, split, self._axes, None), self._axes
        )
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        placed: Weight = jax.device_put(weight, places)
        return placed


def add_data_axis(path: str, leaf: Any, specs: Any, axes: MeshSpec) -> Any:
    """Add `data` to the specs of a weight's arrays, on one axis of each.

    That is the first axis that nothing else splits, or else one that is already split.

    Raises:
        ConfigError: for a matrix of which no array has an axis that `data` divides.
    """
    if leaf.ndim < 2 or axes.data == 1:
        return specs
    if _is_nested(leaf):
        return specs.replace(weight=add_data_axis(path, leaf.weight, specs.weight, axes))
    pieces = jax.tree.leaves(leaf)
    named = jax.tree.leaves(specs)
    data_specs = [_with_data(x.shape, spec, axes) for x, spec in zip(pieces, named, strict=True)]
    if not any(spec is not None for spec in data_specs):
        raise ConfigError(
            f"{path}: FSDP cannot shard it: no axis of {leaf.shape} is divisible by"
            f" data={axes.data}. Use another size of data, or drop FSDP"
        )
    chosen = [new or old for new, old in zip(data_specs, named, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(leaf), chosen)


def wrap_fsdp(leaf: Any, specs: Any, axes: MeshSpec) -> Any:
    """Wrap a device's part of a weight so that products gather it.

    Each `ShardList` is replaced by the local shard, whether it is split over `data` or not.

    Args:
        specs: as `add_data_axis` returns them.
    """
    if _is_nested(leaf):
        shard = jax.tree.map(
            _local_shard,
            leaf.replace(weight=None),
            is_leaf=lambda x: isinstance(x, ShardList),
        )
        return shard.replace(weight=wrap_fsdp(leaf.weight, specs.weight, axes))
    before = 1 if isinstance(leaf, ShardList) else 0
    shard = _local_shard(leaf)
    cut = tuple(
        next((at - before for at, entry in enumerate(spec) if DATA in _entry_axes(entry)), None)
        for spec in jax.tree.leaves(specs)
    )
    is_cut = any(at is not None for at in cut)
    return FsdpShard(shard, DATA, axes.data, cut) if is_cut else shard


def _is_nested(leaf: Any) -> bool:
    return isinstance(leaf, WeightWrapper) and leaf.allows_composite


def _local_shard(x: Any) -> Any:
    return x.get_shard() if isinstance(x, ShardList) else x


def _entry_axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _with_data(shape: tuple[int, ...], spec: P, axes: MeshSpec) -> P | None:
    entries = [_entry_axes(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    free = sorted(range(len(shape)), key=lambda at: axes.num_shards(entries[at]) > 1)
    for at in free:
        if shape[at] % (axes.num_shards(entries[at]) * axes.data) == 0:
            entries[at] = (*entries[at], DATA)
            return P(*[entry or None for entry in entries])
    return None
