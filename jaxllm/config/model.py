"""Model configurations: frozen and hashable, validated on construction.

Every field changes the mathematics or a shape; names are those of Hugging Face's Llama
configuration. `convert` handles other checkpoint settings (dropout, initializers, metadata), and a
family's file in `models` adds its own fields. An instance is a valid static argument of `jax.jit`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from jaxllm.config.attention_kind import AttentionKind
from jaxllm.errors import ConfigError
from jaxllm.runtime.schema import field_errors

HiddenAct = Literal[
    "silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate",
    "gelu_pytorch_tanh", "gelu_python_tanh", "relu",
]  # fmt: skip

# Bounds that catch typos in files; far above any published model.
VocabSize = Annotated[int, Meta(ge=1, le=1 << 22)]
HiddenSize = Annotated[int, Meta(ge=1, le=1 << 20)]
LayerCount = Annotated[int, Meta(ge=1, le=1 << 10)]
TokenCount = Annotated[int, Meta(ge=1, le=1 << 26)]
HeadCount = Annotated[int, Meta(ge=1, le=1 << 12)]
# Keep 256 and 256.0 as the file has them: other readers distinguish them.
Positive = (
    Annotated[int, Meta(ge=1, le=1_000_000_000_000)] | Annotated[float, Meta(ge=1e-12, le=1e12)]
)
Divisors = Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=1 << 12)]

# rope_type -> (required fields, optional fields), besides rope_theta.
ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "divisors": (("divisors",), ()),
    "proportional": ((), ("factor",)),
}
COMMON_ROPE_FIELDS = ("partial_rotary_factor",)  # allowed for every type


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position settings, in Hugging Face's `rope_parameters` spelling.

    A field that the `rope_type` does not use is None (see `ROPE_FIELDS`). partial_rotary_factor:
    the rotated fraction of each head, its first dimensions; of type `proportional`, its fastest
    pairs (i, i + H/2). divisors: one divisor per frequency;
    `longrope` has two lists, for texts up to `original_max_position_embeddings` and for longer
    ones.
    """

    rope_type: str
    rope_theta: Positive
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: TokenCount | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool | None = None
    partial_rotary_factor: Annotated[float, Meta(gt=0, le=1)] | None = None
    short_factor: Divisors | None = None
    long_factor: Divisors | None = None
    divisors: Divisors | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rope_type, str) or self.rope_type not in ROPE_FIELDS:
            raise ConfigError(
                f"rope_type {self.rope_type!r:.40} is not supported"
                f" (known: {', '.join(ROPE_FIELDS)})"
            )
        required, optional = ROPE_FIELDS[self.rope_type]
        given = {
            name
            for name, value in dataclasses.asdict(self).items()
            if name not in ("rope_type", "rope_theta") and value is not None
        }
        complaints = [f"{n} is missing" for n in required if n not in given]
        complaints += [
            f"{n} is not used by this type"
            for n in sorted(given - {*required, *optional, *COMMON_ROPE_FIELDS})
        ]
        complaints += field_errors(self)
        if self.rope_type == "yarn" and self.rope_theta == 1:
            complaints.append("rope_theta must not be 1: all frequencies would be equal")
        if self.rope_type == "llama3" and self.low_freq_factor == self.high_freq_factor:
            complaints.append("low_freq_factor and high_freq_factor must differ")
        if len({len(x) for x in (self.short_factor, self.long_factor) if x is not None}) > 1:
            complaints.append("short_factor and long_factor must have the same length")
        if complaints:
            raise ConfigError(f"rope settings of type {self.rope_type!r}: {'; '.join(complaints)}")

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head, two per pair; they come first."""
        if self.rope_type == "proportional":  # pairs with a frequency of zero count
            return head_dim
        return int(head_dim * (self.partial_rotary_factor or 1.0))

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles of all tokens depend on the text length."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def original_context(self) -> int | None:
        """Longest text that uses LongRoPE's short factors; None without distinct factor lists."""
        if self.rope_type != "longrope" or self.short_factor == self.long_factor:
            return None
        return self.original_max_position_embeddings

    def complaints(self, head_dim: int) -> list[str]:
        """Return what is invalid for heads of that size."""
        width, problems = self.rotary_dim(head_dim), list[str]()
        if self.partial_rotary_factor is None and head_dim % 2:
            problems.append(f"head_dim must be even for rotary positions, got {head_dim}")
        elif width < 2 or width % 2:
            problems.append(
                f"partial_rotary_factor {self.partial_rotary_factor} of head_dim {head_dim} rotates"
                f" {width} dimensions; expected an even number of at least 2"
            )
        if self.rope_type == "dynamic" and width == 2:
            problems.append("dynamic rotary scaling requires more than 2 rotated dimensions")
        lists = {n: getattr(self, n) for n in ("short_factor", "long_factor", "divisors")}
        problems += [
            f"{name} has {len(given)} entries, expected {width // 2} for {width} rotated dimensions"
            for name, given in lists.items()
            if given is not None and len(given) != width // 2
        ]
        return problems


