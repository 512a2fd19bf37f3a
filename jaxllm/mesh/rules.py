"""The one table of shardings: for every parameter of every family, what of it a device has.

Rows are `(regex, Split)`, as everywhere that goes by path: the first that names a parameter wins,
one that none names is refused. They are made of what a family's row says of itself (`Family.heads`,
`channels`, `experts`, `norms`, `tables`), so that a new family brings its shardings with it.
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

HEADS: Over = ("tensor", "copies")  # query heads, hidden numbers, tokens: all devices of both
GROUPS: Over = ("tensor",)  # key/value heads
STAGES: Over = ("stage",)  # layers
EXPERTS = "expert"
TOKENS: Over = (*HEADS, *STAGES)  # of the vocabulary: all stages look them up, and make logits


class Split(NamedTuple):
    """What a device has of a parameter.

    kind: "whole": all of it. "column": rows of a linear, outputs of its own (Megatron's column
    parallel: columns of `[I, O]`). "row": columns, whose products are summed. "gathered": rows of
    such a one, in the exact mode. "vocabulary": rows of a table, or of the head. "norm": of a norm
    over all heads. over: the axes that divide it. runs: how many runs of all shares stand one after
    the other in it, of each of which a device has its part. stack: whether it is of experts, whole
    ones of which are divided over `EXPERTS` before.
    """

    kind: Kind = "whole"
    over: Over = ()
    runs: int = 1
    stack: bool = False

    @property
    def axis(self) -> int:
        """0: what is split is rows `[..., O, I]`, or a vector; 1: columns."""
        return 1 if self.kind == "row" else 0


WHOLE = Split()


@cache
def rules(config: ModelConfig, exact: bool = False) -> tuple[tuple[str, Split], ...]:
    """The table of a model's parameters."""
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
            yield rf"{path}\.bias", WHOLE  # of the sum of all products: added once
    yield rf"{layer}.*\.memory_gate", Split("column", HEADS)
    if f.router is not None:
        yield rf"{layer}{re.escape(f.router)}\.weight", WHOLE
    yield r"(.*\.)?[^.]*(norm|ln_)[^.]*\.(weight|bias)", WHOLE


@cache
def split_of(config: ModelConfig, exact: bool, path: str) -> Split:
    """What a device has of the parameter at `path`. Raises ConfigError where no rule names it."""
    found = first_match(rules(config, exact), path)
    if found is None:
        raise ConfigError(
            f"{path}: no rule says how it is split over devices ({config.model_type})"
        )
    return found


def fitted(axes: Axes, config: ModelConfig) -> Axes:
    """The axes with `copies` as this model's key/value heads need them.

    Raises ConfigError for what does not divide, by name, size and axis.
    """
    over = axes.tensor * axes.copies
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    kind = config.long_attention(0)
    if kind is not None and kind.kind == "dilated" and over > 1:
        raise ConfigError(
            "attention of kind 'dilated' goes by the numbers of its heads, which a part of them"
            f" does not know: mesh {axes} must have tensor=1"
        )
    experts = getattr(config, "num_experts", 1)
    if experts % axes.expert:
        what = f"num_experts {experts}" if experts > 1 else f"{config.model_type} without experts"
        raise ConfigError(f"{what} does not divide over expert={axes.expert}")
    apart = axes.over(("data", "sequence", "expert"))
    if getattr(config, "capacity_factor", None) is not None and apart > 1:
        raise ConfigError(
            "capacity_factor counts the tokens of all rows, and each device has some of its own:"
            " leave it out, or use a mesh with data=1, sequence=1 and expert=1"
        )
    counts = {"num_attention_heads": heads} | {
        name: getattr(config, name) for name in models.family(config.model_type).widths
    }
    for name, count in counts.items():
        if count % over:
            raise ConfigError(f"{name} {count} does not divide over tensor={over}")
    if groups % over == 0:
        return dataclasses.replace(axes, tensor=over, copies=1)
    if over % groups:
        raise ConfigError(
            f"num_key_value_heads {groups} does not divide over tensor={over}, nor {over} over them"
        )
    return dataclasses.replace(axes, tensor=groups, copies=over // groups)


def share_of(config: ModelConfig, axes: Axes) -> ModelConfig:
    """The configuration of what one device runs: as many heads and hidden numbers as it has.

    No model's, so that what a whole model's numbers must satisfy is not asked of it.
    """
    over, share = axes.over(HEADS), copy.copy(config)
    counts = {
        "num_attention_heads": config.num_attention_heads // over,
        "num_key_value_heads": config.num_key_value_heads // axes.over(GROUPS),
    }
    for name in models.family(config.model_type).widths:
        counts[name] = getattr(config, name) // over
    for name, count in counts.items():
        object.__setattr__(share, name, count)  # frozen, and not yet seen by anybody
    return share
