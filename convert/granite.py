"""Granite checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.models.granite import GraniteConfig

from .decoders import ATTENTION_BIAS, MLP_BIAS, read_decoder, table, write_decoder
from .tables import Architecture, Field

MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
GRANITE = table(
    "Granite", ATTENTION_BIAS, MLP_BIAS, *(Field(name, name, 1.0) for name in MULTIPLIERS)
)

READS = {"granite": GRANITE}


def read_config(table: Architecture, data: Mapping[str, Any]) -> GraniteConfig:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    return read_decoder(GraniteConfig, table, data)


def write_config(config: GraniteConfig) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields, and the table."""
    return write_decoder(config, GRANITE, "granite"), GRANITE
