"""Tensor-parallel weights: a device's shard of a weight, and how its products are combined.

These exist only inside `jax.shard_map`, around a device's own shard; `over` names the mesh axes
that split the weight, slowest first. A shard that needs no communication (rows of queries, keys,
values, gates) is just a smaller weight of its type.

`Partial`: columns; each device's product is a term of a sum (Shoeybi et al. 2019, figure 3)
`Gathered`: rows, with inputs split over devices; both are gathered, so no sum changes its order
`Vocabulary`: rows of a token table or of the head; logits are gathered, or stay sharded
`Everywhere`: a replicated table, from which each device takes rows for its own tokens
`Spread`: a norm's weights, for a vector that is split over devices

Outside, a weight whose shards are not blocks of its arrays is a `Shares`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from jaxllm.weights.leaves.arrays import as_leaf
from jaxllm.weights.leaves.leaf import Leaf, Linear, or_nan
from jaxllm.weights.leaves.packed import Packed
from jaxllm.weights.leaves.wrapped import Wrapped

Over = tuple[str, ...]


class Tokens(NamedTuple):
    """A slice of a text: each device has columns / n of each row, in order, over these axes.

    Each row is split, so a microbatch is split exactly as a whole batch is.
    """

    over: Over
    columns: int  # tokens of a row on all devices

    def own(self, x_BTX: jax.Array) -> jax.Array:
        """Return this device's slice `[B, T / n, ...]` of `[B, T, ...]`."""
        each = self.columns // jax.lax.axis_size(self.over)
        begin = jax.lax.axis_index(self.over) * each
        return jax.lax.dynamic_slice_in_dim(x_BTX, begin, each, axis=1)

    def of_all(self, x_BTX: jax.Array) -> jax.Array:
        """All-gather the slices: the inverse of `own`."""
        return jax.lax.all_gather(x_BTX, self.over, axis=1, tiled=True)

    def summed(self, y_RX: jax.Array) -> jax.Array:
        """Reduce-scatter partial sums `[B x T, X]` to this device's tokens, `[B x T / n, X]`."""
        y_BTX = y_RX.reshape(-1, self.columns, y_RX.shape[-1])
        own_BTX = jax.lax.psum_scatter(y_BTX, self.over, scatter_dimension=1, tiled=True)
        return own_BTX.reshape(-1, y_RX.shape[-1])


def _summed(y_RO: jax.Array, over: Over, split: Tokens | None) -> jax.Array:
    if split is None:
        return jax.lax.psum(y_RO, over)
    rest = tuple(axis for axis in over if axis not in split.over)
    own_RO = split.summed(y_RO)
    return jax.lax.psum(own_RO, rest) if rest and jax.lax.axis_size(rest) > 1 else own_RO


class Partial(Wrapped, struct.PyTreeNode):
    """Some columns of a matrix `[O, I]`, with the same part of the inputs: products are summed."""

    kind = "partial/"

    weight: Any
    over: Over = struct.field(pytree_node=False)
    # Each device gets the sums of its own tokens; None: of all rows of x.
    split: Tokens | None = struct.field(pytree_node=False, default=None)

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        return _summed(linear(x_RI, self.weight), self.over, self.split)


def later(weight: Any) -> tuple[Any, Callable[[jax.Array], jax.Array]]:
    """Return a weight without its reduction, and the function that reduces its products `[R, O]`.

    That function also reduces anything linear in the products. For any weight but `Partial` the
    products are complete, and it does nothing.
    """
    if not isinstance(weight, Partial):
        return weight, lambda y: y
    return weight.weight, partial(_summed, over=weight.over, split=weight.split)


