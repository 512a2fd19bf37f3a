"""Adapters for training, added to parameters that are already sharded on a mesh.

New matrices are placed where their shard of the weight is; for a pipeline's stacked weights they
are stacked in the same way.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.sharding.mesh_spec import build_mesh
from jaxllm.sharding.model_sharding import ModelSharding
from jaxllm.sharding.pipeline.stage_params import stack_leaves
from jaxllm.sharding.shard_params import ParamSharder
from jaxllm.sharding.sharded_model import ShardedModel
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.types.lora import LoraWeight

WrapLeaf = Callable[[str, Any], Any]


def attach_adapter(model: Model, params: Params, wrap: WrapLeaf) -> Params:
    """Add an adapter to parameters where they are, and place its arrays.

    Args:
        wrap: wraps the weight at a path of the unsharded model; returns a weight without an
            adapter unchanged.

    Raises:
        ConfigError: if an adapter cannot be placed.
    """
    if not isinstance(model, ShardedModel):
        return map_leaves(wrap, params)
    placer = model.make_placer()

    def attach_leaf(path: str, weight: Any) -> Any:
        paths = model.unsharded_paths(path)
        names = [name for name in paths if name is not None]
        wrapped = [wrap(name, weight) for name in names]
        if all(x is weight for x in wrapped):
            return weight
        if any(x is weight for x in wrapped):
            raise ConfigError(
                f"the adapter targets only some of {', '.join(names)}, which share one place in the"
                " stages of a pipeline. Target all of them, or use a mesh with stage=1"
            )
        _check_adapter(model, path, wrapped[0])
        if len(paths) == 1:
            return _clear_norms(placer.place_adapter(path, wrapped[0]))
        bare = [x.replace(weight=None) for x in wrapped]
        blank = jax.tree.map(jnp.zeros_like, bare[0])  # the place of a later stage may be empty
        bare += [blank] * (len(paths) - len(names))
        placed = [
            ParamSharder.place_adapter(placer, name, x)
            for name, x in zip(model.template_paths(path), bare, strict=True)
            if placer.is_local(name)
        ]
        arrays = zip(*map(jax.tree.leaves, placed), strict=True)
        stacks = [stack_leaves("/".join(names), some, build_mesh(model.axes)) for some in arrays]
        adapter: Any = jax.tree.unflatten(jax.tree.structure(placed[0]), stacks)
        return adapter.replace(weight=weight)

    return map_leaves(attach_leaf, params)


def _clear_norms(leaf: Any) -> Any:
    """Clear the norms of a DoRA weight: they change in training and are computed at each use."""
    if not isinstance(leaf, LoraWeight):
        return leaf
    return leaf.replace(norm=None, weight=_clear_norms(leaf.weight))


def _check_adapter(model: ModelSharding, path: str, adapted: LoraWeight) -> None:
    """Raise ConfigError for an adapter that cannot be trained on this mesh."""
    axes = model.axes
    for name, why in (
        ("sequence", "drawn for whole texts, but the sequence axis splits them"),
        ("stage", "drawn for all rows at once, but stages run them in microbatches"),
    ):
        if adapted.dropout and getattr(axes, name) > 1:
            raise ConfigError(f"dropout is {why}. Drop it, or use a mesh with {name}=1")
    if adapted.magnitude is None:
        return
    if axes.stage > 1:
        raise ConfigError(
            "DoRA cannot be trained on stages: it needs each layer's row norms, but stages stack"
            " several layers in one array. Train LoRA, or use a mesh with stage=1"
        )
    parts = axes.num_shards(model.find_rule(path).axis_names)
    if adapted.site == "rows" and parts > 1:
        raise ConfigError(
            f"{path}: DoRA cannot train column norms of a table whose rows are sharded. Remove it"
            " from DoRA's targets, or use a mesh with tensor=1"
        )
