"""Parameters taken apart, into what is trained and the rest, and put together again.

What is trained is a flat dict of float32 arrays by path. So the optimiser, a checkpoint and a rule
see the same names, whether an array is a weight of its own or a piece of a leaf. On a mesh it has
the path and the rank of its parameter, too: the shares of one that is no block of each device, and
those of a pipeline's stages, follow one another along the first axis (`whole`).
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
Names = Callable[[str], tuple[str | None, ...]]  # of a path, on a mesh: `Placed.names`
ALL: Rules = ((".*", True),)
_PARTS = ".parts"  # of `Shares`


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Hole:
    """Where an array was taken out. dtype, shape: those that it goes back in."""

    dtype: str
    shape: tuple[int, ...]


def trainable(params: Mapping[str, Any]) -> Trained:
    """The arrays that training can change, by path: floats, and of a leaf what it says (`trained`).

    The arrays are those of `params`, in their own formats.
    """
    found = dict(_open(params, ""))
    return {path: x for path, x in found.items() if jnp.issubdtype(x.dtype, jnp.floating)}


def check_rules(opened: Checkpoint, rules: Rules) -> None:
    """Raise ConfigError for a rule that no parameter of a checkpoint of floats matches. Of other
    checkpoints `split` sees it, whose leaves have paths of their own.
    """
    for regex, _ in rules:
        compile_pattern(regex, "the rules")
    if not opened.formats:
        paths = [path for path, _ in flatten(models.param_shapes(models.build(opened.config)))]
        _check_match(rules, paths, paths)


def split(
    params: Params, rules: Rules = ALL, like: Params | None = None, names: Names = own_name
) -> tuple[Trained, Params]:
    """What is trained, in float32 (the masters), and the rest, with a `Hole` for each of them.

    rules: rows `(regex, whether)` over the paths of `trainable`, as `weights.paths` has them; the
    first that matches counts, what no row matches stays. like: the same parameters in the formats
    that the rest has and that the trained go back in, where these are others. names: of a model on
    a mesh, what rules go by.

    Raises ConfigError where nothing is left to train, a row matches nothing, or a weight is to be
    trained of which nothing can be; on a mesh, where a row is of some of the layers that stand in
    one place of a pipeline's stages.
    """
    known = trainable(params)
    _check_formats(params, known, rules)
    chosen = {path for path in known if _is_chosen(rules, [*filter(None, names(path))])}
    paths = [n for path in (*known, *dict(flatten(params))) for n in names(path) if n is not None]
    _check_match(rules, paths, known)
    if not chosen:
        raise ConfigError("there is nothing to train: the rules leave every parameter as it is")
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
                f"no parameter that can be trained has a path like {regex!r:.80}; there are"
                f" {', '.join(list(known)[:3]) or 'none'}, ..."
            )


def _in_rows(x: jax.Array, axes: int) -> jax.Array:
    """What stands along so many axes before an array's own, one after the other in its first."""
    return x if axes == 0 else x.reshape(-1, *x.shape[axes + 1 :])


def _is_chosen(rules: Rules, names: Sequence[str]) -> bool:
    found = {bool(first_match(rules, name)) for name in names}
    if len(found) > 1:
        raise ConfigError(
            f"the rules train some of {', '.join(names)} and not others, which stand in one place"
            " of a pipeline's stages: name them all, or use a mesh with stage=1"
        )
    return found.pop()


def _check_formats(params: Params, known: Trained, rules: Rules) -> None:
    """Raise ConfigError, by name, for integers that the rules would train."""
    for path, leaf in flatten(params):
        if not isinstance(leaf, Leaf) or any(f"{name}.".startswith(f"{path}.") for name in known):
            continue
        if first_match(rules, path):
            raise ConfigError(
                f"{path} is {leaf.format}, which cannot be trained: dequantize the model first,"
                " train an adapter on it, or leave it out by a rule"
            )


def join(trained: Trained, rest: Params) -> Params:
    """The parameters again: what is trained goes back in the format that it was taken out in."""
    named, structure = _named(rest)
    joined = [
        trained[path].astype(x.dtype).reshape(x.shape) if isinstance(x, Hole) else x
        for path, x in named
    ]
    params: Params = jax.tree.unflatten(structure, joined)
    return params


def _named(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """`named_arrays`, with the names of `trainable`."""
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