class Gathered(Wrapped, struct.PyTreeNode):
    """Some rows `[O / n, I]`, with I / n of the inputs: inputs and outputs are gathered.

    Its shape is `[O / n, I / n]`, which matches the inputs. It sends twice as much as `Partial`,
    but each number is the same sum as on one device, in the same order.
    """

    kind = "gathered/"

    weight: Any
    over: Over = struct.field(pytree_node=False)
    parts: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.stored.shape
        return (*rows, columns // self.parts)

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        whole_RI = jax.lax.all_gather(x_RI, self.over, axis=1, tiled=True)
        y_RO = linear(whole_RI, self.weight)
        return jax.lax.all_gather(y_RO, self.over, axis=1, tiled=True)


class Vocabulary(Wrapped, struct.PyTreeNode):
    """Rows of a table `[V, D]`, the same number on each device; the last rows may be beyond V."""

    kind = "vocabulary/"

    weight: Any
    over: Over = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False)  # V
    # Each device takes the rows of its own tokens; None: of all.
    split: Tokens | None = struct.field(pytree_node=False, default=None)
    # Each device keeps the logits of its own rows, V / n rounded up; those beyond V are invalid.
    apart: bool = struct.field(pytree_node=False, default=False)

    def take(self, index: jax.Array) -> jax.Array:
        mine = self.stored.shape[0]
        at = index - jax.lax.axis_index(self.over).astype(index.dtype) * mine
        here = ((at >= 0) & (at < mine))[..., None]
        taken = self.stored.take(jnp.clip(at, 0, mine - 1))
        taken = jnp.where(here, taken, jnp.zeros((), taken.dtype)).reshape(-1, taken.shape[-1])
        index = index if self.split is None else self.split.own(index)
        return or_nan(_summed(taken, self.over, self.split), index, self.rows)

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        y_RV = linear(x_RI, self.weight)
        if self.apart:
            return y_RV
        return jax.lax.all_gather(y_RV, self.over, axis=1, tiled=True)[:, : self.rows]


class Everywhere(Wrapped, struct.PyTreeNode):
    """A replicated table, from which each device takes rows only for its own tokens."""

    kind = "everywhere/"

    weight: Any
    split: Tokens = struct.field(pytree_node=False)

    def take(self, index: jax.Array) -> jax.Array:
        return self.stored.take(self.split.own(index))


class Spread(struct.PyTreeNode):
    """The weights `[D / n]` of a norm over a vector `[D]` that is split over devices."""

    weight: jax.Array
    over: Over = struct.field(pytree_node=False)
    # Gather the vector, so that its squares are summed in the order of one device; otherwise the
    # devices' sums are summed.
    exact: bool = struct.field(pytree_node=False)

    def normed(self, x: jax.Array, norm: Callable[..., jax.Array]) -> jax.Array:
        """Apply `norm(x, weight, mean=) -> x`; mean: of the squares, or None to compute it."""
        if not self.exact:
            wide = x.astype(jnp.float32)
            mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
            return norm(x, self.weight, mean=jax.lax.pmean(mean, self.over))
        parts = x.shape[-1]
        whole, weight = (
            jax.lax.all_gather(y, self.over, axis=y.ndim - 1, tiled=True) for y in (x, self.weight)
        )
        begin = jax.lax.axis_index(self.over) * parts
        return jax.lax.dynamic_slice_in_dim(norm(whole, weight), begin, parts, axis=-1)


