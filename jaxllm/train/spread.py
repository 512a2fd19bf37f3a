"""Conversion of a sharded training state to the single-device layout, and back.

A saved state has the single-device layout, so it can be resumed on another mesh or on none.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.distributed import fetched, several
from jaxllm.train.trained import Hole, Trained
from jaxllm.weights.later import Later, now
from jaxllm.weights.leaves.parted import Shares
from jaxllm.weights.paths import Params, named_arrays, names_of


@dataclasses.dataclass(frozen=True)
class Form:
    """Maps a model's trained arrays to the arrays of the single-device layout.

    Attributes:
      names: for each trained path, the single-device paths that it holds (`Placed.names`).
      shares: for paths with uneven shards, `Shares` with a `Hole`.
    """

    names: dict[str, tuple[str | None, ...]]
    shares: dict[str, Shares]

    @classmethod
    def of(cls, model: nn.Module, rest: Params) -> "Form":
        """Return the layout of a model, given its parameters with holes for the trained ones."""
        found, _ = named_arrays(rest, is_leaf=lambda x: isinstance(x, Hole | Shares))
        shares = {p: x for p, x in found if isinstance(x, Shares) and isinstance(x.parts, Hole)}
        paths = [path for path, x in found if isinstance(x, Hole)] + [*shares]
        names = names_of(model)
        return cls({path: names(path) for path in paths}, shares)

    @property
    def whole_names(self) -> set[str]:
        """All trained paths in the single-device layout."""
        return {name for names in self.names.values() for name in names if name is not None}

    def map(self, function: Callable[[Trained], Any], tree: Any) -> Any:
        """Apply a function to each dict of trained arrays in a tree."""
        return jax.tree.map(
            lambda x: function(x) if self._is_trained(x) else x, tree, is_leaf=self._is_trained
        )

    def blank(self, trained: Trained) -> dict[str, Any]:
        """Return a dict of the single-device layout with 0 in place of each array."""
        return {
            name: 0 if jax.tree.leaves(x) else x
            for path, x in trained.items()
            for name in self.names[path]
            if name is not None
        }

    def later(self, trained: Trained) -> dict[str, Any]:
        """Return arrays of the single-device layout, each as a `Later`."""
        return dict(self._later(trained))

    def spread(self, whole: Any, like: Any) -> Any:
        """Shard a tree of single-device arrays, some of them `Later`, as the arrays of `like`."""
        nodes, structure = jax.tree.flatten(like, is_leaf=self._is_trained)
        names = self.whole_names
        given = jax.tree.leaves(whole, is_leaf=lambda x: isinstance(x, dict) and x.keys() == names)
        found = [
            self._spread(x, node) if self._is_trained(node) else _placed(np.asarray(now(x)), node)
            for x, node in zip(given, nodes, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    def _is_trained(self, x: Any) -> bool:
        return isinstance(x, dict) and x.keys() == {*self.names}

    def _later(self, trained: Trained) -> Iterator[tuple[str, Any]]:
        for path, x in trained.items():
            names, shares = self.names[path], self.shares.get(path)
            if not jax.tree.leaves(x):  # optimizer state of paths that the optimizer masks
                yield from ((name, x) for name in names if name is not None)
                continue
            for stage, name in enumerate(names):
                if name is None:
                    continue
                place = None if len(names) == 1 else (stage, x.shape[0] // len(names))
                yield name, _whole(x, place, None if shares is None else shares.places(x.ndim))

    def _spread(self, whole: dict[str, Any], like: Trained) -> Trained:
        def part(path: str, array: np.ndarray) -> np.ndarray:
            if (shares := self.shares.get(path)) is None:
                return array
            rows = math.prod(shares.parts.shape[-1 - array.ndim :][:2])
            found = np.zeros((rows, *array.shape[1:]), array.dtype)  # padding rows are never read
            found[shares.places(array.ndim)] = array
            return found

        def joined(path: str, x: jax.Array) -> jax.Array:
            if not jax.tree.leaves(x):
                return x
            names = self.names[path]
            parts = [part(path, np.asarray(now(whole[n]))) for n in names if n is not None]
            parts += [np.zeros_like(parts[0])] * (len(names) - len(parts))  # later stages
            return _placed(np.concatenate(parts) if len(parts) > 1 else parts[0], x)

        return {path: joined(path, x) for path, x in like.items()}


def _whole(x: jax.Array, stage: tuple[int, int] | None, places: np.ndarray | None) -> Later:
    """Return an array of the single-device layout.

    Args:
      stage: if stages are concatenated in `x`, the stage's number and the rows of each stage.
      places: with uneven shards, the indices of the array's rows among those of its shards.
    """
    rows = x.shape[0] if stage is None else stage[1]

    def read() -> np.ndarray:
        array = np.asarray(fetched(x))
        array = array if stage is None else array[stage[0] * rows :][:rows]
        return array if places is None else array[places]

    length = rows if places is None else len(places)
    return Later(read, jax.ShapeDtypeStruct((length, *x.shape[1:]), x.dtype))


def _placed(array: Any, like: jax.Array) -> jax.Array:
    """Put a host array where `like` is, with its dtype."""
    mine = array.astype(like.dtype)
    if several():
        return jax.make_array_from_callback(mine.shape, like.sharding, lambda index: mine[index])
    where = like.sharding if isinstance(like.sharding, NamedSharding) else None
    found: jax.Array = jax.device_put(mine, where)
    return found
