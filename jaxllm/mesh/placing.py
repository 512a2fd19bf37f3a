"""Sharding of parameters: each device's shard is read, or sliced, and placed, one tensor at a time.

If the shards of a float array are blocks of it, the parameter is an ordinary `jax.Array` with a
`NamedSharding`. In all other cases (quantized, fused of several parts, a vocabulary that does not
divide) each shard is a weight of its own, and the parameter is `Shares` of them. The matrices of an
adapter are sharded like the weight that they adapt.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import models
from jaxllm.config import ModelConfig
from jaxllm.distributed import fetched, several
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes, mesh_of
from jaxllm.mesh.pipeline.places import AXIS, Table
from jaxllm.mesh.pipeline.stacked import (
    alike_over,
    devices_of,
    is_here,
    side_by_side,
    stacked,
    stage_of,
)
from jaxllm.mesh.rules import EXPERTS, WHOLE, Split, split_of
from jaxllm.weights.formats import Weight, as_leaf
from jaxllm.weights.lazy import LazyTensor, joined
from jaxllm.weights.leaves.adapted import Adapted, bare
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.leaves.parted import Shares
from jaxllm.weights.leaves.wrapped import Wrapped
from jaxllm.weights.paths import Params
from jaxllm.weights.reading import Elsewhere, Whole


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one parameter is split into `parts` shards."""

    path: str
    split: Split
    size: int  # the length of the axis that is split
    parts: int

    @property
    def each(self) -> int:
        """Length of a shard in each fused part."""
        return -(-self.size // (self.split.runs * self.parts))

    @property
    def even(self) -> bool:
        """Whether shards are blocks of the array."""
        return self.split.runs == 1 and self.size % self.parts == 0

    def ranges(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield a shard's range in each fused part; beyond the end, that of the last row."""
        for run in range(self.split.runs):
            begin = run * (self.size // self.split.runs) + number * self.each
            yield min(begin, self.size - 1), min(begin + self.each, self.size)

    def numbers(self, number: int) -> np.ndarray:
        """Return a shard's indices, the same number for each shard: the last index is repeated."""
        every = np.concatenate([np.arange(*some) for some in self.ranges(number)])
        return np.pad(every, (0, self.each * self.split.runs - every.size), mode="edge")

    def share(self, weight: Weight, number: int) -> Weight:
        """Return one shard.

        Raises:
            ConfigError: if the weight's format cannot be sliced there; the message has path and
                axes.
        """
        if self.parts == 1:  # any format, sliceable or not
            return weight
        leaf = as_leaf(weight)
        with _named(self):
            if self.split.axis == 1:
                ((begin, end),) = self.ranges(number)
                return leaf.with_columns(begin, end)
            return leaf.with_rows(self.numbers(number))


def cut_of(path: str, shape: tuple[int, ...], split: Split, axes: Axes) -> Cut:
    """Plan the split of a parameter. Raises ConfigError for a size that is not divisible."""
    size = shape[-1] if split.axis or len(shape) == 1 else shape[-2]
    parts = axes.over(split.over)
    if split.kind != "vocabulary" and size % (parts * split.runs):
        over = "x".join(split.over)
        runs = f" in {split.runs} fused parts" if split.runs > 1 else ""
        raise ConfigError(f"{path}: size {size}{runs} is not divisible by {over}={parts}")
    return Cut(path, split, size, parts)


class Shared(Whole):
    """Shards parameters over the devices of a mesh as they are read, by the partition rules."""

    def __init__(self, config: ModelConfig, axes: Axes, exact: bool, table: Table) -> None:
        """Store the rules' inputs. `table` has the layer numbers of each stage."""
        self._config, self._axes, self._exact = config, axes, exact
        self._prefix, self._table = models.family(config.model_type).layers, table

    def here(self, path: str) -> bool:
        return is_here(self._mesh(path))

    def leaf(self, path: str, weight: Weight) -> Weight:
        if not self.here(path):
            return Elsewhere()  # type: ignore[return-value]
        split = split_of(self._config, self._exact, path)
        if isinstance(weight, Adapted):
            return self._adapted(path, weight, split, self._split(path, bare(weight), split))
        if isinstance(weight, Wrapped) and weight.nests:
            return self._nested(path, weight, split)
        if split.stack and self._axes.expert > 1:

            def some(begin: int, end: int, mesh: Mesh) -> Weight:
                return self._split(path, jax.tree.map(lambda x: x[begin:end], weight), split, mesh)

            return self._stack(path, weight.shape[0], some)
        return self._split(path, weight, split)

    def beside(self, path: str, weight: Weight) -> Weight:
        if not isinstance(weight, Adapted):
            return weight
        if not self.here(path):
            return Elsewhere()  # type: ignore[return-value]
        split = split_of(self._config, self._exact, path)
        return self._adapted(path, weight, split, bare(weight))

    def tensor(
        self,
        path: str,
        tensor: LazyTensor,
        read: Callable[[LazyTensor], Weight],
        apart: tuple[int, ...],
    ) -> Weight:
        split = split_of(self._config, self._exact, path)
        if split is WHOLE or split.axis not in apart:
            return self.leaf(path, read(tensor))
        if split.stack and self._axes.expert > 1:

            def some(begin: int, end: int, mesh: Mesh) -> Weight:
                return self._read(path, tensor.rows(begin, end), read, split, mesh)

            return self._stack(path, tensor.shape[0], some)
        return self._read(path, tensor, read, split, self._mesh(path))

    def _read(
        self,
        path: str,
        tensor: LazyTensor,
        read: Callable[[LazyTensor], Weight],
        split: Split,
        mesh: Mesh,
    ) -> Weight:
        cut = cut_of(path, tensor.shape, split, self._axes)
        stack = tensor.ndim == 3  # experts: rows are on the second axis

        def share(number: int) -> Weight:
            if split.axis == 1:
                ((begin, end),) = cut.ranges(number)
                return read(tensor.columns_from(begin, end))
            if stack:
                return read(within(tensor, *next(cut.ranges(number))))
            made = read(joined([tensor.rows(*some) for some in cut.ranges(number)]))
            missing = cut.each * split.runs - made.shape[0]
            if not missing:
                return made
            index = np.minimum(np.arange(made.shape[0] + missing), made.shape[0] - 1)
            found: Weight = as_leaf(made).with_rows(index)
            return found

        return self._of(cut, tensor.shape, share, mesh)

    def _stack(self, path: str, count: int, some: Callable[[int, int, Mesh], Weight]) -> Weight:
        """Place whole experts on the devices that own them, then join them to one stack."""
        own, mesh = count // self._axes.expert, self._mesh(path)
        owners = [devices_of(mesh, EXPERTS, i) for i in range(self._axes.expert)]
        parts = [some(i * own, (i + 1) * own, o) for i, o in enumerate(owners) if is_here(o)]
        at = 1 if isinstance(parts[0], Shares) else 0
        joined: Weight = jax.tree.map(
            lambda *arrays: side_by_side(arrays, mesh, EXPERTS, at), *alike_over(mesh, parts)
        )
        return joined

    def finished(self, params: Params) -> Params:
        """Stack the layers of all stages (see `pipeline.stacked`)."""
        if len(self._table) == 1:
            return params
        return stacked(params, self._prefix, self._table, mesh_of(self._axes))

    def _mesh(self, path: str) -> Mesh:
        """Return the devices that split a parameter: those of its stage."""
        mesh, stage = mesh_of(self._axes), stage_of(path, self._prefix, self._table)
        return mesh if stage is None or len(self._table) == 1 else devices_of(mesh, AXIS, stage)

    def _split(self, path: str, weight: Weight, split: Split, mesh: Mesh | None = None) -> Weight:
        mesh = mesh or self._mesh(path)
        if split is WHOLE:
            placed: Weight = jax.tree.map(partial(everywhere, mesh), weight)
            return placed
        cut = cut_of(path, weight.shape, split, self._axes)
        weight = fetched(weight) if several() else weight
        return self._of(cut, weight.shape, partial(cut.share, weight), mesh)

    def _of(
        self, cut: Cut, shape: tuple[int, ...], share: Callable[[int], Weight], mesh: Mesh
    ) -> Weight:
        """Assemble a parameter of `shape` from its shards, which `share` makes one by one."""
        split, made = cut.split, dict[int, Any]()

        def once(number: int) -> Any:
            """Make each shard once: replicas ask for it one by one, in any order."""
            if number not in made:
                made[number] = share(number)
            return made[number]

        sharding = NamedSharding(mesh, P(split.over))
        here = sharding.addressable_devices_indices_map((cut.parts,)).values()
        numbers = sorted({index[0].start or 0 for index in here if index})
        if not isinstance(once(numbers[0]), Leaf) and cut.even:
            at = len(shape) - (1 if split.axis or len(shape) == 1 else 2)
            spec = spec_of(split, len(shape))

            def block(index: Any) -> Any:
                return once((index[at].start or 0) // cut.each)

            return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), block)
        made_here = [once(i) for i in numbers]
        shares = alike_over(mesh, made_here)
        pieces = [jax.tree.leaves(x) for x in shares]

        def joint(*mine: jax.Array) -> jax.Array:
            def one(index: Any) -> Any:
                return np.asarray(mine[numbers.index(index[0].start or 0)])[None]

            shape = (cut.parts, *mine[0].shape)
            return jax.make_array_from_callback(shape, sharding, one)

        parts = jax.tree.unflatten(
            jax.tree.structure(shares[0]), [joint(*mine) for mine in zip(*pieces, strict=True)]
        )
        return Shares(parts, split.axis, split.runs, cut.size)

    def _nested(self, path: str, weight: Wrapped, split: Split) -> Weight:
        """Shard a wrapped weight and each of its extra arrays separately."""
        if split.axis == 1 and self._axes.over(split.over) > 1:
            cut = cut_of(path, weight.shape, split, self._axes)
            for number in range(cut.parts):
                ((begin, end),) = cut.ranges(number)
                with _named(cut):
                    weight.check_columns(begin, end)
        each = {"weight": weight.weight, **weight.others()}
        found: Weight = weight.replace(  # type: ignore[attr-defined]
            **{
                name: self._split(
                    f"{path}.{name}", x, split_within(weight, name, split), self._mesh(path)
                )
                for name, x in each.items()
            }
        )
        return found

    def _adapted(self, path: str, weight: Adapted, split: Split, inner: Weight) -> Adapted:
        """Shard an adapter's matrices beside `inner`, a weight that is already in place."""
        measured = weight.magnitude is not None and weight.norm is None
        known = weight.replace(norm=weight.norms()) if measured else weight
        fields = {
            name: self._split(f"{path}.{name}", x, role)
            for name, role in adapted_splits(known, split).items()
            if (x := getattr(known, name)) is not None
        }
        if isinstance(weight.weight, Adapted):
            inner = self._adapted(path, weight.weight, split, inner)
        adapted: Adapted = known.replace(weight=inner, **fields)
        return adapted


@contextlib.contextmanager
def _named(cut: Cut) -> Iterator[None]:
    """Prefix a ConfigError of the block with the parameter's path and the axes that split it."""
    try:
        yield
    except ConfigError as error:
        over = "x".join(cut.split.over)
        raise ConfigError(f"{cut.path} over {over}={cut.parts}: {error}") from None


def within(stack: LazyTensor, begin: int, end: int) -> LazyTensor:
    """Slice the rows of each matrix in a stack `[E, O, I]`."""
    experts, _, columns = stack.shape
    shape = (experts, end - begin, columns)

    def parts(rows: int) -> Iterator[np.ndarray]:
        for number in range(experts):
            matrix = stack.rows(number, number + 1).read()[0, begin:end]
            yield from (matrix[at : at + rows] for at in range(0, len(matrix), rows))

    def read() -> np.ndarray:
        each = [stack.rows(i, i + 1).read()[0, begin:end] for i in range(experts)]
        return np.stack(each)

    return LazyTensor(stack.dtype, shape, read, stack.release, parts)


def everywhere(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Replicate an array on all devices."""
    sharding = NamedSharding(mesh, P())
    if not several():
        return jax.device_put(x, sharding)
    whole = np.asarray(fetched(x))
    return jax.make_array_from_callback(x.shape, sharding, lambda _: whole)


def spec_of(split: Split, ndim: int) -> P:
    """Return the spec of an array whose shards are blocks of it."""
    if split is WHOLE:
        return P()
    at = ndim - (1 if split.axis or ndim == 1 else 2)
    before = [None] * at
    if split.stack:
        return P(EXPERTS, *before[1:], split.over)
    return P(*before, split.over)


def split_within(weight: Wrapped, name: str, split: Split) -> Split:
    """Return the rule for a field of a wrapper whose weight has the rule `split`."""
    return split if name == "weight" or name in weight.alike else WHOLE


def adapted_splits(weight: Adapted, split: Split) -> dict[str, Split]:
    """Return the rules for the arrays of an adapter whose weight has the rule `split`."""
    fields = dict.fromkeys(("a", "b", "scale", "magnitude", "norm", "owner"), WHOLE)
    if split is WHOLE:
        return fields
    if split.axis == 1:
        return {**fields, "a": split}
    if weight.site == "rows":  # its magnitude is per column
        return {**fields, "b": split}
    several = weight.owner is not None  # magnitudes [n, O]
    if several and split.runs > 1 and weight.magnitude is not None:
        raise ConfigError(
            "several DoRA adapters of a fused query, key and value matrix cannot be sharded. Load"
            " only one of them"
        )
    vector = split._replace(kind="row") if several else split
    return {**fields, "b": split, "magnitude": vector, "norm": vector}


def per_device(tree: Any) -> dict[int, int]:
    """Return the bytes of a pytree's arrays on each local device, by device id."""
    found: dict[int, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            found[shard.device.id] = (
                found.get(shard.device.id, 0)
                + math.prod(shard.data.shape) * shard.data.dtype.itemsize
            )
    return found