class Shares(Leaf, struct.PyTreeNode):
    """A weight as a list of its shards, each in a storage format of its own.

    A product uses the local shard, never this object.
    """

    composed = True

    parts: Any  # one shard, an array or a leaf, whose arrays have a first axis `[n]` over shards
    axis: int = struct.field(pytree_node=False)  # 0: shards are rows, or of a vector; 1: columns
    runs: int = struct.field(pytree_node=False)  # fused parts, each of which is split over shards
    # O, or I; the last shards repeat their last row to fill what is beyond it.
    size_along: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, shares: Sequence[Any], axis: int, runs: int, size: int) -> "Shares":
        """Stack shards in their order."""
        even = alike(shares, lengths(shares))
        return cls(jax.tree.map(lambda *x: jnp.stack(x), *even), axis, runs, size)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(as_leaf(self.parts).shape[1:])
        shape[-1 if self.axis or len(shape) == 1 else -2] = self.size_along
        return tuple(shape)

    @property
    def dtype(self) -> Any:
        return as_leaf(self.parts).dtype

    @property
    def format(self) -> str:
        return as_leaf(self.parts).format

    def share(self, number: int | None = None) -> Any:
        """Return one shard; None: the local one, of arrays `[1, ...]`."""
        return jax.tree.map(lambda x: x[number or 0], self.parts)

    def dense(self, dtype: Any = None) -> jax.Array:
        count = jax.tree.leaves(self.parts)[0].shape[0]
        each = [as_leaf(self.share(i)).dense(dtype) for i in range(count)]
        at = -1 if self.axis or each[0].ndim == 1 else -2
        cut = [jnp.split(x, self.runs, axis=at) for x in each]
        whole = jnp.concatenate([x[run] for run in range(self.runs) for x in cut], axis=at)
        return jax.lax.slice_in_dim(whole, 0, self.size_along, axis=at % whole.ndim)

    def places(self, ndim: int) -> np.ndarray:
        """Return each row's place in the rows of all shards, for a whole array with `ndim` axes."""
        return self._places(self.parts.shape[-1 - ndim], self.parts.shape[-ndim])

    def _places(self, count: int, rows: int) -> np.ndarray:
        """Return the same for `count` shards of `rows` rows."""
        number = np.arange(count * rows).reshape(count, self.runs, -1)
        return number.swapaxes(0, 1).reshape(-1)[: self.size_along]

    def joined(self) -> Any:
        """Merge the shards to one weight in their format, bit for bit.

        Raises:
            ConfigError: as `Leaf.with_more` does.
        """
        shares = [as_leaf(self.share(i)) for i in range(len(jax.tree.leaves(self.parts)[0]))]
        first, *others = shares
        if not others:
            return self.share()
        whole = first.with_more(others, self.axis)
        if self.axis:
            return whole
        rows = first.shape[0 if first.ndim == 1 else -2]
        place = self._places(len(shares), rows)
        return whole if _in_order(place, len(shares) * rows) else as_leaf(whole).with_rows(place)

    def pieces(self) -> dict[str, jax.Array]:
        return as_leaf(self.joined()).pieces()


def _in_order(place: np.ndarray, rows: int) -> bool:
    """Return whether these are all rows in order."""
    return len(place) == rows and bool((np.diff(place) == 1).all())


def lengths(shares: Sequence[Any]) -> list[int]:
    """Return the maximum sizes over the shards.

    These are a packed weight's escapes per row, then the length of each array's last axis.
    """
    widest = max(_widest(x) for x in shares)
    pieces = zip(*map(jax.tree.leaves, shares), strict=True)
    return [widest, *(max(x.shape[-1] if x.ndim else 0 for x in some) for some in pieces)]


def alike(shares: Sequence[Any], longest: Sequence[int]) -> list[Any]:
    """Pad the arrays of shards to equal shapes; `longest` is the maximum of all `lengths`."""
    widest, *ends = longest
    shares = [_widened(x, widest) for x in shares]

    def same(length: int, pieces: Sequence[jax.Array]) -> list[jax.Array]:
        return [_padded(x, length - x.shape[-1]) if x.ndim else x for x in pieces]

    each = zip(*map(jax.tree.leaves, shares), strict=True)
    columns = [same(*of) for of in zip(ends, each, strict=True)]
    structure = jax.tree.structure(shares[0])
    return [jax.tree.unflatten(structure, mine) for mine in zip(*columns, strict=True)]


def _padded(x: jax.Array, more: int) -> jax.Array:
    """Append `more` zeros to the last axis, on the same devices."""
    if not more:
        return x
    wide = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, more)])
    where = getattr(x, "sharding", None)
    return jax.device_put(wide, where) if isinstance(where, NamedSharding) else wide


def _widest(x: Any) -> int:
    if isinstance(x, Shares):
        return _widest(x.parts)
    return x.widest if isinstance(x, Packed) else 0


def _widened(x: Any, widest: int) -> Any:
    if isinstance(x, Shares):
        return x.replace(parts=_widened(x.parts, widest))
    return x.replace(widest=widest) if isinstance(x, Packed) else x
