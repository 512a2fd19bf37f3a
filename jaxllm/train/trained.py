"""Parameters taken apart, into what is trained and the rest, and put together again.

What is trained is a flat dict of float32 arrays by path. So the optimiser, a checkpoint and a rule
see the same names, whether an array is a weight of its own or a piece of a leaf.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.paths import Params, first_match, flatten, named_arrays

Trained = dict[str, jax.Array]
Rules = tuple[tuple[str, bool], ...]
ALL: Rules = ((".*", True),)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Hole:
    """Where an array was taken out. dtype: the format that it goes back in."""

    dtype: str


def trainable(params: Mapping[str, Any]) -> Trained:
    """The arrays that training can change, by path: floats, and of a leaf what it says (`trained`).

    The arrays are those of `params`, in their own formats.
    """
    found = dict(_open(params, ""))
    return {path: x for path, x in found.items() if jnp.issubdtype(x.dtype, jnp.floating)}


def split(params: Params, rules: Rules = ALL, like: Params | None = None) -> tuple[Trained, Params]:
    """What is trained, in float32 (the masters), and the rest, with a `Hole` for each of them.

    rules: rows `(regex, whether)` over the paths of `trainable`, as `weights.paths` has them; the
    first that matches counts, what no row matches stays. like: the same parameters in the formats
    that the rest has and that the trained go back in, where these are others.

    Raises ConfigError where nothing is left to train, a row matches nothing, or a weight is to be
    trained of which nothing can be.
    """
    known = trainable(params)
    _check_formats(params, known, rules)
    chosen = {path for path in known if first_match(rules, path)}
    for regex, _ in rules:
        if not any(first_match([(regex, True)], path) for path in (*known, *dict(flatten(params)))):
            raise ConfigError(
                f"no parameter that can be trained has a path like {regex!r:.80}; there are"
                f" {', '.join(list(known)[:3]) or 'none'}, ..."
            )
    if not chosen:
        raise ConfigError("there is nothing to train: the rules leave every parameter as it is")
    trained = {path: known[path].astype(jnp.float32) for path in chosen}
    named, structure = named_arrays(params if like is None else like)
    holed = [Hole(x.dtype.name) if path in chosen else x for path, x in named]
    return trained, jax.tree.unflatten(structure, holed)


def _check_formats(params: Params, known: Trained, rules: Rules) -> None:
    """Raise ConfigError, by name, for integers that the rules would train."""
    for path, leaf in flatten(params):
        if not isinstance(leaf, Leaf) or any(name.startswith(f"{path}.") for name in known):
            continue
        if first_match(rules, path):
            raise ConfigError(
                f"{path} is {leaf.format}, which cannot be trained: dequantize the model first,"
                " train an adapter on it, or leave it out by a rule"
            )


def join(trained: Trained, rest: Params) -> Params:
    """The parameters again: what is trained goes back in the format that it was taken out in."""
    named, structure = named_arrays(rest, is_leaf=lambda x: isinstance(x, Hole))
    joined = [trained[path].astype(x.dtype) if isinstance(x, Hole) else x for path, x in named]
    params: Params = jax.tree.unflatten(structure, joined)
    return params


def _open(node: Any, path: str) -> Iterator[tuple[str, jax.Array]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _open(value, f"{path}.{name}")
    elif isinstance(node, Leaf):
        for name in node.trained:
            if (value := getattr(node, name)) is not None:
                yield from _open(value, f"{path}.{name}")
    else:
        yield path.removeprefix("."), node
