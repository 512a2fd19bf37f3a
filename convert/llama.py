"""Llama and Mistral checkpoints: the tables."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.models.llama import LlamaConfig

from .decoders import ATTENTION_BIAS, MLP_BIAS, SLIDING, read_decoder, table, write_decoder
from .tables import Architecture

LLAMA = table("Llama", ATTENTION_BIAS, MLP_BIAS, allowed={"pretraining_tp": (1, None)})
LLAMA = dataclasses.replace(LLAMA, architectures=(*LLAMA.architectures, "LLaMAForCausalLM"))
# Mistral's linears have no biases, and its configuration no words for them.
MISTRAL = table("Mistral", SLIDING, allowed={"pretraining_tp": (1, None)})

READS = {"llama": LLAMA, "mistral": MISTRAL}


def read_config(table: Architecture, data: Mapping[str, Any]) -> LlamaConfig:
    """config.json to LlamaConfig. Raises ConfigError with everything that is wrong."""
    return read_decoder(LlamaConfig, table, data)


def write_config(config: LlamaConfig) -> tuple[dict[str, Any], Architecture]:
    """config.json's fields, and the table."""
    model_type = "llama" if config.sliding_window is None else "mistral"
    return write_decoder(config, READS[model_type], model_type), READS[model_type]
