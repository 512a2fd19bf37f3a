"""Llama and Mistral checkpoints: the tables."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.files import as_schema
from jaxllm.longer import LongAttention
from jaxllm.models.llama import LlamaConfig

from .decoders import ATTENTION_BIAS, MLP_BIAS, SLIDING, read_decoder, table, write_decoder
from .tables import Architecture

LLAMA = table(
    "Llama",
    ATTENTION_BIAS,
    MLP_BIAS,
    ignored=frozenset({"attention"}),  # jaxllm's own field, read below
    divides_width=True,
)
LLAMA = dataclasses.replace(LLAMA, architectures=(*LLAMA.architectures, "LLaMAForCausalLM"))
# Mistral's linears have no biases, and its configuration has no fields for them.
MISTRAL = table("Mistral", SLIDING)

READS = {"llama": LLAMA, "mistral": MISTRAL}


def read_config(table: Architecture, data: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    given = data.get("attention") if "attention" in table.ignored else None
    if given is None:
        return read_decoder(LlamaConfig, table, data)
    where = "config.json: attention"
    kind: LongAttention = as_schema(given, LongAttention, where, ConfigError)

    def finish(fields: dict[str, Any], complaints: list[str]) -> None:
        fields["attention"] = kind

    return read_decoder(LlamaConfig, table, data, finish=finish)


def write_config(config: LlamaConfig) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields and the table; raise ConfigError unless attention is dense."""
    if config.attention is not None:
        raise ConfigError(
            f"attention of kind {config.attention.kind!r} cannot be saved in the Hugging Face"
            " format: transformers would use dense attention. Save the model in the native format"
        )
    model_type = "llama" if config.sliding_window is None else "mistral"
    return write_decoder(config, READS[model_type], model_type), READS[model_type]
