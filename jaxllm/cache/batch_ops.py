"""Row operations: fork one row into many, select rows, merge caches.

Shared segments are stored once and passed on by reference.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.cache.kv import EMPTY, MAX_SLOTS, KVCache, Segment, cache_nbytes, check_usable
from jaxllm.errors import CacheMismatchError, CapacityError
from jaxllm.files import check_memory
from jaxllm.ops.kv_quant import concat_slots
from jaxllm.runtime.validation import check_int


def _matching_sharding(x: jax.Array, shape: tuple[int, ...]) -> Any:
    """Return a sharded array's sharding for a related array, so that no device holds all of that.

    None, the default device, if x is not sharded or the shape is not divisible.
    """
    if isinstance(x, jax.core.Tracer) or not isinstance(x.sharding, NamedSharding):
        return None
    sizes = x.sharding.mesh.shape
    over = [(axes,) if isinstance(axes, str) else axes or () for axes in x.sharding.spec]
    parts = [math.prod(sizes[axis] for axis in axes) for axes in over]
    fits = all(size % n == 0 for size, n in zip(shape, parts, strict=False))
    return x.sharding if fits else None


def fork(cache: KVCache, n: int, *, capacity: int | None = None) -> KVCache:
    """Return a cache of `n` rows that continue this one-row cache and share it by reference.

    The prefix is stored once, including the free slots of its tail (call `compact` first to drop
    them). Each row gets its own tail of `capacity` slots, by default as many as were free. To fork
    a fork, select a row with `branch`.

    Raises:
        CacheMismatchError: The cache has several rows.
        CapacityError: No rows or no slots, or no capacity inside `jit`.
    """
    check_usable(cache)
    if cache.batch != 1:
        raise CacheMismatchError(
            f"fork needs a cache of one row, got {cache.batch}. Select one with branch"
        )
    if capacity is None:
        if isinstance(cache.cursor, jax.core.Tracer):
            raise CapacityError(
                "fork needs a capacity inside jit, where free slots cannot be counted"
            )
        capacity = cache.capacity - int(cache.cursor)
    n = check_int("a fork's n", n, 1, MAX_SLOTS, CapacityError)
    capacity = check_int("a fork's capacity", capacity, 1, MAX_SLOTS, CapacityError)
    check_memory(
        cache_nbytes(cache.config, n, capacity, cache.dtype),
        f"a fork of {n:,} rows of {capacity:,} tokens",
    )

    def empty_slots(x: jax.Array) -> jax.Array:
        shape = (n, capacity, *x.shape[2:])
        return jnp.zeros(shape, x.dtype, device=_matching_sharding(x, shape))

    tail: Segment = jax.tree.map(empty_slots, cache.tail)
    return cache.replace(
        frozen=cache.segments,
        tail=tail.replace(position_BS=jnp.full((n, capacity), EMPTY, jnp.int32)),
        cursor=jnp.zeros((), jnp.int32),
        next_position_B=jnp.broadcast_to(cache.next_position_B, (n,)),
        edits_B=jax.tree.map(lambda x: jnp.broadcast_to(x, (n,)), cache.edits_B),
        state=jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), cache.state),
    )


def select(cache: KVCache, rows: Any) -> KVCache:
    """Return the cache with these rows in this order, int `[R]`; a row may occur several times.

    Shared segments stay shared; the rest is copied.

    Raises:
        CacheMismatchError: For rows that do not exist, and for a bool mask (use
            `np.flatnonzero(mask)`).
    """
    check_usable(cache)
    rows = rows if isinstance(rows, jax.Array) else _row_numbers(rows)
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        raise CacheMismatchError(
            f"rows must be integers, got {rows.dtype}. For a mask, pass np.flatnonzero(mask)"
        )
    if rows.ndim != 1 or not rows.size:
        raise CacheMismatchError(f"rows must be a non-empty list, got shape {rows.shape}")
    if not isinstance(rows, jax.core.Tracer):
        if rows.min() < 0 or rows.max() >= cache.batch:
            raise CacheMismatchError(
                f"rows {rows.tolist()} out of range: the cache has {cache.batch} rows"
            )
        rows = rows.astype(np.int32)

    def take_rows(x: jax.Array) -> jax.Array:
        return jnp.take(x, rows, axis=0)

    def take_or_share(x: jax.Array) -> jax.Array:
        return x if x.shape[0] == 1 else take_rows(x)

    return cache.replace(
        frozen=jax.tree.map(take_or_share, cache.frozen),
        tail=jax.tree.map(take_rows, cache.tail),
        next_position_B=take_rows(cache.next_position_B),
        edits_B=jax.tree.map(take_rows, cache.edits_B),
        state=jax.tree.map(take_rows, cache.state),
    )


def _row_numbers(rows: Any) -> np.ndarray:
    """Convert rows to an array; of an unsuitable dtype if they are not integers."""
    try:
        numbers = np.asarray(rows)
    except (TypeError, ValueError, OverflowError):
        numbers = np.zeros((), object)
    return numbers.astype(np.int32) if not numbers.size else numbers


def branch(cache: KVCache, row: int) -> KVCache:
    """Return one row as a cache. Raises CacheMismatchError if it does not exist."""
    check_usable(cache)
    return select(cache, [check_int("row", row, 0, cache.batch - 1, CacheMismatchError)])


def merge_rows(caches: Sequence[KVCache], *, capacity: int | None = None) -> KVCache:
    """Merge the rows of several caches into one cache, to decode them as one batch.

    Leading frozen segments whose keys and values are the same buffers in all caches stay shared;
    everything after them is copied into one tail. Lengths may differ.

    Args:
        capacity: Slots of the new tail. Default: every row keeps its free slots.

    Raises:
        CacheMismatchError: No caches, or caches of different models or dtypes.
        CapacityError: The tokens do not fit, or no capacity inside `jit`.
    """
    if not isinstance(caches, Iterable):
        raise CacheMismatchError(f"merge_rows needs a list of caches, got {caches!r:.60}")
    caches = list(caches)
    for cache in caches:
        check_usable(cache)
    if capacity is not None:
        capacity = check_int("a cache's capacity", capacity, 1, MAX_SLOTS, CapacityError)
    kinds = {(c.config, c.dtype) for c in caches}
    if len(kinds) != 1:
        known = ", ".join(sorted(f"{config.model_type} in {dtype}" for config, dtype in kinds))
        raise CacheMismatchError(
            f"merge_rows needs caches of one model and one dtype, got: {known or 'none'}"
        )
    columns = list(zip(*(c.frozen for c in caches), strict=False))
    common = next(
        (i for i, column in enumerate(columns) if not _is_same_segment(column)), len(columns)
    )
    rest = [_concat_segments([*c.frozen[common:], c.tail], c.batch) for c in caches]
    before = [sum(s.position_BS.shape[1] for s in c.frozen[common:]) for c in caches]
    cursor = jnp.stack([n + c.cursor for n, c in zip(before, caches, strict=True)]).max()
    if not isinstance(cursor, jax.core.Tracer):
        room = max(c.capacity - int(c.cursor) for c in caches)
        capacity = int(cursor) + room if capacity is None else capacity
        if int(cursor) > capacity:
            raise CapacityError(f"{int(cursor)} slots are used, more than capacity {capacity}")
    if capacity is None:
        raise CapacityError(
            "merge_rows needs a capacity inside jit, where used slots cannot be counted"
        )
    return caches[0].replace(
        frozen=tuple(_merge_segment(column, caches) for column in columns[:common]),
        tail=jax.tree.map(
            lambda *x: jnp.concatenate(x), *(_resize_segment(s, capacity) for s in rest)
        ),
        cursor=cursor,
        next_position_B=jnp.concatenate([c.next_position_B for c in caches]),
        edits_B=_concat_labels(caches),
        state=jax.tree.map(lambda *x: jnp.concatenate(x), *(c.state for c in caches)),
    )


def _concat_labels(caches: Sequence[KVCache]) -> jax.Array | None:
    """Return the fingerprints of all rows' edits; None if no row was edited."""
    if all(c.edits_B is None for c in caches):
        return None
    plain = (jnp.zeros(c.batch, jnp.uint32) if c.edits_B is None else c.edits_B for c in caches)
    return jnp.concatenate([*plain])


