"""Qwen3.5 checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import ATTENTION_BIAS, LAYER_TYPES, make_table
from jaxllm.convert.tables import Field, Interval
from jaxllm.models.qwen3_5_text import Qwen3_5Config

SHARE = "partial_rotary_factor"
LINEAR = tuple(
    Field(f"linear_{name}", f"linear_{name}", default)
    for name, default in (
        ("num_key_heads", 16),
        ("num_value_heads", 32),
        ("key_head_dim", 128),
        ("value_head_dim", 128),
        ("conv_kernel_dim", 4),
    )
)


def prepare_rope(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with its share of rotated dimensions, by default a quarter.

    For text alone the sections of multimodal positions are equal.
    """
    given, shares = dict(data), [data.get(SHARE)]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(settings := data.get(name), Mapping):
            given[name] = {k: v for k, v in settings.items() if not k.startswith("mrope_")}
            shares.append(settings.get(SHARE))
    return given if any(shares) else {**given, SHARE: 0.25}


def resolve_mixers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    """Derive missing layer_types: each `full_attention_interval`th layer has attention."""
    interval = fields.pop("full_attention_interval")
    if fields["layer_types"] is None:
        fields["layer_types"] = tuple(
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(fields["num_hidden_layers"])
        )


TABLES = (
    make_table(
        "Qwen3_5",
        Qwen3_5Config,
        *LINEAR,
        ATTENTION_BIAS,
        LAYER_TYPES,
        Field("full_attention_interval", "full_attention_interval", 4, Interval),
        Field("head_dim", "head_dim", 256),
        Field("max_position_embeddings", "max_position_embeddings", 32768),
        ignored_fields=frozenset({SHARE}),
        prepare=prepare_rope,
        derive=resolve_mixers,
        classifier="Qwen3_5TextForSequenceClassification",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
    ),
)
