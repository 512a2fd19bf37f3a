"""The table of partition rules: how each parameter of each family is sharded.

Rows are `(regex, Split)`, as in all tables by path: the first that matches a parameter wins, and a
parameter without a match is refused. They are derived from a family's metadata (`Family.heads`,
`channels`, `experts`, `norms`, `tables`), so a new family brings its shardings with it.
"""

import copy
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

from jaxllm import models
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.models.family import Member
from jaxllm.weights.paths import first_match

Over = tuple[str, ...]
Kind = Literal["whole", "column", "row", "gathered", "vocabulary", "norm"]

HEADS: Over = ("tensor", "copies")  # query heads, MLP channels, tokens: all devices of both
GROUPS: Over = ("tensor",)  # key/value heads
STAGES: Over = ("stage",)  # layers
EXPERTS = "expert"
TOKENS: Over = (*HEADS, *STAGES)  # the vocabulary: all stages look tokens up and compute logits


class Split(NamedTuple):
    """How a parameter is sharded.

    Kinds: "whole": replicated. "column": output rows of a linear (Megatron's column parallel:
    columns of `[I, O]`). "row": input columns, whose products are summed. "gathered": output rows
    of such a linear, in the exact mode. "vocabulary": rows of the embedding table or of the head.
    "norm": a norm over all heads.
    """

    kind: Kind = "whole"
    over: Over = ()  # the mesh axes that split it
    runs: int = 1  # fused parts, one after the other, each of which is sharded
    stack: bool = False  # a stack of experts; whole experts are split over `EXPERTS` first

    @property
    def axis(self) -> int:
        """0: split by rows of `[..., O, I]`, or a vector; 1: by columns."""
        return 1 if self.kind == "row" else 0


WHOLE = Split()


@cache
def rules(config: ModelConfig, exact: bool = False) -> tuple[tuple[str, Split], ...]:
    """Return the partition rules of a model's parameters."""
    return tuple((regex, split) for regex, split in _rules(config, exact))


def _rules(config: ModelConfig, exact: bool) -> Iterator[tuple[str, Split]]:
    f = models.family(config.model_type)
    layer = rf"{re.escape(f.layers)}\.\d+\."
    vocabulary = Split("vocabulary", TOKENS)
    yield rf"{re.escape(f.tokens)}\.weight", vocabulary
    yield r"lm_head\.weight", vocabulary
    if f.positions is not None:
        yield rf"{re.escape(f.positions)}\.weight", WHOLE

    def over(member: Member) -> Over:
        return GROUPS if member.grouped else HEADS

    for member in f.norms:
        yield rf"{layer}{re.escape(member.linear)}\.weight", Split("norm", over(member))
    for member in (*f.heads, *f.channels, *f.experts):
        path = layer + re.escape(member.linear)
        stack = member.linear.startswith("mlp.experts.")
        if member.axis == 0:
            column = Split("column", over(member), member.runs, stack)
            yield rf"{path}\.(weight|bias)", column
        else:
            kind: Kind = "gathered" if exact else "row"
            yield rf"{path}\.weight", Split(kind, over(member), stack=stack)
            yield rf"{path}\.bias", WHOLE  # added once, to the sum of all products
    yield rf"{layer}.*\.memory_gate", Split("column", HEADS)
    if f.router is not None:
        yield rf"{layer}{re.escape(f.router)}\.weight", WHOLE
    yield r"(.*\.)?[^.]*(norm|ln_)[^.]*\.(weight|bias)", WHOLE


@cache
def split_of(config: ModelConfig, exact: bool, path: str) -> Split:
    """Return the partition rule of the parameter at `path`. Raises ConfigError if there is none."""
    found = first_match(rules(config, exact), path)
    if found is None:
        raise ConfigError(
            f"{path}: no partition rule of {config.model_type} matches this parameter"
        )
    return found


def fitted(axes: Axes, config: ModelConfig) -> Axes:
    """Set `copies` as the model's key/value heads need it.

    Raises:
        ConfigError: for a size that is not divisible by its axis; the message names both.
    """
    over = axes.tensor * axes.copies
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    kind = config.long_attention(0)
    if kind is not None and kind.kind == "dilated" and over > 1:
        raise ConfigError(
            "attention of kind 'dilated' depends on head numbers, which a shard of the heads does"
            f" not have: mesh {axes} must have tensor=1"
        )
    experts = getattr(config, "num_experts", 1)
    if experts % axes.expert:
        what = f"num_experts {experts}" if experts > 1 else f"{config.model_type} without experts"
        raise ConfigError(f"{what} is not divisible by expert={axes.expert}")
    apart = axes.over(("data", "sequence", "expert"))
    if getattr(config, "capacity_factor", None) is not None and apart > 1:
        raise ConfigError(
            "capacity_factor counts the tokens of all rows, but each device has only its own. Drop"
            " it, or use a mesh with data=1, sequence=1 and expert=1"
        )
    counts = {"num_attention_heads": heads} | {
        name: getattr(config, name) for name in models.family(config.model_type).widths
    }
    for name, count in counts.items():
        if count % over:
            raise ConfigError(f"{name} {count} is not divisible by tensor={over}")
    if groups % over == 0:
        return dataclasses.replace(axes, tensor=over, copies=1)
    if over % groups:
        raise ConfigError(
            f"num_key_value_heads {groups} is not divisible by tensor={over}, nor {over} by"
            f" {groups}"
        )
    return dataclasses.replace(axes, tensor=groups, copies=over // groups)


def share_of(config: ModelConfig, axes: Axes) -> ModelConfig:
    """Return the configuration that one device runs, with its share of heads and MLP channels.

    It is not a valid configuration of a whole model, so it bypasses the checks.
    """
    over, share = axes.over(HEADS), copy.copy(config)
    counts = {
        "num_attention_heads": config.num_attention_heads // over,
        "num_key_value_heads": config.num_key_value_heads // axes.over(GROUPS),
    }
    for name in models.family(config.model_type).widths:
        counts[name] = getattr(config, name) // over
    for name, count in counts.items():
        object.__setattr__(share, name, count)  # a frozen class, but a copy that is still private
    return share
