"""`PartitionSpec`s for all inputs and outputs of a model on a mesh.

`rows` are always the axes that split the rows of a batch; None: rows are replicated.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxllm.cache.kv import Segment
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.layers import AttentionOutput, Layer, Trace
from jaxllm.models.site_inputs import layer_sites
from jaxllm.models.sites import MODEL_SITES, SITES
from jaxllm.runtime.multihost import is_multiprocess
from jaxllm.sharding.context_parallel.dispatch import AXIS as SEQUENCE
from jaxllm.sharding.mesh_spec import MeshSpec, build_mesh
from jaxllm.sharding.partition_rules import (
    EXPERT_AXIS,
    HEAD_AXES,
    KV_HEAD_AXES,
    STAGE_AXES,
    AxisNames,
    PartitionRule,
)
from jaxllm.sharding.shard_list import ShardList
from jaxllm.sharding.shard_params import block_spec, lora_rules, map_nested
from jaxllm.weights.types.base import WeightBase
from jaxllm.weights.types.lora import LoraWeight
from jaxllm.weights.types.wrapper import WeightWrapper

RowAxes = tuple[str, ...] | None
KEYS_VALUES = r"(tail|frozen\.\d+)\.[kv]\."
MODEL_ONLY = rf"{KEYS_VALUES}|state\."  # arrays that only the model reads, never the host
TOKEN_FIELDS = ("position_BS", "token_BS", "patched_BS")
ROW_AXES = (("data", "expert"), ("data",))  # the first whose size divides the batch is used


def find_row_axes(axes: MeshSpec, batch: int) -> RowAxes:
    """Return the axes that split a batch of rows; None: every device runs all rows.

    These are `data` and `expert` if they divide it, or else `data` alone.
    """
    return next((over for over in ROW_AXES if batch % axes.num_shards(over) == 0), None)


def param_specs(path: str, leaf: Any, rule: PartitionRule, axes: MeshSpec, rows: RowAxes) -> Any:
    """Return the specs of a parameter's arrays. Raises ConfigError if it should be sharded."""
    if isinstance(leaf, LoraWeight):
        fields = {
            name: None if x is None else param_specs(f"{path}.{name}", x, role, axes, rows)
            for name, role in lora_rules(leaf, rule).items()
            for x in [getattr(leaf, name)]
        }
        some = leaf.choice is not None and leaf.choice.shape[0] > 1
        choice = None if leaf.choice is None else P(rows) if some else P()
        key = None if leaf.key is None else P()
        inner = param_specs(path, leaf.weight, rule, axes, rows)
        return leaf.replace(weight=inner, choice=choice, key=key, **fields)
    if isinstance(leaf, WeightWrapper) and leaf.allows_composite:
        return map_nested(
            leaf,
            rule,
            lambda name, x, rule: param_specs(f"{path}.{name}", x, rule, axes, rows),
        )
    parts = axes.num_shards(rule.axis_names)
    if isinstance(leaf, ShardList):
        stack = (EXPERT_AXIS,) if rule.is_expert_stack else ()
        return jax.tree.map(lambda _: P(rule.axis_names, *stack), leaf)
    if parts == 1:
        return jax.tree.map(lambda _: P(EXPERT_AXIS) if rule.is_expert_stack else P(), leaf)
    size = leaf.shape[rule.split_dim(leaf.ndim)]
    if isinstance(leaf, WeightBase) or rule.fused_parts > 1 or size % parts:
        raise ConfigError(
            f"{path} is not sharded, but the model expects shards. Load it with mesh=, or shard the"
            " parameters with model.shard"
        )
    return block_spec(rule, leaf.ndim)


def cache_head_axes(axes: MeshSpec) -> tuple[str, ...]:
    """Return the axes that split the heads of a cache, where layers are joined, too."""
    return (*STAGE_AXES, *KV_HEAD_AXES, *((SEQUENCE,) if axes.use_ulysses else ()))


def slot_axis(axes: MeshSpec, slots: int) -> str | None:
    """Return the axis that splits `slots` slots; None: they are not split.

    They are not if the axis does not divide them, or splits heads.
    """
    if axes.sequence == 1 or axes.use_ulysses or slots % axes.sequence:
        return None
    return SEQUENCE


