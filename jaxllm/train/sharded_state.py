"""Conversion of a sharded training state to the single-device layout, and back.

A saved state has the single-device layout, so it can be resumed on another mesh or on none.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.runtime.multihost import is_multiprocess, to_host
from jaxllm.sharding.shard_list import ShardList
from jaxllm.train.partition import Placeholder, TrainedParams
from jaxllm.weights.lazy_gather import LazyWeight, load_weight
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, list_arrays


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Maps a model's trained arrays to the arrays of the single-device layout.

    Attributes:
      names: for each trained path, the single-device paths that it holds
          (`Model.unsharded_paths`).
      uneven_shards: for paths with uneven shards, `ShardList` with a `Placeholder`.
    """

    names: dict[str, tuple[str | None, ...]]
    uneven_shards: dict[str, ShardList]

    @classmethod
    def from_model(cls, model: Model, frozen_params: Params) -> "StateLayout":
        """Return the layout of a model, given its parameters with holes for the trained ones."""
        arrays, _ = list_arrays(
            frozen_params, is_leaf=lambda x: isinstance(x, Placeholder | ShardList)
        )
        shares = {
            p: x
            for p, x in arrays
            if isinstance(x, ShardList) and isinstance(x.shards, Placeholder)
        }
        paths = [path for path, x in arrays if isinstance(x, Placeholder)] + [*shares]
        return cls({path: model.unsharded_paths(path) for path in paths}, shares)

    @property
    def unsharded_names(self) -> set[str]:
        """All trained paths in the single-device layout."""
        return {name for names in self.names.values() for name in names if name is not None}

    def map_trained(self, function: Callable[[TrainedParams], Any], tree: Any) -> Any:
        """Apply a function to each dict of trained arrays in a tree."""
        return jax.tree.map(
            lambda x: function(x) if self._is_trained(x) else x, tree, is_leaf=self._is_trained
        )

    def template(self, trained: TrainedParams) -> dict[str, Any]:
        """Return a dict of the single-device layout with 0 in place of each array."""
        return {
            name: 0 if jax.tree.leaves(x) else x
            for path, x in trained.items()
            for name in self.names[path]
            if name is not None
        }

    def gather_lazy(self, trained: TrainedParams) -> dict[str, Any]:
        """Return arrays of the single-device layout, each as a `LazyWeight`."""
        return dict(self._iter_lazy(trained))

    def shard(self, unsharded: Any, sharded: Any) -> Any:
        """Shard a tree of single-device arrays, some of them `LazyWeight`, as the arrays of
        `sharded`.
        """
        nodes, structure = jax.tree.flatten(sharded, is_leaf=self._is_trained)
        names = self.unsharded_names
        trees = jax.tree.leaves(
            unsharded, is_leaf=lambda x: isinstance(x, dict) and x.keys() == names
        )
        leaves = [
            self._shard_trained(x, node)
            if self._is_trained(node)
            else _place_like(np.asarray(load_weight(x)), node)
            for x, node in zip(trees, nodes, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    def _is_trained(self, x: Any) -> bool:
        return isinstance(x, dict) and x.keys() == {*self.names}

    def _iter_lazy(self, trained: TrainedParams) -> Iterator[tuple[str, Any]]:
        for path, x in trained.items():
            names, shares = self.names[path], self.uneven_shards.get(path)
            if not jax.tree.leaves(x):  # optimizer state of paths that the optimizer masks
                yield from ((name, x) for name in names if name is not None)
                continue
            for stage, name in enumerate(names):
                if name is None:
                    continue
                place = None if len(names) == 1 else (stage, x.shape[0] // len(names))
                yield (
                    name,
                    _lazy_unsharded(x, place, None if shares is None else shares.row_index(x.ndim)),
                )

    def _shard_trained(self, unsharded: dict[str, Any], sharded: TrainedParams) -> TrainedParams:
        def add_padding(path: str, array: np.ndarray) -> np.ndarray:
            if (shares := self.uneven_shards.get(path)) is None:
                return array
            rows = math.prod(shares.shards.shape[-1 - array.ndim :][:2])
            padded = np.zeros((rows, *array.shape[1:]), array.dtype)  # padding rows are never read
            padded[shares.row_index(array.ndim)] = array
            return padded

        def join_stages(path: str, x: jax.Array) -> jax.Array:
            if not jax.tree.leaves(x):
                return x
            names = self.names[path]
            parts = [
                add_padding(path, np.asarray(load_weight(unsharded[n])))
                for n in names
                if n is not None
            ]
            parts += [np.zeros_like(parts[0])] * (len(names) - len(parts))  # later stages
            return _place_like(np.concatenate(parts) if len(parts) > 1 else parts[0], x)

        return {path: join_stages(path, x) for path, x in sharded.items()}


def _lazy_unsharded(
    x: jax.Array, stage: tuple[int, int] | None, row_index: np.ndarray | None
) -> LazyWeight:
    """Return an array of the single-device layout.

    Args:
      stage: if stages are concatenated in `x`, the stage's number and the rows of each stage.
      row_index: with uneven shards, the indices of the array's rows among those of its shards.
    """
    rows = x.shape[0] if stage is None else stage[1]

    def read() -> np.ndarray:
        array = np.asarray(to_host(x))
        array = array if stage is None else array[stage[0] * rows :][:rows]
        return array if row_index is None else array[row_index]

    length = rows if row_index is None else len(row_index)
    return LazyWeight(read, jax.ShapeDtypeStruct((length, *x.shape[1:]), x.dtype))


def _place_like(array: Any, like: jax.Array) -> jax.Array:
    """Put a host array where `like` is, with its dtype."""
    mine = array.astype(like.dtype)
    if is_multiprocess():
        return jax.make_array_from_callback(mine.shape, like.sharding, lambda index: mine[index])
    where = like.sharding if isinstance(like.sharding, NamedSharding) else None
    found: jax.Array = jax.device_put(mine, where)
    return found
