"""What is trained on a mesh as arrays of one device's form, and back: a state that is kept has one
form, and another mesh, or none, goes on from it.
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
    """How what a model trains stands for arrays of one device's form.

    names: of each path of what is trained, the paths of what it holds (`Placed.names`). shares: of
    paths whose shares are no blocks, `Shares` with a `Hole`.
    """

    names: dict[str, tuple[str | None, ...]]
    shares: dict[str, Shares]

    @classmethod
    def of(cls, model: nn.Module, rest: Params) -> "Form":
        """Of a model, and what is not trained of its parameters, with holes."""
        found, _ = named_arrays(rest, is_leaf=lambda x: isinstance(x, Hole | Shares))
        shares = {p: x for p, x in found if isinstance(x, Shares) and isinstance(x.parts, Hole)}
        paths = [path for path, x in found if isinstance(x, Hole)] + [*shares]
        names = names_of(model)
        return cls({path: names(path) for path in paths}, shares)

    @property
    def whole_names(self) -> set[str]:
        """The paths of all of it in a model of one device."""
        return {name for names in self.names.values() for name in names if name is not None}

    def map(self, function: Callable[[Trained], Any], tree: Any) -> Any:
        """A tree with each dict of all that is trained changed."""
        return jax.tree.map(
            lambda x: function(x) if self._is_trained(x) else x, tree, is_leaf=self._is_trained
        )

    def blank(self, trained: Trained) -> dict[str, Any]:
        """The same without its numbers, of which each is a 0."""
        return {
            name: 0 if jax.tree.leaves(x) else x
            for path, x in trained.items()
            for name in self.names[path]
            if name is not None
        }

    def later(self, trained: Trained) -> dict[str, Any]:
        """Arrays of one device's form, a `Later` each."""
        return dict(self._later(trained))

    def spread(self, whole: Any, like: Any) -> Any:
        """A tree of arrays of one device's form, some of them `Later`, in this one, where the
        arrays of `like` are.
        """
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
            if not jax.tree.leaves(x):  # what an optimiser of some paths has for the others
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
            found = np.zeros((rows, *array.shape[1:]), array.dtype)  # nothing reads what is beyond
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
    """An array of one device's form. stage: the number of the stage whose it is and how many rows
    each has, where all of them have rows of `x`. places: of its rows among those of its shares.
    """
    rows = x.shape[0] if stage is None else stage[1]

    def read() -> np.ndarray:
        array = np.asarray(fetched(x))
        array = array if stage is None else array[stage[0] * rows :][:rows]
        return array if places is None else array[places]

    length = rows if places is None else len(places)
    return Later(read, jax.ShapeDtypeStruct((length, *x.shape[1:]), x.dtype))


def _placed(array: Any, like: jax.Array) -> jax.Array:
    """An array of the host where another is, in its format."""
    mine = array.astype(like.dtype)
    if several():
        return jax.make_array_from_callback(mine.shape, like.sharding, lambda index: mine[index])
    where = like.sharding if isinstance(like.sharding, NamedSharding) else None
    found: jax.Array = jax.device_put(mine, where)
    return found
