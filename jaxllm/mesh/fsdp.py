"""Fully sharded data parallelism (FSDP): matrices that are also sharded over the axis `data`.

A stored matrix is split over `data` along one of its axes, in addition to the splits by other mesh
axes. Inside `jax.shard_map` a device's part is a `Scattered`, gathered for each product. The
gradient comes back in the same parts, and so does the optimizer state. Vectors are replicated: they
are small, and modules use them directly.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.placing import Shared
from jaxllm.mesh.rules import split_of
from jaxllm.mesh.specs import of_parameter
from jaxllm.weights.formats import Weight
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.leaves.parted import Shares
from jaxllm.weights.leaves.scattered import Scattered
from jaxllm.weights.leaves.wrapped import Wrapped
from jaxllm.weights.reading import Elsewhere

DATA = "data"


class Divided(Shared):
    """Shards parameters as they are read, matrices over `data` as well."""

    def leaf(self, path: str, weight: Weight) -> Weight:
        return self._divided(path, super().leaf(path, weight))

    def beside(self, path: str, weight: Weight) -> Weight:
        return self._divided(path, super().beside(path, weight))

    def tensor(
        self,
        path: str,
        tensor: LazyTensor,
        read: Callable[[LazyTensor], Weight],
        apart: tuple[int, ...],
    ) -> Weight:
        return self._divided(path, super().tensor(path, tensor, read, apart))

    def _divided(self, path: str, weight: Weight) -> Weight:
        if isinstance(weight, Elsewhere):
            return weight
        split, mesh = split_of(self._config, self._exact, path), self._mesh(path)
        specs = over_data(
            path, weight, of_parameter(path, weight, split, self._axes, None), self._axes
        )
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
        placed: Weight = jax.device_put(weight, places)
        return placed


def over_data(path: str, leaf: Any, specs: Any, axes: Axes) -> Any:
    """Add `data` to the specs of a weight's arrays, on one axis of each.

    That is the first axis that nothing else splits, or else one that is already split.

    Raises:
        ConfigError: for a matrix of which no array has an axis that `data` divides.
    """
    if leaf.ndim < 2 or axes.data == 1:
        return specs
    if _nests(leaf):
        return specs.replace(weight=over_data(path, leaf.weight, specs.weight, axes))
    pieces = jax.tree.leaves(leaf)
    named = jax.tree.leaves(specs, is_leaf=_is_spec)
    found = [_with_data(x.shape, spec, axes) for x, spec in zip(pieces, named, strict=True)]
    if not any(spec is not None for spec in found):
        raise ConfigError(
            f"{path}: FSDP cannot shard it: no axis of {leaf.shape} is divisible by"
            f" data={axes.data}. Use another size of data, or drop FSDP"
        )
    chosen = [new or old for new, old in zip(found, named, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(leaf), chosen)


def scattered(leaf: Any, specs: Any, axes: Axes) -> Any:
    """Wrap a device's part of a weight so that products gather it.

    Each `Shares` is replaced by the local shard, whether it is split over `data` or not.

    Args:
        specs: as `over_data` returns them.
    """
    if _nests(leaf):
        mine = jax.tree.map(_shared, leaf.replace(weight=None), is_leaf=_is_shares)
        return mine.replace(weight=scattered(leaf.weight, specs.weight, axes))
    before = 1 if isinstance(leaf, Shares) else 0
    mine = _shared(leaf)
    cut = tuple(
        at if at is None else at - before
        for at in map(_data_axis, jax.tree.leaves(specs, is_leaf=_is_spec))
    )
    return mine if not any(at is not None for at in cut) else Scattered(mine, DATA, axes.data, cut)


def _nests(leaf: Any) -> bool:
    return isinstance(leaf, Wrapped) and leaf.nests


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _is_shares(x: Any) -> bool:
    return isinstance(x, Shares)


def _shared(x: Any) -> Any:
    return x.share() if isinstance(x, Shares) else x


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _data_axis(spec: P) -> int | None:
    return next((at for at, entry in enumerate(spec) if DATA in _names(entry)), None)


def _with_data(shape: tuple[int, ...], spec: P, axes: Axes) -> P | None:
    entries = [_names(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    free = sorted(range(len(shape)), key=lambda at: axes.over(entries[at]) > 1)
    for at in free:
        if shape[at] % (axes.over(entries[at]) * axes.data) == 0:
            entries[at] = (*entries[at], DATA)
            return P(*[entry or None for entry in entries])
    return None
