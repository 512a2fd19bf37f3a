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
from jaxllm.checkpoint import Checkpoint
from jaxllm.errors import ConfigError
from jaxllm.files import compile_pattern
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.leaves.parted import Shares
from jaxllm.weights.paths import Params, first_match, flatten, named_arrays, own_name

Trained = dict[str, jax.Array]
Rules = tuple[tuple[str, bool], ...]
Names = Callable[[str], tuple[str | None, ...]]  # from a path on a mesh, as `Placed.names`
ALL: Rules = ((".*", True),)
_PARTS = ".parts"  # the field of `Shares`


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Hole:
    """A placeholder for an array that was taken out, with the dtype and shape to restore."""

    dtype: str
    shape: tuple[int, ...]


def trainable(params: Mapping[str, Any]) -> Trained:
    """Return the arrays that training can change, by path and in their own dtypes.

    These are all float arrays; of a weight type only the fields that its `trained` lists.
    """
    found = dict(_open(params, ""))
    return {path: x for path, x in found.items() if jnp.issubdtype(x.dtype, jnp.floating)}


def check_rules(opened: Checkpoint, rules: Rules) -> None:
    """Raise ConfigError if a rule matches no parameter of a float checkpoint.

    Quantized checkpoints have more paths: `split` checks those after loading.
    """
    for regex, _ in rules:
        compile_pattern(regex, "the rules")
    if not opened.formats:
        paths = [path for path, _ in flatten(models.param_shapes(models.build(opened.config)))]
        _check_match(rules, paths, paths)


def split(
    params: Params, rules: Rules = ALL, like: Params | None = None, names: Names = own_name
) -> tuple[Trained, Params]:
    """Return the trained arrays in float32 (master weights), and the parameters with a `Hole` in
    place of each of them.

    Args:
      rules: rows `(regex, train)` over the paths of `trainable`, as in `weights.paths`. The first
        match decides; parameters without a match are frozen.
      like: the same parameters in the compute dtype, if it differs from that of `params`.
      names: on a mesh, maps a path to the paths that the rules match.

    Raises:
      ConfigError: if nothing is trained, a rule matches nothing, or a rule selects a weight that
        cannot be trained; on a mesh, if a rule selects only some of the layers that pipeline stages
        store as one array.
    """
    known = trainable(params)
    _check_formats(params, known, rules)
    chosen = {path for path in known if _is_chosen(rules, [*filter(None, names(path))])}
    paths = [n for path in (*known, *dict(flatten(params))) for n in names(path) if n is not None]
    _check_match(rules, paths, known)
    if not chosen:
        raise ConfigError("there is nothing to train: the rules freeze every parameter")
    shares = {
        path.removesuffix(_PARTS) for path, _ in named_arrays(params)[0] if path.endswith(_PARTS)
    }
    trained = {
        path: _in_rows(known[path].astype(jnp.float32), (path in shares) + (len(names(path)) > 1))
        for path in known  # in one order in all processes
        if path in chosen
    }
    named, structure = _named(params if like is None else like)
    holed = [Hole(x.dtype.name, x.shape) if path in chosen else x for path, x in named]
    return trained, jax.tree.unflatten(structure, holed)


def _check_match(rules: Rules, paths: Iterable[str], known: Iterable[str]) -> None:
    for regex, _ in rules:
        if not any(first_match([(regex, True)], path) for path in paths):
            raise ConfigError(
                f"rule {regex!r:.80} matches no trainable parameter: there are"
                f" {', '.join(list(known)[:3]) or 'none'}, ..."
            )


def _in_rows(x: jax.Array, axes: int) -> jax.Array:
    """Merge the first `axes` axes of an array into the one after them."""
    return x if axes == 0 else x.reshape(-1, *x.shape[axes + 1 :])


def _is_chosen(rules: Rules, names: Sequence[str]) -> bool:
    found = {bool(first_match(rules, name)) for name in names}
    if len(found) > 1:
        raise ConfigError(
            f"the rules train some of {', '.join(names)} and not others, but pipeline"
            " stages store them as one array: select all of them, or use a mesh with stage=1"
        )
    return found.pop()


def _check_formats(params: Params, known: Trained, rules: Rules) -> None:
    """Raise ConfigError if the rules select an integer weight."""
    for path, leaf in flatten(params):
        if not isinstance(leaf, Leaf) or any(f"{name}.".startswith(f"{path}.") for name in known):
            continue
        if first_match(rules, path):
            raise ConfigError(
                f"{path} is {leaf.format}, which cannot be trained: dequantize the model first,"
                " train an adapter on it, or exclude it with a rule"
            )


def join(trained: Trained, rest: Params) -> Params:
    """Return the whole parameters again, with the trained arrays in their compute dtype."""
    named, structure = _named(rest)
    joined = [
        trained[path].astype(x.dtype).reshape(x.shape) if isinstance(x, Hole) else x
        for path, x in named
    ]
    params: Params = jax.tree.unflatten(structure, joined)
    return params


def _named(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return `named_arrays` with the names that `trainable` gives."""
    named, structure = named_arrays(tree, is_leaf=lambda x: isinstance(x, Hole))
    return [(path.removesuffix(_PARTS), x) for path, x in named], structure


def _open(node: Any, path: str) -> Iterator[tuple[str, jax.Array]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _open(value, f"{path}.{name}")
    elif isinstance(node, Shares):
        if not isinstance(node.parts, Leaf):
            yield path.removeprefix("."), node.parts
    elif isinstance(node, Leaf):
        for name in node.trained:
            if (value := getattr(node, name)) is not None:
                yield from _open(value, f"{path}.{name}")
    else:
        yield path.removeprefix("."), node
