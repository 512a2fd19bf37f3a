"""What every model is: frozen, hashable configurations, checked once, on construction.

Every field changes the mathematics or a shape, and is read by the code; the spelling is Hugging
Face's Llama configuration. What a checkpoint says beyond that (dropout, initialisers, who wrote it)
is dealt with in `convert`; what only one family has, its file in `models` adds. An instance is a
valid static argument of `jax.jit`.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from msgspec import Meta

from jaxllm.errors import ConfigError
from jaxllm.files import complaints_of
from jaxllm.longer import LongAttention
from jaxllm.longer import Tokens as Tokens  # with the other bounds
from jaxllm.moved import attribute

HiddenAct = Literal[
    "silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate",
    "gelu_pytorch_tanh", "gelu_python_tanh", "relu",
]  # fmt: skip
HIDDEN_ACTS = get_args(HiddenAct)

# Bounds on what a file may claim, far above any published model: a typo, not a policy.
Vocabulary = Annotated[int, Meta(ge=1, le=1 << 22)]
Width = Annotated[int, Meta(ge=1, le=1 << 20)]
Layers = Annotated[int, Meta(ge=1, le=1 << 10)]
Heads = Annotated[int, Meta(ge=1, le=1 << 12)]
# A file's 256 stays 256 and its 256.0 stays 256.0: other readers distinguish them.
Positive = (
    Annotated[int, Meta(ge=1, le=1_000_000_000_000)] | Annotated[float, Meta(ge=1e-12, le=1e12)]
)
Divisors = Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=1 << 12)]

# rope_type -> (fields it must have, fields it may have), beside rope_theta.
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
}
SHARED_FIELDS = ("partial_rotary_factor",)  # that every type may have
EXTENDED_FIELDS = ("group_size", "neighbor_window")  # likewise, where angles do not follow length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position settings, in Hugging Face's `rope_parameters` spelling.

    A field is None exactly where its `rope_type` does not use it (see `ROPE_FIELDS`).
    partial_rotary_factor: the share of each head, its first numbers, that is turned. divisors: of
    each pair's frequency; `longrope` has two lists of them, for texts up to
    `original_max_position_embeddings` and for longer ones.

    group_size, neighbor_window: Self-Extend (Jin et al. 2024, arXiv 2401.01325), both or neither,
    which no published file has: a token sees those within the window where they are, and farther
    ones at positions divided by the group's size, so that a trained model reads longer texts.
    """

    rope_type: str
    rope_theta: Positive
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Tokens | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool | None = None
    partial_rotary_factor: Annotated[float, Meta(gt=0, lt=1)] | None = None
    short_factor: Divisors | None = None
    long_factor: Divisors | None = None
    divisors: Divisors | None = None
    group_size: Tokens | None = None
    neighbor_window: Annotated[int, Meta(ge=0, le=1 << 26)] | None = None

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
            for n in sorted(given - {*required, *optional, *SHARED_FIELDS, *EXTENDED_FIELDS})
        ]
        complaints += complaints_of(self)
        complaints += self._unfit_extension()
        if self.rope_type == "yarn" and self.rope_theta == 1:
            complaints.append("rope_theta must not be 1: no pair would turn slower than another")
        if self.rope_type == "llama3" and self.low_freq_factor == self.high_freq_factor:
            complaints.append("low_freq_factor and high_freq_factor must differ")
        if len({len(x) for x in (self.short_factor, self.long_factor) if x is not None}) > 1:
            complaints.append("short_factor and long_factor must have as many numbers")
        if complaints:
            raise ConfigError(f"rope settings of type {self.rope_type!r}: {'; '.join(complaints)}")

    def _unfit_extension(self) -> list[str]:
        group, window = self.group_size, self.neighbor_window
        if (group is None) != (window is None):
            return ["Self-Extend needs both group_size and neighbor_window"]
        if group is None:
            return []
        if self.follows_length:
            return [
                "Self-Extend turns keys to other positions, which angles that follow the text's"
                " length do not allow: leave out group_size and neighbor_window"
            ]
        if window == 0:
            return [
                "neighbor_window 0 collides: a token and those before it in its group would share a"
                " position. Give it at least 1"
            ]
        return []

    @property
    def extended(self) -> bool:
        """Whether positions are those of Self-Extend."""
        return self.group_size is not None

    def reach(self, positions: int) -> int:
        """How long a text may be whose farthest distance counts as less than `positions`."""
        if self.group_size is None or self.neighbor_window is None:
            return positions
        window = self.neighbor_window
        return self.group_size * (positions - window + window // self.group_size)

    def width(self, head_dim: int) -> int:
        """How many numbers of a head are turned, the first ones; two to a pair."""
        return int(head_dim * (self.partial_rotary_factor or 1.0))

    @property
    def follows_length(self) -> bool:
        """Whether the angles of all tokens change as the text grows."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def border(self) -> int | None:
        """The longest text that is turned by other angles than longer ones; None: there is none."""
        if self.rope_type != "longrope" or self.short_factor == self.long_factor:
            return None
        return self.original_max_position_embeddings

    def complaints(self, head_dim: int) -> list[str]:
        """What is wrong with it for heads of that size."""
        width, found = self.width(head_dim), list[str]()
        if self.partial_rotary_factor is None and head_dim % 2:
            found.append(f"head_dim must be even for rotary positions, got {head_dim}")
        elif width < 2 or width % 2:
            found.append(
                f"partial_rotary_factor {self.partial_rotary_factor} of head_dim {head_dim} turns"
                f" {width} numbers, which are no pairs"
            )
        if self.rope_type == "dynamic" and width == 2:
            found.append("dynamic rotary scaling needs a head_dim above 2")
        lists = {n: getattr(self, n) for n in ("short_factor", "long_factor", "divisors")}
        found += [
            f"{name} has {len(given)} numbers, the {width} turned ones of a head {width // 2} pairs"
            for name, given in lists.items()
            if given is not None and len(given) != width // 2
        ]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every architecture has. Query heads are shared out evenly over key/value heads.

    by_layer: the names of those fields that have an entry for each layer.
    """

    model_type: ClassVar[str]
    by_layer: ClassVar[tuple[str, ...]] = ()

    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads
    head_dim: Heads
    hidden_act: HiddenAct
    max_position_embeddings: Tokens
    norm_eps: Annotated[float, Meta(ge=0, lt=1)]
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        if complaints := self._complaints():
            raise ConfigError(f"{self.model_type} configuration: {'; '.join(complaints)}")

    def _complaints(self) -> list[str]:
        if complaints := complaints_of(self):
            return complaints
        layers, entries = self.num_hidden_layers, {n: getattr(self, n) for n in self.by_layer}
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
        """Positions the model is meant for: what `generate` refuses to run past."""
        return self.max_position_embeddings

    @property
    def position_limit(self) -> int:
        """The first position that the model cannot represent at all."""
        return 1 << 24  # rotary angles: float32 counts no further

    def rotary(self, layer: int) -> Rope | None:
        """How a layer's keys are turned by their positions; None where they are not."""
        return None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary settings that its layers have, each once."""
        found = (self.rotary(i) for i in range(self.num_hidden_layers))
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @property
    def angles_follow_length(self) -> bool:
        """Whether the rotary angles of all tokens change as the text grows."""
        return any(rope.follows_length for rope in self.ropes)

    @property
    def border(self) -> int | None:
        """The shortest `Rope.border` of its settings: no cached text can go on beyond it."""
        return min((r.border for r in self.ropes if r.border is not None), default=None)

    def self_extended(self, group_size: int, neighbor_window: int) -> Self:
        """The same with Self-Extend (`Rope`). Raises ConfigError where there is nothing to turn."""
        raise ConfigError(
            f"Self-Extend: {self.model_type} learns a vector for every position and has none beyond"
            f" {self.max_position_embeddings}; only rotary positions can be grouped"
        )

    def window(self, layer: int) -> int | None:
        """How many of the last positions a query of this layer sees, itself included."""
        return None

    def long_attention(self, layer: int) -> LongAttention | None:
        """What kind of attention this layer has; None: every token sees all before it, or the last
        of them (`window`).
        """
        return None

    @property
    def segment_length(self) -> int | None:
        """Tokens of a segment, in models whose layers keep a memory of the segments before: they
        read tokens in order, and turn them by their places in a segment. None for others.
        """
        kinds = (self.long_attention(i) for i in range(self.num_hidden_layers))
        return next((kind.segment_length for kind in kinds if kind is not None), None)

    @property
    def usual_capacity(self) -> int:
        """Slots of a cache where nobody says how many: the context, where that has an end."""
        if self.segment_length is None:
            return self.context_length
        return max(self.max_position_embeddings, 2 * self.segment_length)

    def like(self, layer: int) -> int:
        """The first layer that computes as this one does, with other parameters."""
        kinds = [self.computes(i) for i in range(layer + 1)]
        return kinds.index(kinds[-1])

    def computes(self, layer: int) -> tuple[Any, ...]:
        """What may differ between layers: equal for those that compute alike."""
        kind = self.long_attention(layer)
        return (self.form(layer), self.window(layer), self.rotary(layer), kind)

    def with_layers(self, numbers: Sequence[int]) -> Self:
        """The configuration of a model that has these layers of this one's, in this order."""
        kept = {name: tuple(getattr(self, name)[i] for i in numbers) for name in self.by_layer}
        changes: dict[str, Any] = {"num_hidden_layers": len(numbers), **kept}
        return dataclasses.replace(self, **changes)

    def form(self, layer: int) -> int:
        """The first layer whose parameters have the names and shapes of this one's."""
        return 0

    def memory(self, layer: int) -> Any:
        """The form of what this layer keeps beside keys and values, of one size however long the
        text: a pytree of `jax.ShapeDtypeStruct`, of one row; None for nothing.
        """
        return None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `models.config_from_dict` reads back to an equal configuration."""
        return {"model_type": self.model_type, **dataclasses.asdict(self)}


if not TYPE_CHECKING:
    # They stand with their models now; the old place goes with the next release.
    _MOVED = {"LlamaConfig": "jaxllm.models.llama", "GPT2Config": "jaxllm.models.gpt2"}

    def __getattr__(name: str) -> Any:
        return attribute(__name__, _MOVED.get(name, __name__), name)
