"""Flax modules that name parameters and call `ops`; a file's name is its `model_type`.

gpt2, gpt_neox, llama, gemma2, gemma3_text, granite, mixtral, olmo2, phi3, qwen2, qwen3, qwen3_moe,
smollm3: the families, a row each in `FAMILIES`; family: what a row says. decoder: what most of them
are; layer_types: those whose layers see more or less; experts: those of which a token runs a part;
modules: what names parameters; layers: what is computed; long/: attention that is not dense. A
family's file has its configuration too, which says what its rotary settings and windows are
(`ModelConfig.rotary`, `.window`). How its checkpoints are read, its table in `convert` says;
docs/add_a_family.md goes through all of it.
"""

from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.files import as_schema
from jaxllm.models import (
    gemma2,
    gemma3_text,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from jaxllm.models.family import Family
from jaxllm.models.layers import Layer, Scope, angles_of
from jaxllm.programs import recalled
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.precision import Precision

FAMILIES: dict[str, Family] = {
    module.FAMILY.config.model_type: module.FAMILY
    for module in (
        llama,
        gpt2,
        qwen2,
        qwen3,
        gemma2,
        gemma3_text,
        phi3,
        olmo2,
        smollm3,
        granite,
        mixtral,
        qwen3_moe,
        gpt_neox,
    )
}


def family(model_type: str) -> Family:
    """The row of a `model_type`. Raises ConfigError for one that there is not."""
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported (known: {', '.join(FAMILIES)})"
        )
    return FAMILIES[model_type]


def build(config: ModelConfig, precision: Precision | None = None) -> nn.Module:
    """The module of this architecture: stateless, hashable, a valid static argument of `jax.jit`.

    precision: float32 everywhere unless given.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"config must be a ModelConfig (lm.config), got {config!r:.60}")
    if not isinstance(precision, Precision | None):
        raise ConfigError(
            f"precision must be a Precision, got {precision!r:.60}. Of one format:"
            " Precision.uniform(dtype)"
        )
    module: Any = family(config.model_type).module
    built: nn.Module = module(config=config, precision=precision or Precision())
    return built


def run_layer(
    model: nn.Module,
    layer: int,
    params: Params,
    x_BTD: jax.Array,
    position_BT: jax.Array,
    length_B: jax.Array,
) -> Layer:
    """What one layer makes of what the layers before it made of a text, without a cache.

    params: the layer's own. Formats that a module has by its path do not apply here.
    """
    c: ModelConfig = model.config
    block = family(c.model_type).block
    made: Any = block(config=c, precision=model.precision, layer=layer, parent=None)
    scope = Scope(position_BT, angles=angles_of(c, position_BT, length_B))
    ran: Layer = made.apply({"params": params}, x_BTD, scope)
    return ran


def config_from_dict(data: Any, where: str = "the configuration") -> ModelConfig:
    """Rebuild a configuration from `ModelConfig.to_dict`'s form.

    where: its place, for messages. Raises ConfigError for an unknown model type, and for missing,
    unknown or impossible fields.
    """
    fields = dict(as_schema(data, dict[str, Any], where, ConfigError))
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type {model_type!r:.40} is not supported (known: {sorted(FAMILIES)})"
        )
    config: ModelConfig = as_schema(fields, FAMILIES[model_type].config, where, ConfigError)
    return config


@cache
def param_shapes(model: nn.Module) -> Params:
    """The form that `params` must have: a `jax.ShapeDtypeStruct` for every parameter.

    One layer of each form is traced, however many a configuration claims.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a Flax module (lm.model), got {model!r:.60}")
    c: ModelConfig = model.config
    forms = [c.form(i) for i in range(c.num_hidden_layers)]
    found = {form: _shapes_of(model.clone(config=c.with_layers([form]))) for form in set(forms)}
    repeated: Params = {}
    for name, form in found[forms[0]].items():
        block, _, number = name.partition(".")
        if not number:
            repeated[name] = form
            continue
        repeated |= {f"{block}.{i}": found[form][name] for i, form in enumerate(forms)}
    return repeated


def _shapes_of(one: nn.Module) -> Params:
    """The same of a model of one layer."""

    def forms() -> Params:
        """Shapes and names of formats: what is kept between processes is plain."""
        token_BT = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        length_B = jax.ShapeDtypeStruct((1,), jnp.int32)
        key = jax.eval_shape(jax.random.key, 0)
        traced = jax.eval_shape(one.init, key, token_BT, token_BT, length_B)["params"]
        return map_leaves(lambda _, leaf: (leaf.shape, leaf.dtype.name), traced)

    plain = recalled(one, forms)
    return map_leaves(lambda _, form: jax.ShapeDtypeStruct(*form), plain)
