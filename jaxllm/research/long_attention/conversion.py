"""Conversion of a dense model to Infini-attention, for further training (arXiv 2404.07143, 2.1).

Within the first segment the outputs are unchanged, bit for bit. Beyond it the gates start nearly
closed: the memory has a share of sigmoid(-4) = 0.018, and the gradient is as small.
"""

import dataclasses

import jax.numpy as jnp

from jaxllm import models
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.models.llama import LlamaConfig
from jaxllm.research.long_attention.memory import UPDATES, Update
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.runtime.validation import check_int
from jaxllm.weights.precision import match_precision
from jaxllm.weights.types.arrays import DTYPES

INITIAL_GATE = -4.0  # beta; at -100, as in some implementations, the gates never learn


def check_update(name: str) -> Update:
    """Return the update rule of that name. Raises ConfigError if there is none."""
    for update in UPDATES:
        if update == name:
            return update
    raise ConfigError(f"update must be one of {', '.join(UPDATES)}, got {name!r:.40}")


def with_memory(
    lm: LM, segment_length: int, *, update: Update = "linear", gate: float = INITIAL_GATE
) -> LM:
    """Return the model with a compressive memory in every layer; formats and tokenizer stay.

    Args:
        segment_length: tokens per segment, within which attention is exact.
        update: see `memory`.
        gate: initial beta of every head.

    Raises ConfigError for another family, a sliding window, segments longer than the context, and
    a model that already has a kind of long attention.
    """
    if not isinstance(lm.config, LlamaConfig):
        raise ConfigError(f"a {lm.config.model_type} cannot have a memory: only llama models can")
    if lm.config.attention is not None:
        raise ConfigError(f"this model already has {lm.config.attention.kind!r} attention")
    check_update(update)
    length = check_int("segment_length", segment_length, 1, error=ConfigError)
    kind = LongAttention(kind="infini", segment_length=length, update=update)
    config = dataclasses.replace(lm.config, attention=kind)
    dtype = DTYPES[lm.model.precision.weights]
    gate_N = jnp.full(config.num_attention_heads, gate, dtype)
    params, name = dict(lm.params), models.get_family(config.model_type).layers
    for number in range(config.num_hidden_layers):
        layer = params[f"{name}.{number}"]
        attention = {**layer["self_attn"], "memory_gate": gate_N}
        params[f"{name}.{number}"] = {**layer, "self_attn": attention}
    model = models.build(config, match_precision(params, lm.model.precision))
    return dataclasses.replace(lm, config=config, model=model, params=params, recipe=())
