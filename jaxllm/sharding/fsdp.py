"""Fully sharded data parallelism (FSDP): matrices that are also sharded over the axis `data`.

A stored matrix is split over `data` along one of its axes, in addition to the splits by other mesh
axes. Inside `jax.shard_map` a device's part is a `FsdpShard`, gathered for each product. The
gradient comes back in the same parts, and so does the optimizer state. Vectors are replicated: they
are small, and modules use them directly.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxllm.errors import ConfigError
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import find_rule
from jaxllm.sharding.partition_specs import param_specs
from jaxllm.sharding.shard_params import ParamSharder
from jaxllm.weights.formats import Weight
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.load import NotLocal
from jaxllm.weights.types.fsdp import FsdpShard
from jaxllm.weights.types.tensor_parallel import ShardList
from jaxllm.weights.types.wrapper import WeightWrapper

DATA = "data"


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
        split, mesh = find_rule(self._config, self._exact, path), self._stage_mesh(path)
        specs = add_data_axis(
            path, weight, param_specs(path, weight, split, self._axes, None), self._axes
        )
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
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
    named = jax.tree.leaves(specs, is_leaf=_is_spec)
    found = [_with_data(x.shape, spec, axes) for x, spec in zip(pieces, named, strict=True)]
    if not any(spec is not None for spec in found):
        raise ConfigError(
            f"{path}: FSDP cannot shard it: no axis of {leaf.shape} is divisible by"
            f" data={axes.data}. Use another size of data, or drop FSDP"
        )
    chosen = [new or old for new, old in zip(found, named, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(leaf), chosen)


def wrap_fsdp(leaf: Any, specs: Any, axes: MeshSpec) -> Any:
    """Wrap a device's part of a weight so that products gather it.

    Each `ShardList` is replaced by the local shard, whether it is split over `data` or not.

    Args:
        specs: as `add_data_axis` returns them.
    """
    if _is_nested(leaf):
        mine = jax.tree.map(_local_shard, leaf.replace(weight=None), is_leaf=_is_shard_list)
        return mine.replace(weight=wrap_fsdp(leaf.weight, specs.weight, axes))
    before = 1 if isinstance(leaf, ShardList) else 0
    mine = _local_shard(leaf)
    cut = tuple(
        at if at is None else at - before
        for at in map(_data_axis, jax.tree.leaves(specs, is_leaf=_is_spec))
    )
    return mine if not any(at is not None for at in cut) else FsdpShard(mine, DATA, axes.data, cut)


def _is_nested(leaf: Any) -> bool:
    return isinstance(leaf, WeightWrapper) and leaf.allows_composite


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _is_shard_list(x: Any) -> bool:
    return isinstance(x, ShardList)


def _local_shard(x: Any) -> Any:
    return x.get_shard() if isinstance(x, ShardList) else x


def _entry_axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _data_axis(spec: P) -> int | None:
    return next((at for at, entry in enumerate(spec) if DATA in _entry_axes(entry)), None)


def _with_data(shape: tuple[int, ...], spec: P, axes: MeshSpec) -> P | None:
    entries = [_entry_axes(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    free = sorted(range(len(shape)), key=lambda at: axes.num_shards(entries[at]) > 1)
    for at in free:
        if shape[at] % (axes.num_shards(entries[at]) * axes.data) == 0:
            entries[at] = (*entries[at], DATA)
            return P(*[entry or None for entry in entries])
    return None
