"""Qwen2 and Qwen2.5 checkpoints: the table, and fields shared with Qwen3."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from jaxllm.convert.decoders import (
    LAYER_TYPES,
    SLIDING_WINDOW,
    DecoderArchitecture,
    make_table,
    resolve_layer_types,
)
from jaxllm.convert.tables import Field
from jaxllm.models.hybrid_attention import HybridAttentionConfig
from jaxllm.models.qwen2 import Qwen2Config

CONTEXT = Field("max_position_embeddings", "max_position_embeddings", 32768)


def make_qwen_table(
    architecture: str, config: type[HybridAttentionConfig], *fields: Field, **options: Any
) -> DecoderArchitecture:
    """Return the table of a dense Qwen family. Its arguments are those of `make_table`."""
    return make_table(
        architecture,
        config,
        CONTEXT,
        *fields,
        SLIDING_WINDOW,
        LAYER_TYPES,
        # Read into layer_types and sliding_window.
        Field("use_sliding_window", "use_sliding_window", False, bool),
        Field("max_window_layers", "max_window_layers", 28, Annotated[int, Meta(ge=0)]),
        derive=_resolve_windows,
        finish=_write_windows,
        **options,
    )


def _resolve_windows(
    fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]
) -> None:
    """Resolve which layers have a window: if one is used, the last ones."""
    used, first = fields.pop("use_sliding_window"), fields.pop("max_window_layers")
    if not used:
        fields["sliding_window"] = None
    resolve_layer_types(fields, lambda i: fields["sliding_window"] is not None and i >= first)


def _write_windows(config: HybridAttentionConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Add the fields for older readers: whether a window is used, and from which layer on."""
    sliding = [i for i in range(config.num_hidden_layers) if config.is_sliding(i)]
    first = sliding[0] if sliding else config.num_hidden_layers
    return {**data, "use_sliding_window": bool(sliding), "max_window_layers": first}


# attention_bias: queries, keys and values always have biases, whatever it is.
TABLES = (make_qwen_table("Qwen2", Qwen2Config, ignored_fields=frozenset({"attention_bias"})),)
