"""Sharded parameters as lists of weights, for shards that are not blocks of an array.

Quantized weights, fused matrices, and a vocabulary that the devices do not divide need this.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxllm.runtime.multihost import is_multiprocess
from jaxllm.weights.types.arrays import as_weight
from jaxllm.weights.types.base import WeightBase
from jaxllm.weights.types.packed_bf16 import PackedBf16Weight


class ShardList(WeightBase, struct.PyTreeNode):
    """A weight as a list of its shards; each shard is a weight in its storage format.

    A product uses the local shard, never this object.
    """

    is_composite = True

    shards: Any  # one shard, an array or a leaf, whose arrays have a first axis `[n]` over shards
    axis: int = struct.field(pytree_node=False)  # 0: shards are rows, or of a vector; 1: columns
    # Fused parts, each of which is split over shards.
    fused_parts: int = struct.field(pytree_node=False)
    # O, or I; the last shards repeat their last row to fill what is beyond it.
    full_size: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(as_weight(self.shards).shape[1:])
        shape[-1 if self.axis or len(shape) == 1 else -2] = self.full_size
        return tuple(shape)

    @property
    def dtype(self) -> Any:
        return as_weight(self.shards).dtype

    @property
    def format(self) -> str:
        return as_weight(self.shards).format

    @property
    def num_shards(self) -> int:
        return int(jax.tree.leaves(self.shards)[0].shape[0])

    def get_shard(self, number: int = 0) -> Any:
        """Return one shard; inside `jax.shard_map` there is only the device's own."""
        return jax.tree.map(lambda x: x[number], self.shards)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        shards = [as_weight(self.get_shard(i)).to_dense(dtype) for i in range(self.num_shards)]
        axis = -1 if self.axis or shards[0].ndim == 1 else -2
        split = [jnp.split(x, self.fused_parts, axis=axis) for x in shards]
        joined = jnp.concatenate([x for part in zip(*split, strict=True) for x in part], axis=axis)
        return jax.lax.slice_in_dim(joined, 0, self.full_size, axis=axis % joined.ndim)

    def row_index(self, ndim: int) -> np.ndarray:
        """Return each row's place in the rows of all shards, for a whole array with `ndim` axes."""
        return self._row_index(*self.shards.shape[-1 - ndim :][:2])

    def _row_index(self, count: int, rows: int) -> np.ndarray:
        """Return the same for `count` shards of `rows` rows."""
        number = np.arange(count * rows).reshape(count, self.fused_parts, -1)
        return number.swapaxes(0, 1).reshape(-1)[: self.full_size]

    def merge(self) -> Any:
        """Merge the shards to one weight in their format, bit for bit.

        Raises:
            ConfigError: as `WeightBase.concatenate` does.
        """
        first, *others = (as_weight(self.get_shard(i)) for i in range(self.num_shards))
        if not others:
            return self.get_shard()
        joined = first.concatenate(others, self.axis)
        if self.axis:
            return joined
        rows = first.shape[0 if first.ndim == 1 else -2]
        index = self._row_index(self.num_shards, rows)
        in_order = len(index) == self.num_shards * rows and bool((np.diff(index) == 1).all())
        return joined if in_order else as_weight(joined).with_rows(index)

    def arrays(self) -> dict[str, jax.Array]:
        return as_weight(self.merge()).arrays()


def max_lengths(shards: Sequence[Any]) -> list[int]:
    """Return the maximum sizes over the shards.

    These are a packed weight's escapes per row, then the length of each array's last axis.
    """
    arrays = zip(*map(jax.tree.leaves, shards), strict=True)
    lengths = (max(x.shape[-1] if x.ndim else 0 for x in same) for same in arrays)
    return [max(map(_max_escapes, shards)), *lengths]


def equalize_shapes(shards: Sequence[Any], longest: Sequence[int]) -> list[Any]:
    """Pad the arrays of shards to equal shapes; `longest` is the maximum of all `max_lengths`."""
    escapes, *lengths = longest
    shards = [_set_max_escapes(x, escapes) for x in shards]
    structure = jax.tree.structure(shards[0])

    def pad(shard: Any) -> Any:
        arrays = zip(jax.tree.leaves(shard), lengths, strict=True)
        return jax.tree.unflatten(structure, [_pad_last(x, n) for x, n in arrays])

    return [pad(x) for x in shards]


def _pad_last(x: jax.Array, length: int) -> jax.Array:
    """Append zeros to the last axis up to `length`, on the same devices."""
    if not x.ndim or x.shape[-1] == length:
        return x
    wide = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, length - x.shape[-1])])
    sharding = getattr(x, "sharding", None)
    return jax.device_put(wide, sharding) if isinstance(sharding, NamedSharding) else wide


def _max_escapes(x: Any) -> int:
    if isinstance(x, ShardList):
        return _max_escapes(x.shards)
    return x.max_escapes if isinstance(x, PackedBf16Weight) else 0


def _set_max_escapes(x: Any, count: int) -> Any:
    if isinstance(x, ShardList):
        return x.replace(shards=_set_max_escapes(x.shards, count))
    return x.replace(max_escapes=count) if isinstance(x, PackedBf16Weight) else x


def equalize_over_mesh(mesh: Mesh, shares: Sequence[Any]) -> list[Any]:
    """Pad shards to arrays of equal shapes; each process of the mesh has some of them."""
    lengths = np.array(max_lengths(shares))
    if is_multiprocess():  # those of the mesh alone take part
        by_device = NamedSharding(mesh, P(mesh.axis_names))
        every = jax.make_array_from_callback(
            (mesh.size, len(lengths)), by_device, lambda _: lengths[None]
        )
        largest = jax.jit(_max_rows, out_shardings=NamedSharding(mesh, P()))(every)
        lengths = np.asarray(largest.addressable_data(0))
    return equalize_shapes(shares, lengths.tolist())


def _max_rows(x: jax.Array) -> jax.Array:
    return x.max(axis=0)


def concat_shards(arrays: Sequence[jax.Array], mesh: Mesh, axis: str, at: int) -> jax.Array:
    """Concatenate the arrays of each index of a mesh axis along `at`, without communication.

    Args:
        arrays: of equal shapes; those of which this process has a part.
    """
    spec = list[Any](arrays[0].sharding.spec)  # type: ignore[attr-defined]
    spec += [None] * (at + 1 - len(spec))
    spec[at], shape = axis, list(arrays[0].shape)
    shape[at] *= mesh.shape[axis]
    shards = [shard.data for x in arrays for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        tuple(shape), NamedSharding(mesh, P(*spec)), shards
    )
