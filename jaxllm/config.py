"""What a model is: frozen, hashable configurations, checked once, on construction.

Every field changes the mathematics or a shape, and is read by the code; the spelling is Hugging
Face's Llama configuration. What a checkpoint says beyond that (dropout, initialisers, who wrote it)
is dealt with in `convert`. An instance is a valid static argument of `jax.jit`.
"""

import dataclasses
from typing import Any, ClassVar

from jaxllm.errors import ConfigError

HIDDEN_ACTS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

# Bounds on what a file may claim, far above any published model: a typo, not a policy.
_BOUNDS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 26,
    "sliding_window": 1 << 26,
}

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
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position settings, in Hugging Face's `rope_parameters` spelling.

    A field is None exactly where its `rope_type` does not use it (see `ROPE_FIELDS`).
    """

    rope_type: str
    rope_theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_FIELDS:
            raise ConfigError(
                f"rope_type {self.rope_type!r} is not supported (known: {', '.join(ROPE_FIELDS)})"
            )
        required, optional = ROPE_FIELDS[self.rope_type]
        given = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name != "rope_type" and value is not None
        }
        complaints = [f"{n} is missing" for n in ("rope_theta", *required) if n not in given]
        complaints += [
            f"{n} is not used by this type"
            for n in given
            if n not in ("rope_theta", *required, *optional)
        ]
        complaints += [
            f"{n} must be a positive number, got {v!r}"
            for n, v in given.items()
            if n != "truncate" and (type(v) not in (int, float) or not 0 < v < 1e12)
        ]
        if type(self.truncate) not in (bool, type(None)):
            complaints.append(f"truncate must be true or false, got {self.truncate!r}")
        if complaints:
            raise ConfigError(f"rope settings of type {self.rope_type!r}: {'; '.join(complaints)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every architecture has. Query heads are shared out evenly over key/value heads."""

    model_type: ClassVar[str]

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    norm_eps: float
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        if complaints := self._complaints():
            raise ConfigError(f"{self.model_type} configuration: {'; '.join(complaints)}")

    def _complaints(self) -> list[str]:
        complaints = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if bound := _BOUNDS.get(field.name):
                if field.name == "sliding_window" and value is None:
                    continue
                if type(value) is not int or not 1 <= value <= bound:
                    complaints.append(
                        f"{field.name} must be a whole number from 1 to {bound}, got {value!r}"
                    )
            elif field.type in (bool, "bool") and type(value) is not bool:
                complaints.append(f"{field.name} must be true or false, got {value!r}")
        if complaints:
            return complaints
        if self.num_attention_heads % self.num_key_value_heads:
            complaints.append(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of"
                f" num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.hidden_act not in HIDDEN_ACTS:
            complaints.append(
                f"hidden_act {self.hidden_act!r} is not supported (known: {', '.join(HIDDEN_ACTS)})"
            )
        if type(self.norm_eps) not in (int, float) or not 0 <= self.norm_eps < 1:
            complaints.append(f"norm_eps must be a number in [0, 1), got {self.norm_eps!r}")
        return complaints

    @property
    def context_length(self) -> int:
        """Positions the model is meant for: what `generate` refuses to run past."""
        return self.max_position_embeddings

    @property
    def position_limit(self) -> int:
        """The first position that the model cannot represent at all."""
        return 1 << 24  # rotary angles: float32 counts no further

    @property
    def rotary(self) -> Rope | None:
        """How keys are turned by their positions; None where they are not."""
        return None

    @property
    def angles_follow_length(self) -> bool:
        """Whether the rotary angles of all tokens change as the text grows (dynamic scaling)."""
        return self.rotary is not None and self.rotary.rope_type == "dynamic"

    def window(self, layer: int) -> int | None:
        """How many of the last positions a query of this layer sees, itself included."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `config_from_dict` reads back to an equal configuration."""
        return {"model_type": self.model_type, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Llama and its family: RMS norm, rotary positions, gated MLP, grouped-query attention."""

    model_type: ClassVar[str] = "llama"

    rope: Rope
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if not complaints and self.head_dim % 2:
            complaints.append(f"head_dim must be even for rotary positions, got {self.head_dim}")
        return complaints

    @property
    def rotary(self) -> Rope:
        return self.rope

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def context_length(self) -> int:
        """Dynamic NTK scaling stretches the trained context by its factor as the text grows."""
        stretch = self.rope.factor if self.rope.rope_type == "dynamic" else 1.0
        return int(self.max_position_embeddings * (stretch or 1.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """GPT-2: layer norm, learned absolute positions, plain MLP, biases everywhere."""

    model_type: ClassVar[str] = "gpt2"

    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    @property
    def position_limit(self) -> int:
        """Positions are rows of a table."""
        return self.max_position_embeddings

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if complaints:
            return complaints
        if self.num_key_value_heads != self.num_attention_heads:
            complaints.append("num_key_value_heads must equal num_attention_heads")
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            complaints.append(
                f"hidden_size ({self.hidden_size}) is not num_attention_heads"
                f" ({self.num_attention_heads}) x head_dim ({self.head_dim})"
            )
        return complaints


CONFIGS: dict[str, type[ModelConfig]] = {c.model_type: c for c in (LlamaConfig, GPT2Config)}


def config_from_dict(data: dict[str, Any]) -> ModelConfig:
    """Rebuild a configuration from `ModelConfig.to_dict`'s form.

    Raises ConfigError for an unknown model type, and for missing, unknown or impossible fields.
    """
    fields = dict(data)
    model_type = fields.pop("model_type", None)
    if model_type not in CONFIGS:
        raise ConfigError(f"model_type {model_type!r} is not supported (known: {sorted(CONFIGS)})")
    if isinstance(rope := fields.get("rope"), dict):
        fields["rope"] = _build(Rope, rope, "rope settings")
    return _build(CONFIGS[model_type], fields, f"{model_type} configuration")


def _build(kind: type, fields: dict[str, Any], what: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(kind)}
    missing = [n for n, f in known.items() if n not in fields and f.default is dataclasses.MISSING]
    unknown = [n for n in fields if n not in known]
    if missing or unknown:
        raise ConfigError(
            f"{what}:"
            + (f" missing {', '.join(missing)}" if missing else "")
            + (f" unknown {', '.join(unknown)}" if unknown else "")
        )
    return kind(**fields)
