"""Qwen3 checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import (
    ATTENTION_BIAS,
    LAYER_TYPES,
    SLIDING_WINDOW,
    make_table,
    read_decoder,
    write_decoder,
)
from jaxllm.convert.qwen2 import CONTEXT, WINDOW_FIELDS, resolve_windows, write_windows
from jaxllm.convert.tables import Architecture, Field
from jaxllm.models.qwen3 import Qwen3Config

HEAD_DIM = Field("head_dim", "head_dim", 128)
QWEN3 = make_table(
    "Qwen3", CONTEXT, HEAD_DIM, ATTENTION_BIAS, SLIDING_WINDOW, LAYER_TYPES, *WINDOW_FIELDS
)

READS = {"qwen3": QWEN3}


def read_config(table: Architecture, data: Mapping[str, Any]) -> Qwen3Config:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    return read_decoder(Qwen3Config, table, data, finish=resolve_windows)


def write_config(config: Qwen3Config) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields, and the table."""
    return {**write_decoder(config, QWEN3, "qwen3"), **write_windows(config)}, QWEN3
