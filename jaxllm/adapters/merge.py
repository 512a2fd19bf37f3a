"""Adapters merged into the weights: one matrix again, which costs what its format rounds away."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxllm import models
from jaxllm.adapters.targets import HEAD
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.weights.formats import as_format
from jaxllm.weights.leaves.adapted import Adapted
from jaxllm.weights.paths import Params, flatten, map_leaves


def merged(
    config: ModelConfig, params: Params, format: str = "float32"
) -> tuple[ModelConfig, Params]:
    """The model with its adapter in the weights, and its configuration.

    format: of the matrices that had an adapter (any of `weights.formats`); what is narrower than
    float32 rounds the sum, and the model is then another than with the adapter beside it. The rest
    keeps its own. A tied table with an adapter becomes two, for it was two in effect.

    Raises ConfigError where there is none, or where more than one is chosen.
    """
    leaves = dict(flatten(params))
    if not any(isinstance(leaf, Adapted) for leaf in leaves.values()):
        raise ConfigError("there is no adapter to merge: these are the model's own weights")
    tokens = f"{models.family(config.model_type).tokens}.weight"
    untied = config.tie_word_embeddings and isinstance(leaves[tokens], Adapted)

    def alone(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Adapted):
            return leaf
        if leaf.idle:
            raise ConfigError("several adapters: choose the one to merge")
        return as_format(leaf.dense(jnp.float32), format)

    def of_site(leaf: Any, site: str) -> Any:
        """A tied table as one of its two uses has it."""
        while isinstance(leaf, Adapted) and leaf.site != site:
            leaf = leaf.weight
        return alone(tokens, leaf)

    if not untied:
        return config, map_leaves(alone, params)
    rest = {path: node for path, node in params.items() if f"{path}.weight" != tokens}
    changed = map_leaves(alone, rest)
    both = {tokens.removesuffix(".weight"): "rows", HEAD: "head"}
    changed |= {m: {"weight": of_site(leaves[tokens], site)} for m, site in both.items()}
    config = dataclasses.replace(config, tie_word_embeddings=False)
    order = models.param_shapes(models.build(config))
    return config, {name: changed[name] for name in order}
