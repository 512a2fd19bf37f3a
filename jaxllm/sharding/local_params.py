"""The parameters of one device: its shard of each, in the form that the module takes.

Outside of `jax.shard_map` a parameter is one array over the whole mesh, or one of `ShardList`.
Inside, it is an ordinary weight of the module, wrapped in a parallel weight
(`sharding.tensor_parallel`) if a product needs communication.
"""

import dataclasses
from functools import cached_property
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxllm import models
from jaxllm.config.model import ModelConfig
from jaxllm.sharding import partition_specs
from jaxllm.sharding.expert_parallel import ExpertParallel
from jaxllm.sharding.fsdp import add_data_axis, wrap_fsdp
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import EXPERT_AXIS, AxisNames, PartitionRule, find_rule
from jaxllm.sharding.pipeline.stage_params import stacked_specs
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
    """The parameters of a sharded model, as one device has them."""

    config: ModelConfig
    axes: MeshSpec
    exact: bool
    fsdp: bool
    params: Params  # global, as passed to `shard_map`
    row_axes: partition_specs.RowAxes  # the axes that split the rows of the call
    token_slice: SequenceSlice | None = (
        None  # a device's tokens between linears (`megatron`); None: all
    )
    sharded_logits: bool = False

    @cached_property
    def specs(self) -> Params:
        """The `in_specs` of the parameters for `jax.shard_map`."""
        return map_leaves(self._spec, self.params)

    def __call__(self, params: Params) -> Params:
        """Convert local shards to the module's parameters, inside `shard_map`."""
        return map_leaves(self.wrap_leaf, params)

    def wrap_leaf(self, path: str, part: Any) -> Any:
        """Convert one parameter's shard."""
        split = find_rule(self.config, self.exact, path)
        mine = self._wrap_parallel(split, path, self.local_shard(path, part))
        if not split.is_expert_stack or self.axes.expert == 1:
            return mine
        return ExpertParallel(
            mine,
            EXPERT_AXIS,
            rows_sharded=self.row_axes is not None and EXPERT_AXIS in self.row_axes,
        )

    def local_shard(self, path: str, part: Any) -> Any:
        """Return the shard of one parameter, without the wrapper that reduces its products."""
        spec = self._specs_by_path[path]
        if is_staged(self.config, self.axes, path):
            part = jax.tree.map(lambda x: x[0], part)
            spec = jax.tree.map(lambda s: P(*s[1:]), spec, is_leaf=lambda s: isinstance(s, P))
        return wrap_fsdp(part, spec, self.axes)

    def _wrap_parallel(self, split: PartitionRule, path: str, mine: Any) -> Any:
        """Wrap a shard in the parallel weight that its partition rule needs."""
        over, parts = split.axis_names, self.axes.num_shards(split.axis_names)
        mine = _set_sharded_axes(
            mine, (self.row_axes or (), over if split.kind == "row" and parts > 1 else ())
        )
        if (
            self.token_slice is not None
            and path == f"{models.get_family(self.config.model_type).position_table}.weight"
        ):
            return ReplicatedTable(mine, self.token_slice)
        if parts == 1:
            return mine
        if split.kind == "row":
            return RowParallel(mine, over, self.token_slice)
        if split.kind == "gathered":
            return RowParallelExact(mine, over, parts)
        if split.kind == "vocabulary":
            size, apart = self.config.vocab_size, self.sharded_logits
            return VocabParallel(mine, over, size, self.token_slice, apart)
        return ShardedNorm(mine, over, self.exact) if split.kind == "norm" else mine

    @cached_property
    def _specs_by_path(self) -> dict[str, Any]:
        return dict(flatten(self.specs))

    def _spec(self, path: str, leaf: Any) -> Any:
        split = find_rule(self.config, self.exact, path)

        def make_spec(leaf: Any) -> Any:
            found = partition_specs.param_specs(path, leaf, split, self.axes, self.row_axes)
            return add_data_axis(path, leaf, found, self.axes) if self.fsdp else found

        return (
            stacked_specs(leaf, make_spec)
            if is_staged(self.config, self.axes, path)
            else make_spec(leaf)
        )


def is_staged(config: ModelConfig, axes: MeshSpec, path: str) -> bool:
    """Return whether the parameter at `path` is a stack with one entry per stage."""
    return axes.stage > 1 and path.startswith(f"{models.get_family(config.model_type).layers}.")


def _set_sharded_axes(leaf: Any, sharded_axes: tuple[AxisNames, AxisNames]) -> Any:
    """Set the mesh axes that split rows and columns in adapted weights."""
    if not isinstance(leaf, LoraWeight):
        return leaf
    return leaf.replace(
        sharded_axes=sharded_axes, weight=_set_sharded_axes(leaf.weight, sharded_axes)
    )
