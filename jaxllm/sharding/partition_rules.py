"""The table of partition rules: how each parameter of each family is sharded.

Rows are `(regex, Split)`, as in all tables by path: the first that matches a parameter wins, and a
parameter without a match is refused. They are derived from a family's metadata
(`Family.head_linears`, `channels`, `experts`, `norms`, `embedding_tables`), so a new family brings
its shardings with it.
"""

import copy
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

from jaxllm import models
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.family import ParallelLinear
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.weights.paths import first_match

AxisNames = tuple[str, ...]
PartitionKind = Literal["whole", "column", "row", "gathered", "vocabulary", "norm", "first"]

HEAD_AXES: AxisNames = (
    "tensor",
    "kv_replicas",
)  # query heads, MLP channels, tokens: all devices of both
KV_HEAD_AXES: AxisNames = ("tensor",)  # key/value heads
STAGE_AXES: AxisNames = ("stage",)  # layers
EXPERT_AXIS = "expert"
VOCAB_AXES: AxisNames = (
    *HEAD_AXES,
    *STAGE_AXES,
)  # the vocabulary: all stages look tokens up and compute logits


class PartitionRule(NamedTuple):
    """How a parameter is sharded.

    Kinds: "whole": replicated. "column": output rows of a linear (Megatron's column parallel:
    columns of `[I, O]`). "row": input columns, whose products are summed. "gathered": output rows
    of such a linear, in the exact mode. "vocabulary": rows of the embedding table or of the head.
    "norm": a norm over all heads. "first": zeros on all devices of `HEAD_AXES` but the first.
    """

    kind: PartitionKind = "whole"
    axis_names: AxisNames = ()  # the mesh axes that split it
    fused_parts: int = 1  # fused parts, one after the other, each of which is sharded
    is_expert_stack: bool = (
        False  # a stack of experts; whole experts are split over `EXPERT_AXIS` first
    )

    @property
    def axis(self) -> int:
        """0: split by rows of `[..., O, I]`, or a vector; 1: by columns."""
        return 1 if self.kind == "row" else 0

    def split_dim(self, ndim: int) -> int:
        """Return which axis it splits of an array with `ndim` axes."""
        return ndim - (1 if self.axis or ndim == 1 + self.is_expert_stack else 2)

    def splits_columns(self, ndim: int) -> bool:
        """Return whether it splits the columns of an array with `ndim` axes."""
        return ndim > 1 and self.split_dim(ndim) == ndim - 1


REPLICATED = PartitionRule()


@cache
def partition_rules(
    config: ModelConfig, exact: bool = False
) -> tuple[tuple[str, PartitionRule], ...]:
    """Return the partition rules of a model's parameters."""
    return tuple((regex, split) for regex, split in _iter_rules(config, exact))


def _iter_rules(config: ModelConfig, exact: bool) -> Iterator[tuple[str, PartitionRule]]:
    f = models.get_family(config.model_type)
    layer = rf"{re.escape(f.layers)}\.\d+\."
    vocabulary = PartitionRule("vocabulary", VOCAB_AXES)
    yield rf"{re.escape(f.token_table)}\.weight", vocabulary
    yield r"lm_head\.weight", vocabulary
    yield r"score\.weight", REPLICATED
    if f.position_table is not None:
        yield rf"{re.escape(f.position_table)}\.weight", REPLICATED

    def member_axes(member: ParallelLinear) -> AxisNames:
        return KV_HEAD_AXES if member.kv_heads_only else HEAD_AXES

    for member in f.head_norms:
        yield (
            rf"{layer}{re.escape(member.linear)}\.weight",
            PartitionRule("norm", member_axes(member)),
        )
    for member in (*f.head_linears, *f.channel_linears, *f.expert_linears):
        path = layer + re.escape(member.linear)
        stack = member.linear.startswith("mlp.experts.")
        if member.axis == 0:
            column = PartitionRule("column", member_axes(member), member.fused_parts, stack)
            yield rf"{path}\.(weight|bias)", column
        else:
            kind: PartitionKind = "gathered" if exact else "row"
            yield (
                rf"{path}\.weight",
                PartitionRule(kind, member_axes(member), is_expert_stack=stack),
            )
            # Added once, to the sum of all products; those of experts, before it.
            bias = PartitionRule("whole" if exact else "first", is_expert_stack=True)
            yield rf"{path}\.bias", bias if stack else REPLICATED
    attention = config.attention
    for name in () if attention is None else attention.head_params:
        yield rf"{layer}.*\.{re.escape(name)}", PartitionRule("column", HEAD_AXES)
    if f.router is not None:
        yield rf"{layer}({re.escape(f.router)}\.(weight|bias)|mlp\.selection\.bias)", REPLICATED
    yield r"(.*\.)?[^.]*(norm|ln_)[^.]*\.(weight|bias)", REPLICATED


