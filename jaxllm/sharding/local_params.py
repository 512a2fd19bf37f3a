"""The parameters of one device: its shard of each, in the form that the module takes.

Outside of `jax.shard_map` a parameter is one array over the whole mesh, or one of `ShardList`.
Inside, it is an ordinary weight of the module, wrapped in a parallel weight
(`sharding.tensor_parallel`) if a product needs communication.
"""

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import models
from jaxllm.sharding import partition_specs
from jaxllm.sharding.expert_parallel import ExpertParallel
from jaxllm.sharding.fsdp import add_data_axis, wrap_fsdp
from jaxllm.sharding.model_sharding import ModelSharding
from jaxllm.sharding.partition_rules import EXPERT_AXIS, HEAD_AXES, AxisNames, PartitionRule
from jaxllm.sharding.tensor_parallel import (
    ReplicatedTable,
    RowParallel,
    RowParallelExact,
    SequenceSlice,
    ShardedNorm,
    VocabParallel,
)
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.types.lora import LoraWeight


@dataclasses.dataclass(frozen=True)
class LocalParams:
    """The parameters of a sharded model, as one device has them.

    Attributes:
        params: Global, as passed to `shard_map`.
        row_axes: The axes that split the rows of the call.
        token_slice: A device's tokens between linears (`context_parallel.sequence_parallel`); None:
            all.
    """

    model: ModelSharding
    params: Params
    row_axes: partition_specs.RowAxes
    token_slice: SequenceSlice | None = None

    @cached_property
    def specs(self) -> Params:
        """The `in_specs` of the parameters for `jax.shard_map`."""
        return map_leaves(self.find_specs, self.params)

    def __call__(self, params: Params) -> Params:
        """Convert local shards to the module's parameters, inside `shard_map`."""
        return map_leaves(self.wrap_leaf, params)

    def wrap_leaf(self, path: str, part: Any) -> Any:
        """Convert one parameter's shard."""
        rule = self.model.find_rule(path)
        weight = self._wrap_parallel(rule, path, self.local_shard(path, part))
        if not rule.is_expert_stack or self.model.axes.expert == 1:
            return weight
        return ExpertParallel(weight, EXPERT_AXIS, EXPERT_AXIS in (self.row_axes or ()))

    def local_shard(self, path: str, part: Any) -> Any:
        """Return the shard of one parameter, without the wrapper that reduces its products."""
        return wrap_fsdp(part, self.specs_by_path[path], self.model.axes)

    def _wrap_parallel(self, rule: PartitionRule, path: str, shard: Any) -> Any:
        """Wrap a shard in the parallel weight that its partition rule needs."""
        config, axis_names = self.model.config, rule.axis_names
        num_shards = self.model.axes.num_shards(axis_names)
        column_axes = axis_names if rule.kind == "row" and num_shards > 1 else ()
        shard = _set_sharded_axes(shard, (self.row_axes or (), column_axes))
        position_table = models.get_family(config.model_type).position_table
        if self.token_slice is not None and path == f"{position_table}.weight":
            return ReplicatedTable(shard, self.token_slice)
        if rule.kind == "first" and self.model.axes.num_shards(HEAD_AXES) > 1:
            return jnp.where(jax.lax.axis_index(HEAD_AXES) == 0, shard, jnp.zeros_like(shard))
        if num_shards == 1:
            return shard
        if rule.kind == "row":
            return RowParallel(shard, axis_names, self.token_slice)
        if rule.kind == "gathered":
            return RowParallelExact(shard, axis_names, num_shards)
        if rule.kind == "vocabulary":
            table = shard, axis_names, config.vocab_size, self.token_slice
            return VocabParallel(*table, keep_sharded=self.model.sharded_logits)
        return ShardedNorm(shard, axis_names, self.model.exact) if rule.kind == "norm" else shard

    @cached_property
    def specs_by_path(self) -> dict[str, Any]:
        return dict(flatten(self.specs))

    def find_specs(self, path: str, leaf: Any) -> Any:
        """Return the specs of one parameter's arrays."""
        rule, axes = self.model.find_rule(path), self.model.axes
        specs = partition_specs.param_specs(path, leaf, rule, axes, self.row_axes)
        return add_data_axis(path, leaf, specs, axes) if self.model.fsdp else specs


def _set_sharded_axes(leaf: Any, sharded_axes: tuple[AxisNames, AxisNames]) -> Any:
    """Set the mesh axes that split rows and columns in adapted weights."""
    if not isinstance(leaf, LoraWeight):
        return leaf
    return leaf.replace(
        sharded_axes=sharded_axes, weight=_set_sharded_axes(leaf.weight, sharded_axes)
    )