# Of transformers.
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
MAX_LABELS = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreHead:
    """The linear head of a classifier or a reward model, which has no output matrix.

    Attributes:
        labels: names of its outputs; none if there is no head at all.
        problem_type: how outputs become scores; None: as their number suggests
            (`jaxllm.generation.heads.to_scores`).
        pad_token_id: a text's outputs are those of its last token that is not this one.
    """

    labels: Annotated[tuple[str, ...], Meta(max_length=MAX_LABELS)]
    problem_type: ProblemType | None = None
    pad_token_id: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration that all architectures share. Each key/value head serves equally many queries.

    Attributes:
        per_layer_fields: names of the fields that have one entry per layer.
        score: the head in place of the output matrix; logits are then its outputs, `[..., labels]`.
    """

    model_type: ClassVar[str]
    per_layer_fields: ClassVar[tuple[str, ...]] = ()

    vocab_size: VocabSize
    hidden_size: HiddenSize
    intermediate_size: HiddenSize
    num_hidden_layers: LayerCount
    num_attention_heads: HeadCount
    num_key_value_heads: HeadCount
    head_dim: HeadCount
    hidden_act: HiddenAct
    max_position_embeddings: TokenCount
    norm_eps: Annotated[float, Meta(ge=0, lt=1)]
    tie_word_embeddings: bool
    score: ScoreHead | None = None

    def __post_init__(self) -> None:
        if complaints := self._complaints():
            raise ConfigError(f"{self.model_type} configuration: {'; '.join(complaints)}")

    def _complaints(self) -> list[str]:
        if complaints := field_errors(self):
            return complaints
        layers, entries = (
            self.num_hidden_layers,
            {n: getattr(self, n) for n in self.per_layer_fields},
        )
        complaints = [
            f"{name} has {len(given)} entries for {layers} layers"
            for name, given in entries.items()
            if len(given) != layers
        ]
        if self.num_attention_heads % self.num_key_value_heads:
            complaints.append(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of"
                f" num_key_value_heads ({self.num_key_value_heads})"
            )
        return complaints

    @property
    def context_length(self) -> int:
        """Number of positions the model is meant for; `generate` does not run past it."""
        return self.max_position_embeddings

    @property
    def position_limit(self) -> int:
        """First position that the model cannot represent."""
        return 1 << 24  # rotary angles: float32 represents all integers only up to here

    @property
    def learns_positions(self) -> bool:
        """Whether positions have learned embeddings, which are mixed into keys."""
        return False

    @property
    def norm_weight_offset(self) -> float:
        """Offset added to norm weights."""
        return 0.0

    @property
    def embedding_scale(self) -> float:
        """Factor on embeddings."""
        return 1.0

    @property
    def logits_scale(self) -> float:
        """Factor on logits."""
        return 1.0

    @property
    def logits_cap(self) -> float | None:
        """Soft cap on logits, applied after the factor."""
        return None

    def layer_rope(self, layer: int) -> Rope | None:
        """Return the rotary settings of a layer; None if it has no rotary positions."""
        return None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Distinct rotary settings of the layers."""
        by_layer = (self.layer_rope(i) for i in range(self.num_hidden_layers))
        return tuple(dict.fromkeys(rope for rope in by_layer if rope is not None))

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether the rotary angles of all tokens depend on the text length."""
        return any(rope.depends_on_length for rope in self.ropes)

    @property
    def original_context(self) -> int | None:
        """Shortest `Rope.original_context` of the layers; a cached text cannot grow across it."""
        return min(
            (r.original_context for r in self.ropes if r.original_context is not None), default=None
        )

    def window(self, layer: int) -> int | None:
        """Return a layer's sliding window in tokens, query included; None for full attention."""
        return None

    @property
    def attention(self) -> AttentionKind | None:
        """A kind of attention of another package; None for full and sliding-window attention."""
        return None

    def with_attention(self, kind: AttentionKind) -> Self:
        """Return a copy with this kind of attention. Raises ConfigError if the model has none."""
        raise ConfigError(f"{self.model_type} does not support attention of kind {kind.kind!r}")

    def attention_kind(self, layer: int) -> AttentionKind | None:
        """Return a layer's kind of attention; None for full or sliding-window attention
        (`window`).
        """
        return None

    @property
    def segment_length(self) -> int | None:
        """Segment length in tokens, for models with a memory of earlier segments; else None.

        Such models read tokens in order, and rotate keys by their position within the segment.
        """
        return None if self.attention is None else self.attention.segment_length

    @property
    def default_cache_size(self) -> int:
        """Default cache size in slots: the context, or what a model with segments needs."""
        if self.segment_length is None:
            return self.context_length
        return max(self.max_position_embeddings, 2 * self.segment_length)

    def first_equal_layer(self, layer: int) -> int:
        """Return the first layer with the same computation as this one."""
        kinds = [self.layer_signature(i) for i in range(layer + 1)]
        return kinds.index(kinds[-1])

    def layer_signature(self, layer: int) -> tuple[Any, ...]:
        """Return a value that is equal for layers with the same computation."""
        kind = self.attention_kind(layer)
        return (self.layer_template(layer), self.window(layer), self.layer_rope(layer), kind)

    def with_layers(self, indices: Sequence[int]) -> Self:
        """Return the configuration of a model with these layers of this one, in this order."""
        kept = {
            name: tuple(getattr(self, name)[i] for i in indices) for name in self.per_layer_fields
        }
        changes: dict[str, Any] = {"num_hidden_layers": len(indices), **kept}
        if self.attention is not None:
            changes["attention"] = self.attention.with_layers(indices)
        return dataclasses.replace(self, **changes)

    def layer_template(self, layer: int) -> int:
        """Return the first layer whose parameters have the same names and shapes."""
        return 0

    def state_shape(self, layer: int) -> Any:
        """Return the shapes of a layer's state besides keys and values, for one row: a pytree of
        `jax.ShapeDtypeStruct`; None if it has none.
        """
        return None

    @property
    def has_state(self) -> bool:
        """Whether a layer keeps a state besides keys and values. Such models read tokens in order,
        one document a row.
        """
        return any(self.state_shape(i) is not None for i in range(self.num_hidden_layers))

    def kv_heads(self, layer: int) -> int:
        """Return the number of key heads that a layer computes; it may be 0."""
        return self.num_key_value_heads

    def value_heads(self, layer: int) -> int:
        """Return the number of value heads; 0 also where values are computed from the keys."""
        return self.kv_heads(layer)

    def value_dim(self, layer: int) -> int:
        """Return the size of a head's values."""
        return self.layer_head_dim(layer)

    def kv_source(self, layer: int) -> int:
        """Return the number of the layer whose keys and values it reads: this or an earlier one."""
        return layer

    @property
    def links_layers(self) -> bool:
        """Whether layers read keys and values of others, or embeddings of their own: then none runs
        alone.
        """
        return False

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Distinct sizes of heads."""
        return tuple({self.layer_head_dim(i): None for i in range(self.num_hidden_layers)})

    def layer_head_dim(self, layer: int) -> int:
        """Return the size of a layer's heads."""
        return self.head_dim

    def mlp_size(self, layer: int) -> int:
        """Return the number of hidden channels of a layer's MLP."""
        return self.intermediate_size

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict; `models.config_from_dict` is its inverse."""
        fields = {"model_type": self.model_type, **dataclasses.asdict(self)}
        if self.score is None:  # keep the files of models without it unchanged
            del fields["score"]
        return fields
