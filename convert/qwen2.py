"""Qwen2 and Qwen2.5 checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import (
    LAYER_TYPES,
    SLIDING_WINDOW,
    make_table,
    read_decoder,
    resolve_layer_types,
    write_decoder,
)
from jaxllm.convert.tables import Architecture, Field
from jaxllm.models.qwen2 import Qwen2Config

WINDOW_FIELDS = (  # read into layer_types and sliding_window
    Field("use_sliding_window", "use_sliding_window", False),
    Field("max_window_layers", "max_window_layers", 28),
)
CONTEXT = Field("max_position_embeddings", "max_position_embeddings", 32768)
# attention_bias: queries, keys and values always have biases, whatever it is.
IGNORED = frozenset({"attention_bias"})
QWEN2 = make_table(
    "Qwen2", CONTEXT, SLIDING_WINDOW, LAYER_TYPES, *WINDOW_FIELDS, ignored_fields=IGNORED
)

READS = {"qwen2": QWEN2}


def read_config(table: Architecture, data: Mapping[str, Any]) -> Qwen2Config:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    return read_decoder(Qwen2Config, table, data, finish=resolve_windows)


def resolve_windows(fields: dict[str, Any], complaints: list[str]) -> None:
    """Resolve the fields in `WINDOW_FIELDS`: if a window is used, the last layers have it."""
    used, first = fields.pop("use_sliding_window"), fields.pop("max_window_layers")
    if not used:
        fields["sliding_window"] = None
    resolve_layer_types(lambda f, i: f["sliding_window"] is not None and i >= first)(
        fields, complaints
    )


def write_config(config: Qwen2Config) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields, and the table."""
    return {**write_decoder(config, QWEN2, "qwen2"), **write_windows(config)}, QWEN2


def write_windows(config: Any) -> dict[str, Any]:
    """Return the fields for older readers: whether a window is used, and from which layer on."""
    sliding = [i for i in range(config.num_hidden_layers) if config.is_sliding(i)]
    first = sliding[0] if sliding else config.num_hidden_layers
    return {"use_sliding_window": bool(sliding), "max_window_layers": first}
