"""Qwen3.5 checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import (
    ATTENTION_BIAS,
    LAYER_TYPES,
    PARTIAL_ROTARY_FACTOR,
    DecoderArchitecture,
    make_table,
    set_rotary_share,
    write_rotary_share,
)
from jaxllm.convert.tables import Field, Interval
from jaxllm.convert.text_tower import drop_mrope
from jaxllm.convert.value_heads import GroupedValueHeads
from jaxllm.models.qwen3_5_text import Qwen3_5Config

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
# Of the state's data type in other engines, and of layers that predict more than one token.
UNUSED = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
# Fields of published files that transformers does not read, with the values that its class has.
ALLOWED = {
    "attn_output_gate": (True,),
    "mlp_only_layers": ([],),
    "output_gate_type": ("swish", "silu"),
}


def resolve_layers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    """Derive missing layer_types: each `full_attention_interval`th layer has attention."""
    interval = fields.pop("full_attention_interval")
    if fields["layer_types"] is None:
        fields["layer_types"] = tuple(
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(fields["num_hidden_layers"])
        )


def make_qwen3_5_table(
    architecture: str,
    config: type[Qwen3_5Config],
    *fields: Field,
    ignored_fields: frozenset[str] = frozenset(),
    layouts: tuple[Any, ...] = (),
    **options: Any,
) -> DecoderArchitecture:
    """Return the table of a Qwen3.5 family; arguments: `make_table`."""
    return make_table(
        architecture,
        config,
        *LINEAR,
        ATTENTION_BIAS,
        LAYER_TYPES,
        Field("full_attention_interval", "full_attention_interval", 4, Interval),
        Field("head_dim", "head_dim", 256),
        Field("max_position_embeddings", "max_position_embeddings", 32768),
        *fields,
        allowed_values=ALLOWED,
        ignored_fields=UNUSED | {PARTIAL_ROTARY_FACTOR} | ignored_fields,
        layouts=(GroupedValueHeads(), *layouts),
        prepare=lambda data: set_rotary_share(drop_mrope(data), 0.25),
        **{"derive": resolve_layers, "finish": write_rotary_share, **options},
    )


TABLES = (
    make_qwen3_5_table(
        "Qwen3_5",
        Qwen3_5Config,
        classifier="Qwen3_5TextForSequenceClassification",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
    ),
)
