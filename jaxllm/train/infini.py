"""An Infini-attention model made from a dense one, to be trained on (arXiv 2404.07143, 2.1).

Within the first segment it computes what the model did, bit for bit. Beyond it the gates begin
nearly shut: sigmoid(-4) is a share of 0.018 of the memory, and the gradient is as large.
"""

import dataclasses

import jax.numpy as jnp

from jaxllm import models
from jaxllm.api import LM
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.longer import LongAttention
from jaxllm.models.llama import LlamaConfig
from jaxllm.ops.compressive import UPDATES, Update
from jaxllm.weights.leaves.arrays import DTYPES
from jaxllm.weights.precision import exactly
from jaxllm.whole import whole

GATE = -4.0  # beta; at the -100 of some implementations nothing is ever learned
GATE_RATE = 0.01  # of beta; at the rate of the rest gates do not leave where they began


def gate_rates(config: ModelConfig, rate: float | None = None) -> tuple[tuple[str, float], ...]:
    """What `Optimizer.rates` is for such a model; none for others. Raises ConfigError for a rate
    that there is no gate for.
    """
    if config.segment_length is not None:
        return ((r".*\.memory_gate", GATE_RATE if rate is None else rate),)
    if rate is not None:
        raise ConfigError(f"this {config.model_type} has no gates for --gate-lr: jaxllm infini")
    return ()


def as_update(name: str) -> Update:
    """The rule of that name. Raises ConfigError where there is none."""
    found = next((update for update in UPDATES if update == name), None)
    if found is None:
        raise ConfigError(f"update must be one of {', '.join(UPDATES)}, got {name!r:.40}")
    return found


def with_memory(
    lm: LM, segment_length: int, *, update: Update = "linear", gate: float = GATE
) -> LM:
    """The model with a compressive memory in every layer, in its own formats; the tokenizer stays.

    segment_length: tokens that are attended to as they are. update: see `ops.compressive`. gate:
    beta of every head. Raises ConfigError for another family, a sliding window, segments longer
    than the context, and a model that has a kind of long attention already.
    """
    if not isinstance(lm.config, LlamaConfig):
        raise ConfigError(f"a {lm.config.model_type} cannot have a memory: a llama can")
    if lm.config.attention is not None:
        raise ConfigError(f"this model has attention of kind {lm.config.attention.kind!r} already")
    as_update(update)
    length = whole("segment_length", segment_length, 1, error=ConfigError)
    kind = LongAttention(kind="infini", segment_length=length, update=update)
    config = dataclasses.replace(lm.config, attention=kind)
    dtype = DTYPES[lm.model.precision.weights]
    gate_N = jnp.full(config.num_attention_heads, gate, dtype)
    params, name = dict(lm.params), models.family(config.model_type).layers
    for number in range(config.num_hidden_layers):
        layer = params[f"{name}.{number}"]
        attention = {**layer["self_attn"], "memory_gate": gate_N}
        params[f"{name}.{number}"] = {**layer, "self_attn": attention}
    model = models.build(config, exactly(params, lm.model.precision))
    return dataclasses.replace(lm, config=config, model=model, params=params, recipe=())
