"""Sparse upcycling: a mixture of experts from a dense model (Komatsuzaki et al. 2022).

Every expert starts as a copy of the MLP, the router as noise. The weights of a token's experts sum
to 1, so the outputs are unchanged, whichever experts are chosen, up to rounding of that sum.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import models
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.models.llama import LlamaConfig
from jaxllm.models.mixtral import MixtralConfig
from jaxllm.models.moe import MoEConfig
from jaxllm.models.qwen3 import Qwen3Config
from jaxllm.models.qwen3_moe import Qwen3MoeConfig
from jaxllm.runtime.validation import check_seed
from jaxllm.weights.formats import as_weight, can_stack, weight_format
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.precision import match_precision
from jaxllm.weights.types.arrays import DTYPES

DEVIATION = 0.02  # of the router's weights


def upcycle_model(lm: LM, experts: int, per_token: int, *, seed: int = 0) -> LM:
    """Return the mixture: Mixtral for a Llama or Mistral, Qwen3-MoE for a Qwen3.

    Formats and tokenizer stay. Needs memory for one more copy of the MLPs per expert.

    Args:
        seed: of the router's weights, which have a standard deviation of 0.02.

    Raises ConfigError for another family, for features that the mixture's family lacks, and for
    invalid numbers of experts.
    """
    known = {type_: make for type_, make in _MAKERS.items() if isinstance(lm.config, type_)}
    if not known:
        raise ConfigError(
            f"a {lm.config.model_type} cannot be upcycled: only llama, mistral and qwen3 can"
        )
    make = next(iter(known.values()))
    config = make(lm.config, num_experts=experts, num_experts_per_tok=per_token)
    params, key = dict(lm.params), jax.random.key(check_seed(seed))
    for number in range(config.num_hidden_layers):
        name = f"{models.get_family(config.model_type).layers}.{number}"
        stacks = map_leaves(partial(_repeat_weight, experts, f"{name}.mlp."), params[name]["mlp"])
        layer_key = jax.random.fold_in(key, number)
        gate = DEVIATION * jax.random.normal(layer_key, (experts, config.hidden_size))
        gate = gate.astype(DTYPES[lm.model.precision.weights])
        params[name] = {**params[name], "mlp": {"gate": {"weight": gate}, "experts": stacks}}
    params = _sort_params(params, config)
    model = models.build(config, match_precision(params, lm.model.precision))
    return dataclasses.replace(lm, config=config, model=model, params=params, recipe=())


def _repeat_weight(count: int, prefix: str, path: str, leaf: Any) -> Any:
    name = weight_format(leaf)
    if as_weight(leaf).is_composite or not can_stack(name):
        raise ConfigError(f"{prefix}{path} is {name}, which experts do not support: dequantize it")
    return jax.tree.map(lambda x: jnp.repeat(x[None], count, axis=0), leaf)


def _sort_params(params: Params, config: MoEConfig) -> Params:
    """Return the parameters in the order of the model's definition."""
    shapes = models.param_shapes(models.build(config))

    def sort_dict(order: Params, params: Params) -> Params:
        return {
            name: sort_dict(part, params[name]) if isinstance(part, dict) else params[name]
            for name, part in order.items()
        }

    return sort_dict(shapes, params)


def _common_fields(config: ModelConfig, mixture: type[MoEConfig], **extra: Any) -> dict[str, Any]:
    """Return the config fields that both families have, and `extra`."""
    fields = {f.name for f in dataclasses.fields(mixture)}
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {**{k: v for k, v in values.items() if k in fields}, **extra}


def _mixtral(config: LlamaConfig, **numbers: int) -> MixtralConfig:
    if config.attention_bias or config.mlp_bias:
        raise ConfigError("Mixtral does not support biases, which this model has")
    if config.attention is not None:
        raise ConfigError(f"Mixtral does not support {config.attention.kind!r} attention")
    return MixtralConfig(**_common_fields(config, MixtralConfig, **numbers))


def _qwen3_moe(config: Qwen3Config, **numbers: int) -> Qwen3MoeConfig:
    layers = range(config.num_hidden_layers)
    if len({config.window(i) for i in layers}) > 1:
        raise ConfigError("Qwen3-MoE needs the same window in all layers: this model's differ")
    more = {
        "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": True,
        "mlp_layer_types": ("sparse",) * len(layers),
        "sliding_window": config.window(0),
    }
    return Qwen3MoeConfig(**_common_fields(config, Qwen3MoeConfig, **numbers, **more))


_MAKERS: dict[type[ModelConfig], Callable[..., MoEConfig]] = {
    LlamaConfig: _mixtral,
    Qwen3Config: _qwen3_moe,
}
