"""Configuration of sparse and segmented attention: LongNet and Infini-attention."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxllm.errors import ConfigError
from jaxllm.runtime.schema import field_errors

TokenCount = Annotated[int, Meta(ge=1, le=1 << 26)]
TokenCounts = Annotated[tuple[TokenCount, ...], Meta(min_length=1, max_length=1 << 10)]

# kind -> (required fields, optional fields).
LONG_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dilated": (("segment_lengths", "dilated_ratios"), ("by", "dedupe", "frozen_mixture")),
    "infini": (("segment_length",), ("update",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongAttention:
    """Sparse or segmented attention; a field that the `kind` does not use is None.

    dilated (LongNet, Ding et al. 2023): segment_lengths and dilated_ratios are pairs (w, r): a head
    attends to every r-th token of segments of w tokens; w need not be a multiple of r. by: "pairs"
    (None): every head of every layer has all pairs, as in the paper; "heads": head j has only pair
    `j % count`; "layers": each layer has one pair, and the lists have one entry per layer. dedupe:
    count a token once if several pairs contain it. frozen_mixture: stop the gradient through the
    weights that mix the pairs.
    infini (Infini-attention, Munkhdalai et al. 2024): segment_length: tokens with exact attention.
    update: the memory update rule, "linear" (None), "delta", or "delta_once", which counts repeated
    writes once.
    """

    kind: str
    segment_lengths: TokenCounts | None = None
    dilated_ratios: TokenCounts | None = None
    by: Literal["pairs", "heads", "layers"] | None = None
    dedupe: bool | None = None
    frozen_mixture: bool | None = None
    segment_length: TokenCount | None = None
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
        complaints += field_errors(self)
        if not complaints and self.kind == "dilated":
            complaints += self._pair_problems()
        if complaints:
            raise ConfigError(f"attention of kind {self.kind!r}: {'; '.join(complaints)}")

    def _pair_problems(self) -> list[str]:
        w, r = self.segment_lengths or (), self.dilated_ratios or ()
        if len(w) != len(r):
            return [f"segment_lengths and dilated_ratios differ in length: {len(w)} and {len(r)}"]
        problems = [
            f"dilated ratio {ratio} exceeds its segment length {length}: some heads would attend to"
            " no token"
            for length, ratio in self.pairs
            if ratio > length
        ]
        if self.by == "layers":
            return problems
        problems += [
            f"segment length {b} must be a multiple of {a}, or segments would cross its boundaries"
            for a, b in itertools.pairwise(w)
            if a < b and b % a
        ]
        for name, numbers in (("segment_lengths", w), ("dilated_ratios", r)):
            if any(a >= b for a, b in itertools.pairwise(numbers)):
                problems.append(f"{name} must be strictly increasing, got {list(numbers)}")
        if 1 not in r:
            problems.append(
                f"dilated_ratios must include 1, got {list(r)}: some tokens would see nothing."
                " Begin with a pair (w, 1)"
            )
        return problems

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Segment length and dilated ratio of each pair."""
        return tuple(zip(self.segment_lengths or (), self.dilated_ratios or (), strict=True))

    @property
    def period(self) -> int | None:
        """Smallest shift that keeps all tokens in the same segments (the least common multiple of
        the segment lengths); None if there is a memory, which cannot be shifted.
        """
        return math.lcm(*self.segment_lengths) if self.segment_lengths else None

    def with_layers(self, indices: Sequence[int]) -> "LongAttention":
        """Return the configuration for a model with only these layers, in this order."""
        if self.by != "layers":
            return self
        pairs = [self.pairs[i] for i in indices]
        w, r = zip(*pairs, strict=True)
        return dataclasses.replace(self, segment_lengths=w, dilated_ratios=r)

    def complaints(self, layers: int, heads: int) -> list[str]:
        """Return what is invalid for a model with these numbers of layers and query heads."""
        count = len(self.pairs)
        if self.by == "layers" and count != layers:
            return [
                f"attention by layers has {count} pairs for {layers} layers; expected one per layer"
            ]
        if self.by == "heads" and heads % count:
            return [
                f"attention by heads has {count} pairs for {heads} heads; expected a divisor, so"
                " that every pair has equally many heads"
            ]
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
