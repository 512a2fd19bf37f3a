"""Tensor-parallel weights: a device's shard of a weight, and how its products are combined.

These exist only inside `jax.shard_map`, around a device's own shard; `axis_names` names the mesh
axes that split the weight, slowest first. A shard that needs no communication (rows of queries,
keys, values, gates) is just a smaller weight of its type.

`RowParallel`: columns; each device's product is a term of a sum (Shoeybi et al. 2019, figure 3)
`RowParallelExact`: rows, with inputs split over devices; both are gathered, so no sum changes its
order `VocabParallel`: rows of a token table or of the head; logits are gathered, or stay sharded
`ReplicatedTable`: a replicated table, from which each device takes rows for its own tokens
`ShardedNorm`: a norm's weights, for a vector that is split over devices

Outside, a weight whose shards are not blocks of its arrays is a `ShardList`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from jaxllm.weights.types.arrays import as_weight
from jaxllm.weights.types.base import LinearFn, WeightBase, nan_out_of_range
from jaxllm.weights.types.bf16_12bit import PackedBf16
from jaxllm.weights.types.wrapper import WeightWrapper

AxisNames = tuple[str, ...]


class SequenceSlice(NamedTuple):
    """A slice of a text: each device has columns / n of each row, in order, over these axes.

    Each row is split, so a microbatch is split exactly as a whole batch is.
    """

    axis_names: AxisNames
    columns: int  # tokens of a row on all devices

    def take_local(self, x_BTX: jax.Array) -> jax.Array:
        """Return this device's slice `[B, T / n, ...]` of `[B, T, ...]`."""
        each = self.columns // jax.lax.axis_size(self.axis_names)
        begin = jax.lax.axis_index(self.axis_names) * each
        return jax.lax.dynamic_slice_in_dim(x_BTX, begin, each, axis=1)

    def gather(self, x_BTX: jax.Array) -> jax.Array:
        """All-gather the slices: the inverse of `take_local`."""
        return jax.lax.all_gather(x_BTX, self.axis_names, axis=1, tiled=True)

    def reduce_scatter(self, y_RX: jax.Array) -> jax.Array:
        """Reduce-scatter partial sums `[B x T, X]` to this device's tokens, `[B x T / n, X]`."""
        y_BTX = y_RX.reshape(-1, self.columns, y_RX.shape[-1])
        own_BTX = jax.lax.psum_scatter(y_BTX, self.axis_names, scatter_dimension=1, tiled=True)
        return own_BTX.reshape(-1, y_RX.shape[-1])


def _reduce_sum(
    y_RO: jax.Array, axis_names: AxisNames, token_slice: SequenceSlice | None
) -> jax.Array:
    if token_slice is None:
        return jax.lax.psum(y_RO, axis_names)
    rest = tuple(axis for axis in axis_names if axis not in token_slice.axis_names)
    own_RO = token_slice.reduce_scatter(y_RO)
    return jax.lax.psum(own_RO, rest) if rest and jax.lax.axis_size(rest) > 1 else own_RO


class RowParallel(WeightWrapper, struct.PyTreeNode):
    """Some columns of a matrix `[O, I]`, with the same part of the inputs: products are summed."""

    format_prefix = "partial/"

    weight: Any
    axis_names: AxisNames = struct.field(pytree_node=False)
    # Each device gets the sums of its own tokens; None: of all rows of x.
    token_slice: SequenceSlice | None = struct.field(pytree_node=False, default=None)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        return _reduce_sum(linear(x_RI, self.weight), self.axis_names, self.token_slice)


def split_reduction(weight: Any) -> tuple[Any, Callable[[jax.Array], jax.Array]]:
    """Return a weight without its reduction, and the function that reduces its products `[R, O]`.

    That function also reduces anything linear in the products. For any weight but `RowParallel` the
    products are complete, and it does nothing.
    """
    if not isinstance(weight, RowParallel):
        return weight, lambda y: y
    return weight.weight, partial(
        _reduce_sum, axis_names=weight.axis_names, token_slice=weight.token_slice
    )


