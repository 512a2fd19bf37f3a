"""The cache is a value: segments of keys and values, and `commit`, the one place where it grows.

A slot is described by its position, never by its index, so padding, unequal lengths, branches and
gaps need no further bookkeeping. Keys are stored already rotated.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.config import ModelConfig
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError
from jaxllm.weights.precision import DTYPES


class Segment(struct.PyTreeNode):
    """Keys and values of some tokens.

    k, v: one `[B or 1, S, K, H]` array a layer. position_BS: int32 `[B or 1, S]`, absolute, -1
    where the slot is empty; an empty slot's contents mean nothing. token_BS: int32, the id of the
    token whose keys and values these are.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    position_BS: jax.Array
    token_BS: jax.Array


class Delta(Segment):
    """The keys and values that `forward` computed for T new tokens and `commit` writes.

    The same fields as a Segment with S = T; padding tokens have position -1.
    """


class KVCache(struct.PyTreeNode):
    """Frozen segments shared by reference, and one tail that `commit` extends.

    cursor: int32 scalar, the tail's slots below it have been written. More than `capacity` means
    that a compiled loop committed what did not fit; that write was dropped and the next call from
    Python says so. next_position_B: int32 `[B]`, where each row's next token goes.
    """

    frozen: tuple[Segment, ...]
    tail: Segment
    cursor: jax.Array
    next_position_B: jax.Array

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, oldest first."""
        return (*self.frozen, self.tail)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.next_position_B.shape[-1]

    @property
    def capacity(self) -> int:
        """Slots of the tail: how many tokens a row can still be given in all."""
        return self.tail.position_BS.shape[-1]

    @property
    def position_BS(self) -> jax.Array:
        """Positions of all slots of all segments in order, int32 `[B, S]`; -1 where empty."""
        parts = [
            jnp.broadcast_to(s.position_BS, (self.batch, s.position_BS.shape[1]))
            for s in self.segments
        ]
        return jnp.concatenate(parts, axis=1)

    @property
    def length_B(self) -> jax.Array:
        """Committed tokens of each row, int32 `[B]`: padding and empty slots do not count."""
        counts = [(s.position_BS >= 0).sum(axis=-1, dtype=jnp.int32) for s in self.segments]
        return sum(counts[1:], jnp.broadcast_to(counts[0], (self.batch,)))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; what segments share is counted once."""
        return sum({id(x): x.nbytes for x in jax.tree.leaves(self)}.values())

    def __repr__(self) -> str:
        where = f"{len(self.tail.k)} layers, {self.tail.k[0].dtype}" if self.tail.k else "no layers"
        if isinstance(self.cursor, jax.core.Tracer):
            return f"KVCache({self.batch} rows, capacity {self.capacity}, {where}, traced)"
        lengths = ", ".join(str(n) for n in np.asarray(self.length_B).ravel())
        return (
            f"KVCache({self.batch} rows of {lengths} tokens, {len(self.frozen)} frozen segments,"
            f" tail {int(self.cursor)}/{self.capacity}, {where}, {self.nbytes / 1e6:.1f} MB)"
        )


def init_cache(
    config: ModelConfig, batch: int, capacity: int, *, dtype: str | None = None
) -> KVCache:
    """An empty cache with room for `capacity` tokens in each of `batch` rows.

    dtype: "float32" (the default), "bfloat16" or "float16". Takes
    `2 * layers * batch * capacity * kv heads * head_dim` numbers.

    Raises ConfigError for an unknown dtype, CapacityError for sizes below one.
    """
    dtype = dtype or "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"cache dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if batch < 1 or capacity < 1:
        raise CapacityError(
            f"a cache needs at least one row and one slot, got batch {batch}, capacity {capacity}"
        )
    shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
    layers = range(config.num_hidden_layers)
    return KVCache(
        frozen=(),
        tail=Segment(
            k=tuple(jnp.zeros(shape, DTYPES[dtype]) for _ in layers),
            v=tuple(jnp.zeros(shape, DTYPES[dtype]) for _ in layers),
            position_BS=jnp.full((batch, capacity), -1, jnp.int32),
            token_BS=jnp.zeros((batch, capacity), jnp.int32),
        ),
        cursor=jnp.zeros((), jnp.int32),
        next_position_B=jnp.zeros((batch,), jnp.int32),
    )


