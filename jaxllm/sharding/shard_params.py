"""Sharding of parameters: each device's shard is read, or sliced, and placed, one tensor at a time.

If the shards of a float array are blocks of it, the parameter is an ordinary `jax.Array` with a
`NamedSharding`. In all other cases (quantized, fused of several parts, a vocabulary that does not
divide) each shard is a weight of its own, and the parameter is `ShardList` of them. The matrices of
an adapter are sharded like the weight that they adapt.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxllm.errors import ConfigError
from jaxllm.runtime.multihost import is_multiprocess, to_host
from jaxllm.sharding.mesh_spec import MeshSpec, build_mesh, is_local, submesh
from jaxllm.sharding.model_sharding import ModelSharding
from jaxllm.sharding.partition_rules import EXPERT_AXIS, REPLICATED, PartitionRule
from jaxllm.sharding.shard_list import ShardList, concat_shards, equalize_over_mesh
from jaxllm.weights.formats import Weight, as_weight
from jaxllm.weights.lazy import LazyTensor, concat_tensors
from jaxllm.weights.load import NotLocal, ParamPlacer
from jaxllm.weights.types.base import WeightBase
from jaxllm.weights.types.lora import LoraWeight, strip_adapters
from jaxllm.weights.types.wrapper import WeightWrapper

WrapLeaf = Callable[[str, Any], Any]


@dataclasses.dataclass(frozen=True)
class TensorSplit:
    """How one parameter is split into `num_shards` shards."""

    path: str
    rule: PartitionRule
    size: int  # the length of the axis that is split
    num_shards: int

    @property
    def shard_size(self) -> int:
        """Length of a shard in each fused part."""
        return -(-self.size // (self.rule.fused_parts * self.num_shards))

    @property
    def is_even(self) -> bool:
        """Whether shards are blocks of the array."""
        return self.rule.fused_parts == 1 and self.size % self.num_shards == 0

    def ranges(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield a shard's range in each fused part; beyond the end, that of the last row."""
        for run in range(self.rule.fused_parts):
            begin = run * (self.size // self.rule.fused_parts) + number * self.shard_size
            yield min(begin, self.size - 1), min(begin + self.shard_size, self.size)

    def row_indices(self, number: int) -> np.ndarray:
        """Return a shard's indices, the same number for each shard: the last index is repeated."""
        every = np.concatenate([np.arange(*some) for some in self.ranges(number)])
        return np.pad(every, (0, self.shard_size * self.rule.fused_parts - every.size), mode="edge")

    def take_shard(self, weight: Weight, number: int) -> Weight:
        """Return one shard.

        Raises:
            ConfigError: if the weight's format cannot be sliced there; the message has path and
                axes.
        """
        if self.num_shards == 1:  # any format, sliceable or not
            return weight
        leaf = as_weight(weight)
        with _name_errors(self):
            if self.rule.splits_columns(leaf.ndim):
                ((begin, end),) = self.ranges(number)
                return leaf.with_columns(begin, end)
            return leaf.with_rows(self.row_indices(number))


def plan_split(
    path: str, shape: tuple[int, ...], rule: PartitionRule, axes: MeshSpec
) -> TensorSplit:
    """Plan the split of a parameter. Raises ConfigError for a size that is not divisible."""
    size = shape[rule.split_dim(len(shape))]
    parts = axes.num_shards(rule.axis_names)
    if rule.kind != "vocabulary" and size % (parts * rule.fused_parts):
        over = "x".join(rule.axis_names)
        runs = f" in {rule.fused_parts} fused parts" if rule.fused_parts > 1 else ""
        raise ConfigError(f"{path}: size {size}{runs} is not divisible by {over}={parts}")
    return TensorSplit(path, rule, size, parts)


class ParamSharder(ParamPlacer):
    """Shards parameters over the devices of a mesh as they are read, by the partition rules."""

    def __init__(self, model: ModelSharding) -> None:
        self._model, self._axes = model, model.axes

    def is_local(self, path: str) -> bool:
        return is_local(self.find_mesh(path))

    def place_weight(self, path: str, weight: Weight) -> Weight:
        if not self.is_local(path):
            return NotLocal()  # type: ignore[return-value]
        rule = self._model.find_rule(path)
        if isinstance(weight, LoraWeight):
            base = self._shard_weight(path, strip_adapters(weight), rule)
            return self._place_lora(path, weight, rule, base)
        if isinstance(weight, WeightWrapper) and weight.allows_composite:
            return self._shard_nested(path, weight, rule)
        if rule.is_expert_stack and self._axes.expert > 1:

            def shard(begin: int, end: int, mesh: Mesh) -> Weight:
                experts = jax.tree.map(lambda x: x[begin:end], weight)
                return self._shard_weight(path, experts, rule, mesh)

            return self._shard_experts(path, weight.shape[0], shard)
        return self._shard_weight(path, weight, rule)

    def place_adapter(self, path: str, weight: Weight) -> Weight:
        if not isinstance(weight, LoraWeight):
            return weight
        if not self.is_local(path):
            return NotLocal()  # type: ignore[return-value]
        rule = self._model.find_rule(path)
        return self._place_lora(path, weight, rule, strip_adapters(weight))

    def attach_adapter(self, path: str, weight: Weight, wrap: WrapLeaf) -> Weight:
        """Add an adapter to a weight where it is, and place its arrays.

        Args:
            wrap: wraps the weight at a path of the unsharded model; returns a weight without an
                adapter unchanged.

        Raises:
            ConfigError: if it cannot be placed.
        """
        wrapped = wrap(path, weight)
        if wrapped is weight:
            return weight
        self.check_adapter(path, wrapped)
        return _clear_norms(self.place_adapter(path, wrapped))

    def check_adapter(self, path: str, adapted: LoraWeight) -> None:
        """Raise ConfigError for an adapter that cannot be trained on this mesh."""
        if adapted.dropout and self._axes.sequence > 1:
            raise ConfigError(
                "dropout is drawn for whole texts, but the sequence axis splits them. Drop it, or"
                " use a mesh with sequence=1"
            )
        parts = self._axes.num_shards(self._model.find_rule(path).axis_names)
        if adapted.magnitude is not None and adapted.site == "rows" and parts > 1:
            raise ConfigError(
                f"{path}: DoRA cannot train column norms of a table whose rows are sharded. Remove"
                " it from DoRA's targets, or use a mesh with tensor=1"
            )

    def load_tensor(
        self,
        path: str,
        tensor: LazyTensor,
        read: Callable[[LazyTensor], Weight],
        sliceable_axes: tuple[int, ...],
    ) -> Weight:
        rule = self._model.find_rule(path)
        if rule is REPLICATED or rule.axis not in sliceable_axes:
            return self.place_weight(path, read(tensor))
        if rule.is_expert_stack and self._axes.expert > 1:

            def shard(begin: int, end: int, mesh: Mesh) -> Weight:
                return self._read_shards(path, tensor.rows(begin, end), read, rule, mesh)

            return self._shard_experts(path, tensor.shape[0], shard)
        return self._read_shards(path, tensor, read, rule, self.find_mesh(path))

    def _read_shards(
        self,
        path: str,
        tensor: LazyTensor,
        read: Callable[[LazyTensor], Weight],
        rule: PartitionRule,
        mesh: Mesh,
    ) -> Weight:
        split = plan_split(path, tensor.shape, rule, self._axes)

        def make_shard(number: int) -> Weight:
            if rule.splits_columns(tensor.ndim):
                ((begin, end),) = split.ranges(number)
                return read(tensor.slice_columns(begin, end))
            if tensor.ndim == 3:  # experts: rows are on the second axis
                return read(slice_stack_rows(tensor, *next(split.ranges(number))))
            shard = read(concat_tensors([tensor.rows(*rows) for rows in split.ranges(number)]))
            size = split.shard_size * rule.fused_parts
            if shard.shape[0] == size:
                return shard
            padded: Weight = as_weight(shard).with_rows(
                np.minimum(np.arange(size), shard.shape[0] - 1)
            )
            return padded

        return self._from_shards(split, tensor.shape, make_shard, mesh)

    def _shard_experts(
        self, path: str, count: int, shard: Callable[[int, int, Mesh], Weight]
    ) -> Weight:
        """Place whole experts on the devices that own them, then join them to one stack."""
        size, mesh = count // self._axes.expert, self.find_mesh(path)
        owners = [submesh(mesh, EXPERT_AXIS, i) for i in range(self._axes.expert)]
        parts = [shard(i * size, (i + 1) * size, o) for i, o in enumerate(owners) if is_local(o)]
        axis = 1 if isinstance(parts[0], ShardList) else 0
        joined: Weight = jax.tree.map(
            lambda *arrays: concat_shards(arrays, mesh, EXPERT_AXIS, axis),
            *equalize_over_mesh(mesh, parts),
        )
        return joined

    def find_mesh(self, path: str) -> Mesh:
        """Return the devices that split a parameter."""
        return build_mesh(self._axes)

    def _shard_weight(
        self, path: str, weight: Weight, rule: PartitionRule, mesh: Mesh | None = None
    ) -> Weight:
        mesh = mesh or self.find_mesh(path)
        if rule is REPLICATED:
            placed: Weight = jax.tree.map(partial(replicate, mesh), weight)
            return placed
        split = plan_split(path, weight.shape, rule, self._axes)
        weight = to_host(weight) if is_multiprocess() else weight
        return self._from_shards(split, weight.shape, partial(split.take_shard, weight), mesh)

    def _from_shards(
        self,
        split: TensorSplit,
        shape: tuple[int, ...],
        make_shard: Callable[[int], Weight],
        mesh: Mesh,
    ) -> Weight:
        """Assemble a parameter of `shape` from its shards, which `make_shard` makes one by one."""
        rule = split.rule
        get_shard = cache(make_shard)  # replicas ask for a shard one by one, in any order
        sharding = NamedSharding(mesh, P(rule.axis_names))
        local = sharding.addressable_devices_indices_map((split.num_shards,)).values()
        numbers = sorted({index[0].start or 0 for index in local if index})
        if not isinstance(get_shard(numbers[0]), WeightBase) and split.is_even:
            dim = rule.split_dim(len(shape))

            def get_block(index: Any) -> Any:
                return get_shard((index[dim].start or 0) // split.shard_size)

            spec = block_spec(rule, len(shape))
            return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), get_block)

        def stack_shards(*arrays: jax.Array) -> jax.Array:
            def get_array(index: Any) -> Any:
                return np.asarray(arrays[numbers.index(index[0].start or 0)])[None]

            shape = (split.num_shards, *arrays[0].shape)
            return jax.make_array_from_callback(shape, sharding, get_array)

        shards = jax.tree.map(
            stack_shards, *equalize_over_mesh(mesh, list(map(get_shard, numbers)))
        )
        return ShardList(shards, rule.axis, rule.fused_parts, split.size)

    def _shard_nested(self, path: str, weight: WeightWrapper, rule: PartitionRule) -> Weight:
        """Shard a wrapped weight and each of its extra arrays separately."""
        if rule.axis == 1 and self._axes.num_shards(rule.axis_names) > 1:
            split = plan_split(path, weight.shape, rule, self._axes)
            for number in range(split.num_shards):
                ((begin, end),) = split.ranges(number)
                with _name_errors(split):
                    weight.check_columns(begin, end)
        mesh = self.find_mesh(path)
        return map_nested(
            weight, rule, lambda name, x, rule: self._shard_weight(f"{path}.{name}", x, rule, mesh)
        )

    def _place_lora(
        self, path: str, weight: LoraWeight, rule: PartitionRule, inner: Weight
    ) -> LoraWeight:
        """Shard an adapter's matrices beside `inner`, a weight that is already in place."""
        measured = weight.magnitude is not None and weight.norm is None
        known = weight.replace(norm=weight.norms()) if measured else weight
        fields = {
            name: self._shard_weight(f"{path}.{name}", x, role)
            for name, role in lora_rules(known, rule).items()
            if (x := getattr(known, name)) is not None
        }
        if isinstance(weight.weight, LoraWeight):
            inner = self._place_lora(path, weight.weight, rule, inner)
        adapted: LoraWeight = known.replace(weight=inner, **fields)
        return adapted