class RowParallelExact(WeightWrapper, struct.PyTreeNode):
    """Some rows `[O / n, I]`, with I / n of the inputs: inputs and outputs are gathered.

    Its shape is `[O / n, I / n]`, which matches the inputs. It sends twice as much as
    `RowParallel`, but each number is the same sum as on one device, in the same order.
    """

    format_prefix = "gathered/"

    weight: Any
    axis_names: AxisNames = struct.field(pytree_node=False)
    num_shards: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.inner.shape
        return (*rows, columns // self.num_shards)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        whole_RI = jax.lax.all_gather(x_RI, self.axis_names, axis=1, tiled=True)
        y_RO = linear(whole_RI, self.weight)
        return jax.lax.all_gather(y_RO, self.axis_names, axis=1, tiled=True)


class VocabParallel(WeightWrapper, struct.PyTreeNode):
    """Rows of a table `[V, D]`, the same number on each device; the last rows may be beyond V."""

    format_prefix = "vocabulary/"

    weight: Any
    axis_names: AxisNames = struct.field(pytree_node=False)
    vocab_size: int = struct.field(pytree_node=False)  # V
    # Each device takes the rows of its own tokens; None: of all.
    token_slice: SequenceSlice | None = struct.field(pytree_node=False, default=None)
    # Each device keeps the logits of its own rows, V / n rounded up; those beyond V are invalid.
    keep_sharded: bool = struct.field(pytree_node=False, default=False)

    def take(self, index: jax.Array) -> jax.Array:
        mine = self.inner.shape[0]
        at = index - jax.lax.axis_index(self.axis_names).astype(index.dtype) * mine
        here = ((at >= 0) & (at < mine))[..., None]
        taken = self.inner.take(jnp.clip(at, 0, mine - 1))
        taken = jnp.where(here, taken, jnp.zeros((), taken.dtype)).reshape(-1, taken.shape[-1])
        index = index if self.token_slice is None else self.token_slice.take_local(index)
        return nan_out_of_range(
            _reduce_sum(taken, self.axis_names, self.token_slice), index, self.vocab_size
        )

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        y_RV = linear(x_RI, self.weight)
        if self.keep_sharded:
            return y_RV
        return jax.lax.all_gather(y_RV, self.axis_names, axis=1, tiled=True)[:, : self.vocab_size]


class ReplicatedTable(WeightWrapper, struct.PyTreeNode):
    """A replicated table, from which each device takes rows only for its own tokens."""

    format_prefix = "everywhere/"

    weight: Any
    token_slice: SequenceSlice = struct.field(pytree_node=False)

    def take(self, index: jax.Array) -> jax.Array:
        return self.inner.take(self.token_slice.take_local(index))


class ShardedNorm(struct.PyTreeNode):
    """The weights `[D / n]` of a norm over a vector `[D]` that is split over devices."""

    weight: jax.Array
    axis_names: AxisNames = struct.field(pytree_node=False)
    # Gather the vector, so that its squares are summed in the order of one device; otherwise the
    # devices' sums are summed.
    exact: bool = struct.field(pytree_node=False)

    def apply_norm(self, x: jax.Array, norm: Callable[..., jax.Array]) -> jax.Array:
        """Apply `norm(x, weight, mean=) -> x`; mean: of the squares, or None to compute it."""
        if not self.exact:
            wide = x.astype(jnp.float32)
            mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
            return norm(x, self.weight, mean=jax.lax.pmean(mean, self.axis_names))
        parts = x.shape[-1]
        whole, weight = (
            jax.lax.all_gather(y, self.axis_names, axis=y.ndim - 1, tiled=True)
            for y in (x, self.weight)
        )
        begin = jax.lax.axis_index(self.axis_names) * parts
        return jax.lax.dynamic_slice_in_dim(norm(whole, weight), begin, parts, axis=-1)


class ShardList(WeightBase, struct.PyTreeNode):
    """A weight as a list of its shards, each in a storage format of its own.

    A product uses the local shard, never this object.
    """

    is_composite = True

    shards: Any  # one shard, an array or a leaf, whose arrays have a first axis `[n]` over shards
    axis: int = struct.field(pytree_node=False)  # 0: shards are rows, or of a vector; 1: columns
    fused_parts: int = struct.field(
        pytree_node=False
    )  # fused parts, each of which is split over shards
    # O, or I; the last shards repeat their last row to fill what is beyond it.
    full_size: int = struct.field(pytree_node=False)

    @classmethod
    def from_shards(cls, shards: Sequence[Any], axis: int, runs: int, size: int) -> "ShardList":
        """Stack shards in their order."""
        even = equalize_shapes(shards, max_lengths(shards))
        return cls(jax.tree.map(lambda *x: jnp.stack(x), *even), axis, runs, size)

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

    def get_shard(self, number: int | None = None) -> Any:
        """Return one shard; None: the local one, of arrays `[1, ...]`."""
        return jax.tree.map(lambda x: x[number or 0], self.shards)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        count = jax.tree.leaves(self.shards)[0].shape[0]
        each = [as_weight(self.get_shard(i)).to_dense(dtype) for i in range(count)]
        at = -1 if self.axis or each[0].ndim == 1 else -2
        cut = [jnp.split(x, self.fused_parts, axis=at) for x in each]
        whole = jnp.concatenate([x[run] for run in range(self.fused_parts) for x in cut], axis=at)
        return jax.lax.slice_in_dim(whole, 0, self.full_size, axis=at % whole.ndim)

    def row_index(self, ndim: int) -> np.ndarray:
        """Return each row's place in the rows of all shards, for a whole array with `ndim` axes."""
        return self._row_index(self.shards.shape[-1 - ndim], self.shards.shape[-ndim])

    def _row_index(self, count: int, rows: int) -> np.ndarray:
        """Return the same for `count` shards of `vocab_size` rows."""
        number = np.arange(count * rows).reshape(count, self.fused_parts, -1)
        return number.swapaxes(0, 1).reshape(-1)[: self.full_size]

    def merge(self) -> Any:
        """Merge the shards to one weight in their format, bit for bit.

        Raises:
            ConfigError: as `WeightBase.concatenate` does.
        """
        shares = [as_weight(self.get_shard(i)) for i in range(len(jax.tree.leaves(self.shards)[0]))]
        first, *others = shares
        if not others:
            return self.get_shard()
        whole = first.concatenate(others, self.axis)
        if self.axis:
            return whole
        rows = first.shape[0 if first.ndim == 1 else -2]
        place = self._row_index(len(shares), rows)
        return (
            whole if _is_identity(place, len(shares) * rows) else as_weight(whole).with_rows(place)
        )

    def arrays(self) -> dict[str, jax.Array]:
        return as_weight(self.merge()).arrays()


def _is_identity(place: np.ndarray, rows: int) -> bool:
    """Return whether these are all rows in order."""
    return len(place) == rows and bool((np.diff(place) == 1).all())


def max_lengths(shares: Sequence[Any]) -> list[int]:
    """Return the maximum sizes over the shards.

    These are a packed weight's escapes per row, then the length of each array's last axis.
    """
    widest = max(_max_escapes(x) for x in shares)
    pieces = zip(*map(jax.tree.leaves, shares), strict=True)
    return [widest, *(max(x.shape[-1] if x.ndim else 0 for x in some) for some in pieces)]


def equalize_shapes(shares: Sequence[Any], longest: Sequence[int]) -> list[Any]:
    """Pad the arrays of shards to equal shapes; `longest` is the maximum of all `max_lengths`."""
    widest, *ends = longest
    shares = [_set_max_escapes(x, widest) for x in shares]

    def pad_all(length: int, pieces: Sequence[jax.Array]) -> list[jax.Array]:
        return [_pad_last(x, length - x.shape[-1]) if x.ndim else x for x in pieces]

    each = zip(*map(jax.tree.leaves, shares), strict=True)
    columns = [pad_all(*of) for of in zip(ends, each, strict=True)]
    structure = jax.tree.structure(shares[0])
    return [jax.tree.unflatten(structure, mine) for mine in zip(*columns, strict=True)]


def _pad_last(x: jax.Array, more: int) -> jax.Array:
    """Append `more` zeros to the last axis, on the same devices."""
    if not more:
        return x
    wide = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, more)])
    where = getattr(x, "sharding", None)
    return jax.device_put(wide, where) if isinstance(where, NamedSharding) else wide


def _max_escapes(x: Any) -> int:
    if isinstance(x, ShardList):
        return _max_escapes(x.shards)
    return x.max_escapes if isinstance(x, PackedBf16) else 0


def _set_max_escapes(x: Any, widest: int) -> Any:
    if isinstance(x, ShardList):
        return x.replace(shards=_set_max_escapes(x.shards, widest))
    return x.replace(max_escapes=widest) if isinstance(x, PackedBf16) else x
