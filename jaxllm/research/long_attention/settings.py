"""Settings of LongNet's and Infini-attention, a kind of attention (`AttentionKind`)."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
from msgspec import Meta

from jaxllm.config.attention_kind import AttentionKind
from jaxllm.config.model import Rope, TokenCount
from jaxllm.errors import ConfigError
from jaxllm.models.decoder_config import DecoderConfig
from jaxllm.models.layers import AttentionContext, Unrotated
from jaxllm.models.llama import LlamaConfig
from jaxllm.models.sites import SiteRecorder
from jaxllm.ops import Part
from jaxllm.research.long_attention import dilated, infini
from jaxllm.research.long_attention.memory import memory_shapes
from jaxllm.runtime.schema import field_errors

TokenCounts = Annotated[tuple[TokenCount, ...], Meta(min_length=1, max_length=1 << 10)]

NO_LIMIT = 1 << 62
GATE_LR = 0.01  # of the memory's gates; at the rate of the other parameters they hardly move

# kind -> (required fields, optional fields).
LONG_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dilated": (("segment_lengths", "dilated_ratios"), ("by", "dedupe", "frozen_mixture")),
    "infini": (("segment_length",), ("update",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongAttention(AttentionKind):
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
    def shards_heads(self) -> bool:
        return self.kind == "infini"

    @property
    def head_params(self) -> tuple[str, ...]:
        return ("memory_gate",) if self.kind == "infini" else ()

    @property
    def rates(self) -> tuple[tuple[str, float], ...]:
        return ((r".*\.memory_gate", GATE_LR),) if self.kind == "infini" else ()

    def state_shape(self, kv_heads: int, head_dim: int) -> Any:
        if self.kind != "infini":
            return None
        return memory_shapes(kv_heads, head_dim, self.update or "linear")

    def attend(
        self,
        context: AttentionContext,
        site: SiteRecorder,
        q_BTNH: jax.Array,
        parts: Sequence[Part],
        unrotated: Unrotated,
        *,
        rope: Rope | None,
        window: int | None,
        sink_N: jax.Array | None,
        scale: float,
        cap: float | None,
    ) -> tuple[jax.Array, jax.Array | None, Any]:
        run = infini.attend if self.kind == "infini" else dilated.attend
        return run(self, context, site, q_BTNH, parts, unrotated, scale=scale, cap=cap)

    def segment_start(self, state: Any) -> jax.Array:
        start_B: jax.Array = state.segment_B * self.segment_length
        return start_B

    def rewind(
        self,
        state: Any,
        entries: list[Any],
        next_B: jax.Array,
        now_B: jax.Array,
        rope: Rope | None,
    ) -> Any:
        """Return the memory with the current segment up to `next_B`.

        It is recomputed from the tokens that stay: from their cached keys, with rotation undone, so
        at the cache's precision.
        """
        assert self.segment_length is not None
        form = (self.segment_length, self.update or "linear", rope)
        return infini.recompute_segment(state, entries, next_B, now_B, *form)

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

    def context_length(self, trained: int) -> int:
        """Return no limit with a memory: only one segment is attended to at a time."""
        return trained if self.segment_length is None else NO_LIMIT

    def complaints(self, config: DecoderConfig) -> list[str]:
        if not isinstance(config, LlamaConfig):
            return [f"attention of kind {self.kind!r} needs a llama model"]
        problems, count = list[str](), len(self.pairs)
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        if config.sliding_window is not None:
            problems.append(
                f"attention of kind {self.kind!r} excludes sliding_window: remove one of them"
            )
        if (segment := self.segment_length) is not None:
            if segment > config.max_position_embeddings:
                problems.append(
                    f"segments of {segment} tokens exceed max_position_embeddings"
                    f" ({config.max_position_embeddings})"
                )
            if config.rope.depends_on_length:
                problems.append(
                    f"rotary settings of type {config.rope.rope_type!r} follow the text's length,"
                    " but segments have a fixed length"
                )
        if self.by == "layers" and count != layers:
            problems.append(
                f"attention by layers has {count} pairs for {layers} layers; expected one per layer"
            )
        if self.by == "heads" and heads % count:
            problems.append(
                f"attention by heads has {count} pairs for {heads} heads; expected a divisor, so"
                " that every pair has equally many heads"
            )
        return problems

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
