"""Flax modules that name parameters and call `ops`; a file's name is its `model_type`.

`FAMILIES` has a row for each: llama, gpt2; layers: what they share. What a family's rotary settings
and windows are, its configuration says (`ModelConfig.rotary`, `.window`); how its files are read,
its table in `convert`.
"""

import dataclasses
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.config import GPT2Config, LlamaConfig, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.gpt2 import GPT2
from jaxllm.models.llama import Llama
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What is to be known of the models of one `model_type`.

    config, module: their classes. tokens, positions: the paths of the tables of tokens and of
    learned positions (None: there is none). The rest is what stages are called: embeddings, norm,
    and within the layers, whose path is `layers`, the norms, attention, and the MLP's last linear.
    """

    config: type[ModelConfig]
    module: type[nn.Module]
    tokens: str
    positions: str | None
    embeddings: str
    layers: str
    attention_norm: str
    attention: str
    mlp_norm: str
    mlp_down: str
    norm: str

    @property
    def tables(self) -> tuple[str, ...]:
        """The paths of all tables of which a token takes one row."""
        return (self.tokens,) if self.positions is None else (self.tokens, self.positions)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        config=LlamaConfig,
        module=Llama,
        tokens="embed_tokens",
        positions=None,
        embeddings="embed_tokens",
        layers="layers",
        attention_norm="input_layernorm",
        attention="attention",
        mlp_norm="post_attention_layernorm",
        mlp_down="mlp.down_proj",
        norm="norm",
    ),
    "gpt2": Family(
        config=GPT2Config,
        module=GPT2,
        tokens="wte",
        positions="wpe",
        embeddings="embeddings",  # the sum of both tables' rows
        layers="h",
        attention_norm="ln_1",
        attention="attn",
        mlp_norm="ln_2",
        mlp_down="mlp.c_proj",
        norm="ln_f",
    ),
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
    module: Any = family(config.model_type).module
    built: nn.Module = module(config=config, precision=precision or Precision())
    return built


@cache
def param_shapes(model: nn.Module) -> Params:
    """The form that `params` must have: a `jax.ShapeDtypeStruct` for every parameter.

    Layers are of one form, so one is traced, however many a configuration claims.
    """
    token_BT = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    length_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    layers: int = model.config.num_hidden_layers
    one = model.clone(config=dataclasses.replace(model.config, num_hidden_layers=1))
    shapes = jax.eval_shape(one.init, jax.random.key(0), token_BT, token_BT, length_B)["params"]
    repeated: Params = {}
    for name, form in shapes.items():
        block, _, number = name.partition(".")
        repeated |= {f"{block}.{i}": form for i in range(layers)} if number else {name: form}
    return repeated
