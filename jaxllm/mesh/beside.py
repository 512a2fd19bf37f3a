"""Adapters for training, added to parameters that are already sharded on a mesh.

New matrices are placed where their shard of the weight is; for a pipeline's stacked weights they
are stacked in the same way.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import mesh_of
from jaxllm.mesh.pipeline.stacked import stack_of
from jaxllm.mesh.placing import Shared
from jaxllm.mesh.rules import split_of
from jaxllm.weights.leaves.adapted import Adapted
from jaxllm.weights.paths import Params, map_leaves

if TYPE_CHECKING:
    from jaxllm.mesh.meshed import Meshed

Around = Callable[[str, Any], Any]


def beside(model: "Meshed", params: Params, around: Around) -> Params:
    """Implement `weights.paths.Placed.beside` for a model on a mesh."""
    reader = model.reader()

    def leaf(path: str, weight: Any) -> Any:
        every = model.names(path)
        names = [name for name in every if name is not None]
        found = [around(name, weight) for name in names]
        if all(x is weight for x in found):
            return weight
        if any(x is weight for x in found):
            raise ConfigError(
                f"the adapter targets only some of {', '.join(names)}, which share one place in the"
                " stages of a pipeline. Target all of them, or use a mesh with stage=1"
            )
        _check(model, path, found[0])
        if len(every) == 1:
            return _unmeasured(reader.beside(path, found[0]))
        bare = [x.replace(weight=None) for x in found]
        blank = jax.tree.map(jnp.zeros_like, bare[0])  # the place of a later stage may be empty
        bare += [blank] * (len(every) - len(names))
        each = [
            Shared.beside(reader, name, x)
            for name, x in zip(model.homes(path), bare, strict=True)
            if reader.here(name)
        ]
        arrays = zip(*map(jax.tree.leaves, each), strict=True)
        stacks = [stack_of("/".join(names), some, mesh_of(model.axes)) for some in arrays]
        made: Any = jax.tree.unflatten(jax.tree.structure(each[0]), stacks)
        return made.replace(weight=weight)

    return map_leaves(leaf, params)


def _unmeasured(leaf: Any) -> Any:
    """Clear the norms of a DoRA weight: they change in training and are computed at each use."""
    if not isinstance(leaf, Adapted):
        return leaf
    return leaf.replace(norm=None, weight=_unmeasured(leaf.weight))


def _check(model: "Meshed", path: str, adapted: Adapted) -> None:
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
    parts = axes.over(split_of(model.config, model.exact, path).over)
    if adapted.site == "rows" and parts > 1:
        raise ConfigError(
            f"{path}: DoRA cannot train column norms of a table whose rows are sharded. Remove it"
            " from DoRA's targets, or use a mesh with tensor=1"
        )
