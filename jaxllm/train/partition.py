"""Partition of the parameters into trained and frozen ones, and its inverse.

The trained parameters are a flat dict of float32 arrays by path. So the optimizer, a checkpoint and
a rule use the same names, whether an array is a whole weight or a field of a weight type. On a mesh
an array keeps the path and the rank of its parameter: uneven shards, and the shards of pipeline
stages, are concatenated along the first axis.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import models
from jaxllm.checkpoints.native import Checkpoint
from jaxllm.errors import ConfigError
from jaxllm.files import compile_pattern
from jaxllm.sharding.shard_list import ShardList
from jaxllm.weights.paths import Params, first_match, flatten, list_arrays
from jaxllm.weights.types.base import WeightBase

TrainedParams = dict[str, jax.Array]
Rules = tuple[tuple[str, bool], ...]
NamesOf = Callable[[str], tuple[str | None, ...]]  # `Model.unsharded_paths`
ALL_PARAMS: Rules = ((".*", True),)
_PARTS = ".shards"  # the field of `ShardList`


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Placeholder:
    """A placeholder for an array that was taken out, with the dtype and shape to restore."""

    dtype: str
    shape: tuple[int, ...]


def identity_path(path: str) -> tuple[str | None, ...]:
    """Return the path of a parameter of an unsharded model, as `Model.unsharded_paths` does."""
    return (path,)


def trainable_params(params: Mapping[str, Any]) -> TrainedParams:
    """Return the arrays that training can change, by path and in their own dtypes.

    These are all float arrays; of a weight type only its `trainable_fields`.
    """
    arrays = dict(_iter_trainable(params, ""))
    return {path: x for path, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}


def check_rules(opened: Checkpoint, rules: Rules) -> None:
    """Raise ConfigError if a rule matches no parameter of a float checkpoint.

    Quantized checkpoints have more paths: `partition` checks those after loading.
    """
    for regex, _ in rules:
        compile_pattern(regex, "the rules")
    if not opened.formats:
        paths = [path for path, _ in flatten(models.param_shapes(models.build(opened.config)))]
        _check_match(rules, paths, paths)


def partition(
    params: Params,
    rules: Rules = ALL_PARAMS,
    compute_params: Params | None = None,
    names: NamesOf = identity_path,
) -> tuple[TrainedParams, Params]:
    """Return the trained arrays in float32 (master weights), and the parameters with a
    `Placeholder` in place of each of them.

    Args:
        rules: rows `(regex, train)` over the paths of `trainable_params`, as in `weights.paths`.
            The first match decides; parameters without a match are frozen.
        compute_params: the same parameters in the compute dtype, if it differs from that of
            `params`.
        names: on a mesh, maps a path to the paths that the rules match.

    Raises:
        ConfigError: if nothing is trained, a rule matches nothing, or a rule selects a weight that
            cannot be trained; on a mesh, if a rule selects only some of the layers that pipeline
            stages store as one array.
    """
    known = trainable_params(params)
    _check_formats(params, known, rules)
    chosen = {path for path in known if _is_chosen(rules, [*filter(None, names(path))])}
    paths = [n for path in (*known, *dict(flatten(params))) for n in names(path) if n is not None]
    _check_match(rules, paths, known)
    if not chosen:
        raise ConfigError("there is nothing to train: the rules freeze every parameter")
    shares = {
        path.removesuffix(_PARTS) for path, _ in list_arrays(params)[0] if path.endswith(_PARTS)
    }
    trained = {
        path: _flatten_leading(
            known[path].astype(jnp.float32), (path in shares) + (len(names(path)) > 1)
        )
        for path in known  # in one order in all processes
        if path in chosen
    }
    named, structure = _named_arrays(params if compute_params is None else compute_params)
    holed = [Placeholder(x.dtype.name, x.shape) if path in chosen else x for path, x in named]
    return trained, jax.tree.unflatten(structure, holed)


def _check_match(rules: Rules, paths: Iterable[str], known: Iterable[str]) -> None:
    for regex, _ in rules:
        if not any(first_match([(regex, True)], path) for path in paths):
            raise ConfigError(
                f"rule {regex!r:.80} matches no trainable parameter: there are"
                f" {', '.join(list(known)[:3]) or 'none'}, ..."
            )


def _flatten_leading(x: jax.Array, axes: int) -> jax.Array:
    """Merge the first `axes` axes of an array into the one after them."""
    return x if axes == 0 else x.reshape(-1, *x.shape[axes + 1 :])


def _is_chosen(rules: Rules, names: Sequence[str]) -> bool:
    choices = {bool(first_match(rules, name)) for name in names}
    if len(choices) > 1:
        raise ConfigError(
            f"the rules train some of {', '.join(names)} and not others, but pipeline"
            " stages store them as one array: select all of them, or use a mesh with stage=1"
        )
    return choices.pop()


def _check_formats(params: Params, known: TrainedParams, rules: Rules) -> None:
    """Raise ConfigError if the rules select an integer weight."""
    for path, leaf in flatten(params):
        if not isinstance(leaf, WeightBase) or any(
            f"{name}.".startswith(f"{path}.") for name in known
        ):
            continue
        if first_match(rules, path):
            raise ConfigError(
                f"{path} is {leaf.format}, which cannot be trained: dequantize the model first,"
                " train an adapter on it, or exclude it with a rule"
            )


def combine(trained: TrainedParams, frozen_params: Params) -> Params:
    """Return the whole parameters again, with the trained arrays in their compute dtype."""
    named, structure = _named_arrays(frozen_params)
    joined = [
        trained[path].astype(x.dtype).reshape(x.shape) if isinstance(x, Placeholder) else x
        for path, x in named
    ]
    params: Params = jax.tree.unflatten(structure, joined)
    return params


def _named_arrays(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return `list_arrays` with the names that `trainable_params` gives."""
    named, structure = list_arrays(tree, is_leaf=lambda x: isinstance(x, Placeholder))
    return [(path.removesuffix(_PARTS), x) for path, x in named], structure


def _iter_trainable(node: Any, path: str) -> Iterator[tuple[str, jax.Array]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _iter_trainable(value, f"{path}.{name}")
    elif isinstance(node, ShardList):
        if not isinstance(node.shards, WeightBase):
            yield path.removeprefix("."), node.shards
    elif isinstance(node, WeightBase):
        for name in node.trainable_fields:
            if (value := getattr(node, name)) is not None:
                yield from _iter_trainable(value, f"{path}.{name}")
    else:
        yield path.removeprefix("."), node
