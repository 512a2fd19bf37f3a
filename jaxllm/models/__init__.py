"""Flax modules that name parameters and call `ops`; a family's file is named after `model_type`.

Families have one row each in `FAMILIES`. family: the row type. decoder: the base of most families;
hybrid_attention: layers with full or sliding attention; moe: mixtures of experts; latent_attention:
DeepSeek's. modules: shared Flax modules; layers: inputs and outputs of layers; run_blocks: one by
one; sites: the named places that can be read and edited; interventions: edits; inputs,
site_inputs: checks of a step's inputs. A family's file also defines
its configuration with rotary settings and windows (`ModelConfig.layer_rope`, `.window`). Its
checkpoint mapping is a table in `convert`. docs/add_a_family.md covers all of it.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.family import Family
from jaxllm.models.layers import AttentionContext, Layer, rotary_angles
from jaxllm.models.modules import Head
from jaxllm.ops.compile_cache import load_or_make
from jaxllm.runtime.schema import as_schema
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.precision import Precision

# The names of the families' modules, which are their model types.
_NAMES = (
    "llama",
    "gpt2",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "phi3",
    "olmo2",
    "olmo3",
    "ministral3",
    "smollm3",
    "granite",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "gpt_neox",
    "qwen3_5_text",
    "lfm2",
    "glm4",
    "seed_oss",
    "ernie4_5",
    "exaone4",
    "cohere2",
    "granitemoehybrid",
    "granitemoehybrid_moe",
    "glm4_moe",
    "lfm2_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "minicpm3",
)


class _Families(Mapping[str, Family]):
    """The families' rows by model type; a family's module is imported when its row is read."""

    def __getitem__(self, name: str) -> Family:
        if name not in _NAMES:
            raise KeyError(name)
        family: Family = import_module(f"{__name__}.{name}").FAMILY
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


FAMILIES = _Families()


def get_family(model_type: str) -> Family:
    """Return the row of a `model_type`. Raises ConfigError for an unknown one."""
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported (known: {', '.join(FAMILIES)})"
        )
    return FAMILIES[model_type]


def build(config: ModelConfig, precision: Precision | None = None) -> Model:
    """Return the architecture's module: stateless, hashable, a valid static argument of `jax.jit`.

    Args:
        precision: default float32 everywhere.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"config must be a ModelConfig (lm.config), got {config!r:.60}")
    if not isinstance(precision, Precision | None):
        raise ConfigError(
            f"precision must be a Precision, got {precision!r:.60}. For one dtype, use"
            " Precision.uniform(dtype)"
        )
    module: Any = get_family(config.model_type).module
    built: Any = module(config=config, precision=precision or Precision())
    return built


def run_layer(
    model: Model,
    layer: int,
    params: Params,
    x_BTD: jax.Array,
    position_BT: jax.Array,
    length_B: jax.Array,
    read: frozenset[str] = frozenset(),
) -> Layer:
    """Run one layer on the output of the layers before it, without a cache.

    params: the layer's own. Precision overrides by module path do not apply here. read: the sites
    to record, without the layer's number.
    """
    c: ModelConfig = model.config
    if c.links_layers:
        raise ConfigError(
            f"layers of this {c.model_type} model read keys of other layers or embeddings of"
            " tokens (num_kv_shared_layers, hidden_size_per_layer_input): none runs alone, which"
            " calibration needs"
        )
    block = get_family(c.model_type).block
    module: Any = block(config=c, precision=model.precision, layer=layer, parent=None)
    angles = rotary_angles(c, position_BT, length_B)
    context = AttentionContext(position_BT, angles=angles, read=read)
    ran: Layer = module.apply({"params": params}, x_BTD, context)
    return ran


def head_params(model: Model, params: Params) -> Params:
    """Return the parameters that `compute_logits` reads."""
    c = model.config
    name = get_family(c.model_type).token_table if c.tie_word_embeddings else "lm_head"
    return {name: params[name]}


def compute_logits(model: Model, head: Params, norm_BTD: jax.Array) -> jax.Array:
    """Return the logits of an unsharded model, float32 `[B, T, V]`, from its final norm's output.

    head: `head_params` of the model.
    """
    (module,) = head.values()
    head_module: Any = Head(model.config, model.precision)
    logits: jax.Array = head_module.apply({"params": head}, norm_BTD, module["weight"])
    return logits


def config_from_dict(data: Any, where: str = "the configuration") -> ModelConfig:
    """Rebuild a configuration from the output of `ModelConfig.to_dict`.

    where: the source, for messages. Raises ConfigError for an unknown model type, and for missing,
    unknown or invalid fields.
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
    """Return the structure that `params` must have, with a `jax.ShapeDtypeStruct` per parameter.

    Only one layer of each kind is traced, however many layers a configuration has.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a Flax module (lm.model), got {model!r:.60}")
    c: ModelConfig = model.config
    forms = [c.layer_template(i) for i in range(c.num_hidden_layers)]
    if c.links_layers:
        return _trace_shapes(model)
    shapes = {form: _trace_shapes(model.clone(config=c.with_layers([form]))) for form in set(forms)}
    repeated: Params = {}
    for name, form in shapes[forms[0]].items():
        block, _, number = name.partition(".")
        if not number:
            repeated[name] = form
            continue
        repeated |= {f"{block}.{i}": shapes[form][name] for i, form in enumerate(forms)}
    return repeated


def _trace_shapes(model: nn.Module) -> Params:
    """Return the parameter shapes of a model, by tracing all of its layers."""

    def shapes_and_dtypes() -> Params:
        """Return shapes and dtype names: plain values, which `load_or_make` can store."""
        token_BT = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        length_B = jax.ShapeDtypeStruct((1,), jnp.int32)
        key = jax.eval_shape(jax.random.key, 0)
        traced = jax.eval_shape(model.init, key, token_BT, token_BT, length_B)["params"]
        return map_leaves(lambda _, leaf: (leaf.shape, leaf.dtype.name), traced)

    plain = load_or_make(model, shapes_and_dtypes)
    return map_leaves(lambda _, form: jax.ShapeDtypeStruct(*form), plain)