def _clear_norms(leaf: Any) -> Any:
    """Clear the norms of a DoRA weight: they change in training and are computed at each use."""
    if not isinstance(leaf, LoraWeight):
        return leaf
    return leaf.replace(norm=None, weight=_clear_norms(leaf.weight))


@contextlib.contextmanager
def _name_errors(split: TensorSplit) -> Iterator[None]:
    """Prefix a ConfigError of the block with the parameter's path and the axes that split it."""
    try:
        yield
    except ConfigError as error:
        over = "x".join(split.rule.axis_names)
        raise ConfigError(f"{split.path} over {over}={split.num_shards}: {error}") from None


def slice_stack_rows(stack: LazyTensor, begin: int, end: int) -> LazyTensor:
    """Slice the rows of each matrix in a stack `[E, O, I]`."""
    experts, _, columns = stack.shape
    shape = (experts, end - begin, columns)

    def parts(rows: int) -> Iterator[np.ndarray]:
        for number in range(experts):
            matrix = stack.rows(number, number + 1).read()[0, begin:end]
            yield from (matrix[at : at + rows] for at in range(0, len(matrix), rows))

    def read() -> np.ndarray:
        each = [stack.rows(i, i + 1).read()[0, begin:end] for i in range(experts)]
        return np.stack(each)

    return LazyTensor(stack.dtype, shape, read, stack.release, parts)


