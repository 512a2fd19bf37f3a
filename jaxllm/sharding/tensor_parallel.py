"""Tensor-parallel weights: a device's shard of a weight, and how its products are combined.

These exist only inside `jax.shard_map`, around a device's own shard; `axis_names` names the mesh
axes that split the weight, slowest first. A shard that needs no communication (rows of queries,
keys, values, gates) is just a smaller weight of its type.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.weights.types.base import LinearFn, LocalExperts, WeightBase, nan_out_of_range
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
        width = self.columns // jax.lax.axis_size(self.axis_names)
        begin = jax.lax.axis_index(self.axis_names) * width
        return jax.lax.dynamic_slice_in_dim(x_BTX, begin, width, axis=1)

    def gather(self, x_BTX: jax.Array) -> jax.Array:
        """All-gather the slices: the inverse of `take_local`."""
        return jax.lax.all_gather(x_BTX, self.axis_names, axis=1, tiled=True)

    def reduce_scatter(self, y_RX: jax.Array) -> jax.Array:
        """Reduce-scatter partial sums `[B x T, X]` to this device's tokens, `[B x T / n, X]`."""
        y_BTX = y_RX.reshape(-1, self.columns, y_RX.shape[-1])
        y_BTX = jax.lax.psum_scatter(y_BTX, self.axis_names, scatter_dimension=1, tiled=True)
        return y_BTX.reshape(-1, y_RX.shape[-1])


def _reduce_sum(
    y_RO: jax.Array, axis_names: AxisNames, token_slice: SequenceSlice | None
) -> jax.Array:
    if token_slice is None:
        return jax.lax.psum(y_RO, axis_names)
    rest = tuple(axis for axis in axis_names if axis not in token_slice.axis_names)
    y_RO = token_slice.reduce_scatter(y_RO)
    return jax.lax.psum(y_RO, rest) if rest and jax.lax.axis_size(rest) > 1 else y_RO


class RowParallel(WeightWrapper, struct.PyTreeNode):
    """Some columns of a matrix `[O, I]`, with the same part of the inputs: products are summed.

    That is Megatron's row parallel linear (Shoeybi et al. 2019, figure 3), of weights `[I, O]`.
    """

    format_prefix = "partial/"
    is_sharded = True

    weight: Any
    axis_names: AxisNames = struct.field(pytree_node=False)
    # Each device gets the sums of its own tokens; None: of all rows of x.
    token_slice: SequenceSlice | None = struct.field(pytree_node=False, default=None)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn, *args: Any) -> jax.Array:
        return self._reduce(linear(x_RI, self.weight, *args))

    def local_experts(self) -> LocalExperts:
        return LocalExperts(self.weight, reduce=self._reduce)

    def _reduce(self, y_RO: jax.Array) -> jax.Array:
        return _reduce_sum(y_RO, self.axis_names, self.token_slice)


class RowParallelExact(WeightWrapper, struct.PyTreeNode):
    """Some rows `[O / n, I]`, with I / n of the inputs: inputs and outputs are gathered.

    Its shape is `[O / n, I / n]`, which matches the inputs. It sends twice as much as
    `RowParallel`, but each number is the same sum as on one device, in the same order.
    """

    format_prefix = "gathered/"
    is_sharded = True

    weight: Any
    axis_names: AxisNames = struct.field(pytree_node=False)
    num_shards: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.inner.shape
        return (*rows, columns // self.num_shards)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn, *args: Any) -> jax.Array:
        whole_RI = jax.lax.all_gather(x_RI, self.axis_names, axis=1, tiled=True)
        y_RO = linear(whole_RI, self.weight, *args)
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
        count = self.inner.shape[0]
        row = index - jax.lax.axis_index(self.axis_names).astype(index.dtype) * count
        is_local = ((row >= 0) & (row < count))[..., None]
        taken = self.inner.take(jnp.clip(row, 0, count - 1))
        taken = jnp.where(is_local, taken, jnp.zeros((), taken.dtype)).reshape(-1, taken.shape[-1])
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


class ShardedNorm(WeightBase, struct.PyTreeNode):
    """The weights `[D / n]` of a norm over a vector `[D]` that is split over devices."""

    weight: jax.Array
    axis_names: AxisNames = struct.field(pytree_node=False)
    # Gather the vector, so that its squares are summed in the order of one device; otherwise the
    # devices' sums are summed.
    exact: bool = struct.field(pytree_node=False)

    def apply_norm(self, x: jax.Array, norm: Callable[..., jax.Array]) -> jax.Array:
        if not self.exact:
            wide = x.astype(jnp.float32)
            mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
            return norm(x, self.weight, mean=jax.lax.pmean(mean, self.axis_names))
        width = x.shape[-1]
        x_full, weight = (
            jax.lax.all_gather(y, self.axis_names, axis=y.ndim - 1, tiled=True)
            for y in (x, self.weight)
        )
        begin = jax.lax.axis_index(self.axis_names) * width
        return jax.lax.dynamic_slice_in_dim(norm(x_full, weight), begin, width, axis=-1)