def replicate_for_host(x: jax.Array, axes: MeshSpec, spec: P = P()) -> jax.Array:  # noqa: B008  a constant
    """Replicate an array that each of several processes reads on its host.

    The axes in `spec` stay sharded.
    """
    if not is_multiprocess():
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(build_mesh(axes), spec))


def column_axes(name: str, axis: str | None) -> tuple[str | None, ...]:
    """Return the axes after the rows in the spec of a by-row input."""
    return (axis,) if name.endswith(("_BT", "_BTD")) else ()


def cache_spec(path: str, array: Any, rows: RowAxes, axes: MeshSpec) -> P:
    """Return the spec of a cache array: keys, values and memories by key/value head, or by slots.

    Arrays that tell where tokens are get read on the host too, so every process has all of them.
    """
    if array.ndim == 0 or (is_multiprocess() and not re.match(MODEL_ONLY, path)):
        return P()
    if re.match(KEYS_VALUES, path):
        return P(rows, slot_axis(axes, array.shape[1]), cache_head_axes(axes))
    return P(rows, KV_HEAD_AXES) if path.startswith("state.") and array.ndim > 1 else P(rows)


def segment_specs(segment: Segment, batch: int, rows: RowAxes, axes: MeshSpec) -> Any:
    """Return the specs of a segment. An array that all rows share is replicated over `rows`."""
    slots = slot_axis(axes, segment.position_BS.shape[1])

    def row_axes_of(x: Any) -> RowAxes:
        return rows if x.shape[0] == batch else None

    fields: dict[str, Any] = {
        **{name: P(row_axes_of(segment.k[0]), slots, cache_head_axes(axes)) for name in ("k", "v")},
        **{n: P(row_axes_of(getattr(segment, n)), slots) for n in TOKEN_FIELDS},
    }
    return Segment(**fields)


def state_specs(config: ModelConfig, rows: RowAxes) -> tuple[Any, ...]:
    """Return the specs of what layers store besides keys and values; None for nothing."""
    return tuple(
        jax.tree.map(lambda x: P(rows, KV_HEAD_AXES) if x.ndim else P(rows), config.state_shape(i))
        for i in range(config.num_hidden_layers)
    )


def trace_specs(
    config: ModelConfig,
    rows: RowAxes,
    axes: MeshSpec,
    split: str | None = None,
    *,
    layers: Sequence[int],
    single_column: bool,
    vocab_axes: AxisNames,
    read: frozenset[str],
) -> Any:
    """Return the specs of a model's trace.

    Args:
        split: the axis that splits tokens.
        layers: the numbers of the layers of the first devices of `STAGE_AXES`. The others' arrays
            are concatenated with theirs on the axis of heads or features (for mass: slots).
        single_column: whether logits are of one column.
        vocab_axes: the axes that split logits.
        read: the sites that are read.
    """
    stream, each = P(rows, split), P(rows, split, STAGE_AXES)
    entries = P(rows, None if axes.use_ulysses else split, cache_head_axes(axes))
    states, layer_traces = state_specs(config, rows), list[Any]()
    for number in layers:
        attended: list[Any] = [entries, entries, each, P(rows, STAGE_AXES), states[number]]
        sites = {
            x: site_spec(x, rows, split) for x in read.intersection(layer_sites(config, number))
        }
        x: Any = each
        layer_traces.append(Layer(AttentionOutput(*attended), x, sites))
    logits: Any = P(rows, None if single_column else split, vocab_axes or None)
    spec: Any = stream
    own: Any = {site: spec for site in read.intersection(MODEL_SITES)}
    return Trace(embeddings=spec, layers=tuple(layer_traces), norm=spec, logits=logits, sites=own)


def site_spec(site: str, rows: RowAxes, split: str | None) -> Any:
    """Return the spec of the array at a layer's site, as for `trace_specs`."""
    axes, at = SITES[site].axes, feature_axis(site)
    over = {"N": HEAD_AXES, "F": HEAD_AXES, "K": KV_HEAD_AXES}.get(axes[at], ())
    split_axes: dict[int, Any] = {0: rows, axes.index("T"): split, at: (*STAGE_AXES, *over)}
    return P(*(split_axes[i] for i in range(3)))


def feature_axis(site: str) -> int:
    """Return the axis of heads or features of the array at a layer's site."""
    return 1 if SITES[site].axes.startswith("BN") else 2
