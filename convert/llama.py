"""Llama and Mistral checkpoints: the tables."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config.long_attention import LongAttention
from jaxllm.convert.decoders import (
    ATTENTION_BIAS,
    MLP_BIAS,
    SLIDING_WINDOW,
    make_table,
    read_decoder,
    write_decoder,
)
from jaxllm.convert.tables import Architecture
from jaxllm.errors import ConfigError
from jaxllm.models.llama import LlamaConfig
from jaxllm.runtime.schema import as_schema

LLAMA = make_table(
    "Llama",
    ATTENTION_BIAS,
    MLP_BIAS,
    ignored_fields=frozenset({"attention"}),  # jaxllm's own field, read below
    heads_divide_width=True,
)
LLAMA = dataclasses.replace(LLAMA, architectures=(*LLAMA.architectures, "LLaMAForCausalLM"))
# Mistral's linears have no biases, and its configuration has no fields for them.
MISTRAL = make_table("Mistral", SLIDING_WINDOW)

READS = {"llama": LLAMA, "mistral": MISTRAL}


def read_config(table: Architecture, data: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    given = data.get("attention") if "attention" in table.ignored_fields else None
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
