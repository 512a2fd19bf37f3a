"""Llama and Mistral checkpoints: the tables."""

from collections.abc import Mapping
from typing import Any

from jaxllm.config.attention_kind import AttentionKind
from jaxllm.convert.decoders import ATTENTION_BIAS, MLP_BIAS, SLIDING_WINDOW, make_table
from jaxllm.errors import ConfigError
from jaxllm.models.llama import LlamaConfig
from jaxllm.runtime.schema import as_schema


def _read_attention(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    if (attention := data.get("attention")) is not None:
        where = "config.json: attention"
        fields["attention"] = as_schema(attention, AttentionKind, where, ConfigError)


LLAMA = make_table(
    "Llama",
    LlamaConfig,
    ATTENTION_BIAS,
    MLP_BIAS,
    architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
    ignored_fields=frozenset({"attention"}),  # jaxllm's own field
    heads_divide_width=True,
    writes=lambda config: config.sliding_window is None,
    derive=_read_attention,
)
# Mistral's linears have no biases, and its configuration has no fields for them.
MISTRAL = make_table("Mistral", LlamaConfig, SLIDING_WINDOW, model_type="mistral")
TABLES = (LLAMA, MISTRAL)
