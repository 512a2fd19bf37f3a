"""OLMo 2 checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import ATTENTION_BIAS, make_table, read_decoder, write_decoder
from jaxllm.convert.tables import Architecture, Field
from jaxllm.models.olmo2 import Olmo2Config

OLMO2 = make_table("Olmo2", ATTENTION_BIAS, Field("rms_norm_eps", "norm_eps", 1e-5))

READS = {"olmo2": OLMO2}


def read_config(table: Architecture, data: Mapping[str, Any]) -> Olmo2Config:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    return read_decoder(Olmo2Config, table, data)


def write_config(config: Olmo2Config) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields, and the table."""
    return write_decoder(config, OLMO2, "olmo2"), OLMO2
