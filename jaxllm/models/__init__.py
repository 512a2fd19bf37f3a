"""Flax modules that name parameters and call `ops`; a file's name is its `model_type`."""

import dataclasses
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.models.gpt2 import GPT2
from jaxllm.models.llama import Llama
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import Precision

MODELS: dict[str, Any] = {"llama": Llama, "gpt2": GPT2}


def build(config: ModelConfig, precision: Precision | None = None) -> nn.Module:
    """The module of this architecture: stateless, hashable, a valid static argument of `jax.jit`.

    precision: float32 everywhere unless given.
    """
    return MODELS[config.model_type](config=config, precision=precision or Precision())


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
