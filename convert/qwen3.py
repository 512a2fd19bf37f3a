"""Qwen3 checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.models.qwen3 import Qwen3Config

from .decoders import ATTENTION_BIAS, LAYER_TYPES, SLIDING, read_decoder, table, write_decoder
from .qwen2 import CONTEXT, WINDOWS, windows, written_windows
from .tables import Architecture, Field

HEAD_DIM = Field("head_dim", "head_dim", 128)
QWEN3 = table("Qwen3", CONTEXT, HEAD_DIM, ATTENTION_BIAS, SLIDING, LAYER_TYPES, *WINDOWS)

READS = {"qwen3": QWEN3}


def read_config(table: Architecture, data: Mapping[str, Any]) -> Qwen3Config:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    return read_decoder(Qwen3Config, table, data, finish=windows)


def write_config(config: Qwen3Config) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields, and the table."""
    return {**write_decoder(config, QWEN3, "qwen3"), **written_windows(config)}, QWEN3