def _is_same_segment(segments: Sequence[Segment]) -> bool:
    """Whether these are the same stored segment, apart from tokens culled by rows."""
    first = jax.tree.leaves((segments[0].k, segments[0].v))
    return all(x.shape[0] == 1 for x in first) and all(
        a is b
        for s in segments[1:]
        for a, b in zip(first, jax.tree.leaves((s.k, s.v)), strict=True)
    )


def _merge_segment(segments: Sequence[Segment], caches: Sequence[KVCache]) -> Segment:
    """Merge one shared segment's positions and marks, which may differ between the caches' rows."""
    if all(s is segments[0] for s in segments):
        return segments[0]

    def merge_field(name: str) -> jax.Array:
        each = [getattr(s, name) for s in segments]
        if all(x is each[0] and x.shape[0] == 1 for x in each):
            return each[0]
        return jnp.concatenate(
            [
                jnp.broadcast_to(x, (c.batch, *x.shape[1:]))
                for x, c in zip(each, caches, strict=True)
            ]
        )

    names = ("position_BS", "token_BS", "patched_BS")
    return segments[0].replace(**{name: merge_field(name) for name in names})


def _concat_segments(segments: Sequence[Segment], batch: int) -> Segment:
    """Concatenate segments into one with unshared rows."""
    joined: Segment = jax.tree.map(lambda *parts: concat_slots(parts, batch), *segments)
    return joined


def _resize_segment(segment: Segment, slots: int) -> Segment:
    """Truncate a segment to `slots`, or pad it with empty slots."""
    room = max(slots - segment.position_BS.shape[1], 0)

    def resize(x: jax.Array) -> jax.Array:
        return jnp.pad(x[:, :slots], ((0, 0), (0, room), *[(0, 0)] * (x.ndim - 2)))

    resized: Segment = jax.tree.map(resize, segment)
    inside = jnp.arange(slots) < slots - room
    return resized.replace(position_BS=jnp.where(inside[None], resized.position_BS, EMPTY))