@cache
def find_rule(config: ModelConfig, exact: bool, path: str) -> PartitionRule:
    """Return the partition rule of the parameter at `path`. Raises ConfigError if there is none."""
    rule = first_match(partition_rules(config, exact), path)
    if rule is None:
        raise ConfigError(
            f"{path}: no partition rule of {config.model_type} matches this parameter"
        )
    return rule


def resolve_mesh(axes: MeshSpec, config: ModelConfig) -> MeshSpec:
    """Set `kv_replicas` as the model's key/value heads need it.

    Raises:
        ConfigError: for a size that is not divisible by its axis; the message names both.
    """
    over = axes.tensor * axes.kv_replicas
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    kind = config.attention
    if kind is not None and not kind.shards_heads and over > 1:
        raise ConfigError(
            f"attention of kind {kind.kind!r} depends on head numbers, which a shard of the heads"
            f" does not have: mesh {axes} must have tensor=1"
        )
    if config.kv_heads(0) and not config.value_heads(0) and axes.num_devices > 1:
        raise ConfigError(
            f"{config.model_type} has latent attention, which runs on one device. Drop mesh {axes}"
        )
    if config.has_state and config.segment_length is None and axes.num_devices > 1:
        raise ConfigError(
            f"{config.model_type} has recurrent layers, which run on one device. Drop mesh {axes}"
        )
    if (config.links_layers or len(config.head_dims) > 1) and axes.num_devices > 1:
        raise ConfigError(
            f"{config.model_type} has heads of several sizes, or layers without their own keys,"
            f" which run on one device. Drop mesh {axes}"
        )
    experts = getattr(config, "num_experts", 1)
    if experts % axes.expert:
        what = f"num_experts {experts}" if experts > 1 else f"{config.model_type} without experts"
        raise ConfigError(f"{what} is not divisible by expert={axes.expert}")
    apart = axes.num_shards(("data", "sequence", "expert"))
    if getattr(config, "capacity_factor", None) is not None and apart > 1:
        raise ConfigError(
            "capacity_factor counts the tokens of all rows, but each device has only its own. Drop"
            " it, or use a mesh with data=1, sequence=1 and expert=1"
        )
    counts = {"num_attention_heads": heads} | {
        name: getattr(config, name) for name in models.get_family(config.model_type).width_fields
    }
    for name, count in counts.items():
        if count % over:
            raise ConfigError(f"{name} {count} is not divisible by tensor={over}")
    if groups % over == 0:
        return dataclasses.replace(axes, tensor=over, kv_replicas=1)
    if over % groups:
        raise ConfigError(
            f"num_key_value_heads {groups} is not divisible by tensor={over}, nor {over} by"
            f" {groups}"
        )
    return dataclasses.replace(axes, tensor=groups, kv_replicas=over // groups)


def local_config(config: ModelConfig, axes: MeshSpec) -> ModelConfig:
    """Return the configuration that one device runs, with its share of heads and MLP channels.

    It is not a valid configuration of a whole model, so it bypasses the checks.
    """
    over, share = axes.num_shards(HEAD_AXES), copy.copy(config)
    counts = {
        "num_attention_heads": config.num_attention_heads // over,
        "num_key_value_heads": config.num_key_value_heads // axes.num_shards(KV_HEAD_AXES),
    }
    for name in models.get_family(config.model_type).width_fields:
        counts[name] = getattr(config, name) // over
    for name, count in counts.items():
        object.__setattr__(share, name, count)  # a frozen class, but a copy that is still private
    return share
