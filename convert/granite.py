"""Granite checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import (
    ATTENTION_BIAS,
    MLP_BIAS,
    make_table,
    read_decoder,
    write_decoder,
)
from jaxllm.convert.tables import Architecture, Field
from jaxllm.models.granite import GraniteConfig

MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
GRANITE = make_table(
    "Granite", ATTENTION_BIAS, MLP_BIAS, *(Field(name, name, 1.0) for name in MULTIPLIERS)
)

READS = {"granite": GRANITE}


def read_config(table: Architecture, data: Mapping[str, Any]) -> GraniteConfig:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    return read_decoder(GraniteConfig, table, data)


def write_config(config: GraniteConfig) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields, and the table."""
    return write_decoder(config, GRANITE, "granite"), GRANITE
