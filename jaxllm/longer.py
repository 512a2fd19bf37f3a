"""Attention of other kinds than the dense one, as a configuration names it."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxllm.errors import ConfigError
from jaxllm.files import complaints_of

Tokens = Annotated[int, Meta(ge=1, le=1 << 26)]
Lengths = Annotated[tuple[Tokens, ...], Meta(min_length=1, max_length=1 << 10)]

# kind -> (fields it must have, fields it may have).
LONG_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dilated": (("segment_lengths", "dilated_ratios"), ("by", "dedupe", "frozen_mixture")),
    "infini": (("segment_length",), ("update",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongAttention:
    """Attention of another kind than the dense one; a None field is one its `kind` does not use.

    dilated (LongNet, Ding et al. 2023): segment_lengths, dilated_ratios: the pairs (w, r): a head
    sees every r-th token of segments of w, which need not be a multiple of r. by: "pairs" (None):
    all heads of all layers have all pairs, as in the paper; "heads": head j has pair `j % count`
    alone; "layers": each layer has one pair, the lists are as long as the model is deep. dedupe: a
    token that several pairs show counts once. frozen_mixture: no gradient through the weights that
    pairs are mixed by.
    infini (Infini-attention, Munkhdalai et al. 2024): segment_length: tokens that are attended to
    as they are. update: how memory is written, "linear" (None), "delta", or "delta_once", by which
    what is written twice counts once.
    """

    kind: str
    segment_lengths: Lengths | None = None
    dilated_ratios: Lengths | None = None
    by: Literal["pairs", "heads", "layers"] | None = None
    dedupe: bool | None = None
    frozen_mixture: bool | None = None
    segment_length: Tokens | None = None
    update: Literal["linear", "delta", "delta_once"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in LONG_FIELDS:
            raise ConfigError(
                f"attention of kind {self.kind!r:.40} is not supported"
                f" (known: {', '.join(LONG_FIELDS)})"
            )
        required, optional = LONG_FIELDS[self.kind]
        given = {n for n, v in dataclasses.asdict(self).items() if n != "kind" and v is not None}
        complaints = [f"{n} is missing" for n in required if n not in given]
        complaints += [
            f"{n} is not used by this kind" for n in sorted(given - {*required, *optional})
        ]
        complaints += complaints_of(self)
        if not complaints and self.kind == "dilated":
            complaints += self._unfit_pairs()
        if complaints:
            raise ConfigError(f"attention of kind {self.kind!r}: {'; '.join(complaints)}")

    def _unfit_pairs(self) -> list[str]:
        w, r = self.segment_lengths or (), self.dilated_ratios or ()
        if len(w) != len(r):
            return [f"segment_lengths has {len(w)} numbers and dilated_ratios {len(r)}: pair them"]
        found = [
            f"a dilation of {ratio} is longer than its segments of {length}: some heads would see"
            " nothing"
            for length, ratio in self.pairs
            if ratio > length
        ]
        if self.by == "layers":
            return found
        found += [
            f"segments of {a} do not divide those of {b}: they would lie across a border. Take a"
            f" multiple of {a}"
            for a, b in itertools.pairwise(w)
            if a < b and b % a
        ]
        for name, numbers in (("segment_lengths", w), ("dilated_ratios", r)):
            if any(a >= b for a, b in itertools.pairwise(numbers)):
                found.append(f"{name} must grow from one to the next, got {list(numbers)}")
        if 1 not in r:
            found.append(
                f"dilated_ratios {list(r)} have no 1: tokens between would see nothing. Begin with"
                " a pair (w, 1)"
            )
        return found

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Segment length and dilation of each pair."""
        return tuple(zip(self.segment_lengths or (), self.dilated_ratios or (), strict=True))

    @property
    def period(self) -> int | None:
        """Tokens that move by multiples of it stay with those of their segments; None: there is no
        such number, for what was read is in a memory.
        """
        return math.lcm(*self.segment_lengths) if self.segment_lengths else None

    def for_layers(self, numbers: Sequence[int]) -> "LongAttention":
        """The same for a model that has these layers, in this order."""
        if self.by != "layers":
            return self
        pairs = [self.pairs[i] for i in numbers]
        w, r = zip(*pairs, strict=True)
        return dataclasses.replace(self, segment_lengths=w, dilated_ratios=r)

    def complaints(self, layers: int, heads: int) -> list[str]:
        """What is wrong with it for a model of so many layers and query heads."""
        count = len(self.pairs)
        if self.by == "layers" and count != layers:
            return [f"attention by layers has {count} pairs for {layers} layers: name one for each"]
        if self.by == "heads" and heads % count:
            return [
                f"attention by heads has {count} pairs for {heads} heads, which is no multiple:"
                " all pairs have as many heads"
            ]
        return []

    def to_dict(self) -> dict[str, Any]:
        """What is set."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