def commit(cache: KVCache, delta: Delta, *, donate: bool = False) -> KVCache:
    """The cache with the delta's tokens written at its cursor.

    Trailing columns in which every row is padding take no slots. `cache` stays valid, at the cost
    of a copy of its tail (never of its frozen segments); with `donate=True` the write is in place
    and `cache` must not be used again.

    Raises CapacityError when the tokens do not fit, CacheMismatchError when the delta belongs to a
    cache of another shape, or when `cache` was donated before. Inside `jit`, where nothing can be
    raised, tokens that do not fit are dropped and no slot that was written before changes.
    """
    check_fits(cache, delta.position_BS)
    _check_match(cache, delta)
    frozen, grown = cache.frozen, cache.replace(frozen=())
    # The frozen segments stay out of the compiled call: what goes through it comes back copied.
    step = _commit_in_place if donate else _commit
    return step(grown, delta).replace(frozen=frozen)


def extend(cache: KVCache, delta: Delta) -> KVCache:
    """`commit` without its checks, for use inside compiled programs."""
    used = (delta.position_BS >= 0).any(axis=0)
    columns = jnp.max(jnp.where(used, jnp.arange(1, used.shape[0] + 1, dtype=jnp.int32), 0))
    tail = cache.tail
    return cache.replace(
        tail=Segment(
            k=tuple(
                _write(old, new, cache.cursor) for old, new in zip(tail.k, delta.k, strict=True)
            ),
            v=tuple(
                _write(old, new, cache.cursor) for old, new in zip(tail.v, delta.v, strict=True)
            ),
            position_BS=_write(tail.position_BS, delta.position_BS, cache.cursor),
            token_BS=_write(tail.token_BS, delta.token_BS, cache.cursor),
        ),
        cursor=cache.cursor + columns,
        next_position_B=jnp.maximum(cache.next_position_B, delta.position_BS.max(axis=1) + 1),
    )


_commit = jax.jit(extend)
_commit_in_place = jax.jit(extend, donate_argnums=0)


def _write(old_BSX: jax.Array, new_BTX: jax.Array, cursor: jax.Array) -> jax.Array:
    """`old` with `new` at slots `cursor ...`; what would run past the end is dropped.

    `dynamic_update_slice` shifts such a write back over older slots, so the window that it does
    write is filled with the old contents wherever no new token belongs.
    """
    slots = old_BSX.shape[1]
    new_BTX = new_BTX[:, :slots].astype(old_BSX.dtype)
    width = new_BTX.shape[1]
    start = jnp.clip(cursor, 0, slots - width)
    source = jnp.arange(width, dtype=jnp.int32) + start - cursor
    inside = ((source >= 0) & (source < width)).reshape((1, width) + (1,) * (old_BSX.ndim - 2))
    window = jax.lax.dynamic_slice_in_dim(old_BSX, start, width, axis=1)
    moved = jnp.take(new_BTX, jnp.clip(source, 0, width - 1), axis=1)
    return jax.lax.dynamic_update_slice_in_dim(
        old_BSX, jnp.where(inside, moved, window), start, axis=1
    )


def check_usable(cache: KVCache) -> None:
    """Raise, by name, for a cache that was donated, or that overflowed in a compiled loop."""
    leaves = (x for x in jax.tree.leaves(cache) if not isinstance(x, jax.core.Tracer))
    if any(x.is_deleted() for x in leaves):
        raise CacheMismatchError(
            "this cache was donated to an earlier step (donate=True) and no longer exists;"
            " use the cache that the step returned"
        )
    if isinstance(cache.cursor, jax.core.Tracer):
        return
    if int(cache.cursor) > cache.capacity:
        raise CapacityError(
            f"a compiled loop committed {int(cache.cursor)} tokens to a cache of"
            f" {cache.capacity} slots; the last {int(cache.cursor) - cache.capacity} were dropped."
            " Make the cache larger, or check the room before entering the loop"
        )


def check_fits(cache: KVCache, position_BT: jax.Array | np.ndarray) -> None:
    """Raise CapacityError if tokens at these positions (-1: padding) do not fit into the tail."""
    check_usable(cache)
    if isinstance(cache.cursor, jax.core.Tracer) or isinstance(position_BT, jax.core.Tracer):
        return
    used = np.flatnonzero((np.asarray(position_BT) >= 0).any(axis=0))
    columns = int(used[-1]) + 1 if used.size else 0
    cursor = int(cache.cursor)
    if cursor + columns > cache.capacity:
        raise CapacityError(
            f"{columns} more tokens do not fit: {cursor} of the cache's {cache.capacity} slots are"
            " used. Make the cache with a larger capacity"
        )


def _check_match(cache: KVCache, delta: Delta) -> None:
    def form(segment: Segment) -> tuple[int, tuple[int, ...]]:
        shape = segment.k[0].shape
        return len(segment.k), (shape[0], *shape[2:])

    if form(cache.tail) != form(delta):
        raise CacheMismatchError(
            "the delta is of (layers, (rows, kv heads, head dim))"
            f" {form(delta)}, the cache of {form(cache.tail)}"
        )
