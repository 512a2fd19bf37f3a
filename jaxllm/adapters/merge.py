"""Merge an adapter into the weights, at the rounding error of the target format."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxllm import models
from jaxllm.adapters.targets import HEAD
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.weights.formats import as_format
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.types.lora import LoraWeight


def merge_adapter(
    config: ModelConfig, params: Params, format: str = "float32"
) -> tuple[ModelConfig, Params]:
    """Merge the adapter into the weights; return the configuration and parameters.

    format: format of the merged matrices (any of `weights.formats`); those narrower than float32
    round the sum, so the output changes slightly. Other weights keep their format. A tied embedding
    with an adapter is untied, because its two uses differ.

    Raises ConfigError if there is no adapter, or if there are several and none is selected.
    """
    leaves = dict(flatten(params))
    if not any(isinstance(leaf, LoraWeight) for leaf in leaves.values()):
        raise ConfigError("no adapter to merge: the parameters have none attached")
    tokens = f"{models.get_family(config.model_type).token_table}.weight"
    untied = config.tie_word_embeddings and isinstance(leaves[tokens], LoraWeight)

    def merge_leaf(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, LoraWeight):
            return leaf
        if leaf.idle:
            raise ConfigError("several adapters are attached. Choose the one to merge")
        return as_format(leaf.to_dense(jnp.float32), format)

    def merge_site(leaf: Any, site: str) -> Any:
        """Merge a tied embedding for one of its two uses."""
        while isinstance(leaf, LoraWeight) and leaf.site != site:
            leaf = leaf.weight
        return merge_leaf(tokens, leaf)

    if not untied:
        return config, map_leaves(merge_leaf, params)
    rest = {path: node for path, node in params.items() if f"{path}.weight" != tokens}
    changed = map_leaves(merge_leaf, rest)
    both = {tokens.removesuffix(".weight"): "rows", HEAD: "head"}
    changed |= {m: {"weight": merge_site(leaves[tokens], site)} for m, site in both.items()}
    config = dataclasses.replace(config, tie_word_embeddings=False)
    order = models.param_shapes(models.build(config))
    return config, {name: changed[name] for name in order}
