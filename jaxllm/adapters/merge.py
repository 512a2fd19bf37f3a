"""Merge an adapter into the weights, at the rounding error of the target format."""

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
    """Merge the adapter into the weights; return the configuration and parameters.

    format: format of the merged matrices (any of `weights.formats`); those narrower than float32
    round the sum, so the output changes slightly. Other weights keep their format. A tied embedding
    with an adapter is untied, because its two uses differ.

    Raises ConfigError if there is no adapter, or if there are several and none is selected.
    """
    leaves = dict(flatten(params))
    if not any(isinstance(leaf, Adapted) for leaf in leaves.values()):
        raise ConfigError("no adapter to merge: the parameters have none attached")
    tokens = f"{models.family(config.model_type).tokens}.weight"
    untied = config.tie_word_embeddings and isinstance(leaves[tokens], Adapted)

    def alone(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Adapted):
            return leaf
        if leaf.idle:
            raise ConfigError("several adapters are attached. Choose the one to merge")
        return as_format(leaf.dense(jnp.float32), format)

    def of_site(leaf: Any, site: str) -> Any:
        """Merge a tied embedding for one of its two uses."""
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