def replicate(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Replicate an array on all devices."""
    sharding = NamedSharding(mesh, P())
    if not is_multiprocess():
        return jax.device_put(x, sharding)
    array = np.asarray(to_host(x))
    return jax.make_array_from_callback(x.shape, sharding, lambda _: array)


def block_spec(rule: PartitionRule, ndim: int) -> P:
    """Return the spec of an array whose shards are blocks of it."""
    if rule is REPLICATED:
        return P()
    before = [None] * rule.split_dim(ndim)
    if rule.is_expert_stack:
        return P(EXPERT_AXIS, *before[1:], rule.axis_names)
    return P(*before, rule.axis_names)


def map_nested(
    weight: Any, rule: PartitionRule, function: Callable[[str, Any, PartitionRule], Any]
) -> Any:
    """Return a wrapper with `function(name, x, rule)` in place of its weight and extra arrays.

    Args:
        rule: that of the weight; extra arrays without its rows and columns are replicated.
    """
    sharded = ("weight", *weight.sliced_fields)
    fields = weight.array_fields()
    return weight.replace(
        **{
            name: function(name, x, rule if name in sharded else REPLICATED)
            for name, x in fields.items()
        }
    )


def lora_rules(weight: LoraWeight, rule: PartitionRule) -> dict[str, PartitionRule]:
    """Return the rules for the arrays of an adapter whose weight has the rule `rule`."""
    fields = dict.fromkeys(("a", "b", "scale", "magnitude", "norm", "owner"), REPLICATED)
    if rule is REPLICATED:
        return fields
    if rule.axis == 1:
        return {**fields, "a": rule}
    if weight.site == "rows":  # its magnitude is per column
        return {**fields, "b": rule}
    several = weight.owner is not None  # magnitudes [n, O]
    if several and rule.fused_parts > 1 and weight.magnitude is not None:
        raise ConfigError(
            "several DoRA adapters of a fused query, key and value matrix cannot be sharded. Load"
            " only one of them"
        )
    vector = rule._replace(kind="row") if several else rule
    return {**fields, "b": rule, "magnitude": vector, "norm": vector}


def bytes_per_device(tree: Any) -> dict[int, int]:
    """Return the bytes of a pytree's arrays on each local device, by device id."""
    sizes: dict[int, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            sizes[shard.device.id] = (
                sizes.get(shard.device.id, 0)
                + math.prod(shard.data.shape) * shard.data.dtype.itemsize
            )
    return sizes
