"""Gemma 2 checkpoints: the table, and fields shared with Gemma 3."""

from typing import Any

from jaxllm.convert.decoders import ATTENTION_BIAS, LAYER_TYPES, make_table, resolve_layer_types
from jaxllm.convert.tables import Field
from jaxllm.errors import ConfigError
from jaxllm.models.gemma2 import Gemma2Config, GemmaConfig

GEMMA_FIELDS = (
    ATTENTION_BIAS,
    LAYER_TYPES,
    Field("head_dim", "head_dim", 256),
    Field("hidden_activation", "hidden_act", "gelu_pytorch_tanh"),
    Field("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
    Field("sliding_window", "sliding_window", 4096),
    Field("tie_word_embeddings", "tie_word_embeddings", True),
)
# hidden_act: early files have it besides hidden_activation, but transformers does not read it.
IGNORED = frozenset({"cache_implementation", "hidden_act"})
SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def write_scalar(config: GemmaConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Write `query_pre_attn_scalar` as the int that transformers requires.

    Native files of older versions have a float. Raises ConfigError if it is not a whole number.
    """
    scalar = config.query_pre_attn_scalar
    if int(scalar) != scalar:
        raise ConfigError(
            f"query_pre_attn_scalar is invalid in the Hugging Face format: got {scalar}, expected"
            " a whole number, as transformers requires. Save the model in the native format"
        )
    return {**data, "query_pre_attn_scalar": int(scalar)}


GEMMA2 = make_table(
    "Gemma2",
    Gemma2Config,
    *GEMMA_FIELDS,
    Field("max_position_embeddings", "max_position_embeddings", 8192),
    Field("attn_logit_softcapping", "attn_logit_softcapping", None),
    Field("final_logit_softcapping", "final_logit_softcapping", None),
    ignored_fields=IGNORED,
    heads_divide_width=True,
    prepare=lambda data: {**SOFT_CAPS, **data},
    derive=lambda fields, complaints, data: resolve_layer_types(fields, lambda i: i % 2 == 0),
    finish=write_scalar,
)
TABLES = (GEMMA2,)
