"""Making caches from caches: branch one, go back, leave out, put together.

Every function is pure and leaves its argument valid. What a token is to the cache is its position,
so to go back or to leave out is to change a few integers: keys and values are shared, not copied.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache, Segment, check_usable
from jaxllm.errors import CacheMismatchError, CapacityError


def fork(cache: KVCache, n: int, *, capacity: int | None = None) -> KVCache:
    """A cache of `n` rows that all go on from this one-row cache, which they share by reference.

    The prefix is stored once, whatever n is; each row gets a tail of its own with `capacity` slots
    (by default what is left of the cache's own). Forks can be forked: take a row with `branch`.

    Raises CacheMismatchError for a cache of several rows, CapacityError for no rows or no slots.
    """
    check_usable(cache)
    if cache.batch != 1:
        raise CacheMismatchError(
            f"fork takes a cache of one row, this one has {cache.batch}: take one with branch"
        )
    capacity = cache.capacity - int(cache.cursor) if capacity is None else capacity
    if n < 1 or capacity < 1:
        raise CapacityError(f"a fork needs rows and slots, got n = {n}, capacity = {capacity}")

    def empty(x: jax.Array) -> jax.Array:
        return jnp.zeros((n, capacity, *x.shape[2:]), x.dtype)

    tail = cache.tail
    return KVCache(
        frozen=cache.segments,
        tail=Segment(
            k=tuple(map(empty, tail.k)),
            v=tuple(map(empty, tail.v)),
            position_BS=jnp.full((n, capacity), -1, jnp.int32),
            token_BS=empty(tail.token_BS),
        ),
        cursor=jnp.zeros((), jnp.int32),
        next_position_B=jnp.broadcast_to(cache.next_position_B, (n,)),
    )


def select(cache: KVCache, rows: Any) -> KVCache:
    """The cache with these rows in this order, int `[R]`; a row may come more than once.

    What all rows share stays shared; the rest is copied. Raises CacheMismatchError for a row that
    the cache does not have.
    """
    check_usable(cache)
    rows = rows if isinstance(rows, jax.Array) else np.asarray(rows, np.int32)
    if not isinstance(rows, jax.core.Tracer) and (rows.min() < 0 or rows.max() >= cache.batch):
        raise CacheMismatchError(f"rows {rows.tolist()} of a cache of {cache.batch} rows")

    def take(x: jax.Array) -> jax.Array:
        return x if x.shape[0] == 1 and cache.batch > 1 else jnp.take(x, rows, axis=0)

    def shared_or_taken(segment: Segment) -> Segment:
        if segment.k[0].shape[0] > 1:
            return jax.tree.map(take, segment)
        own = segment.position_BS.shape[0] > 1
        return segment.replace(position_BS=take(segment.position_BS)) if own else segment

    return KVCache(
        frozen=tuple(map(shared_or_taken, cache.frozen)),
        tail=jax.tree.map(take, cache.tail),
        cursor=cache.cursor,
        next_position_B=jnp.take(cache.next_position_B, rows),
    )


def branch(cache: KVCache, row: int) -> KVCache:
    """One row as a cache of its own. Raises CacheMismatchError for a row that is not there."""
    return select(cache, [row])


def rewind(cache: KVCache, n: Any) -> KVCache:
    """The cache as it was `n` positions ago, a number or one a row `[B]`.

    Equal to never having committed what came since; the slots can be written again. Keys and
    values are shared with `cache`. Raises CapacityError for more positions than there are.
    """
    check_usable(cache)
    n_B = jnp.broadcast_to(jnp.asarray(n, jnp.int32), (cache.batch,))
    next_B = cache.next_position_B - n_B
    if not isinstance(next_B, jax.core.Tracer) and (int(n_B.min()) < 0 or int(next_B.min()) < 0):
        raise CapacityError(
            f"cannot rewind {n_B.tolist()} of {cache.next_position_B.tolist()} positions"
        )
    kept = [s.position_BS < next_B[:, None] for s in cache.segments]
    return _keep(cache, kept).replace(next_position_B=next_B)


def keep(cache: KVCache, mask_BS: Any) -> KVCache:
    """The cache without the slots where the mask is False; later positions do not move.

    mask_BS: bool `[B or 1, S]` over the slots of all segments in order, as in
    `KVCache.position_BS`. What is left out is never attended to again, but what came after it has
    read it: this is not the same as a text without those tokens. Keys and values are shared.

    Raises CacheMismatchError for a mask of another shape.
    """
    check_usable(cache)
    mask_BS = jnp.asarray(mask_BS)
    sizes = [s.position_BS.shape[1] for s in cache.segments]
    if (
        mask_BS.ndim != 2
        or mask_BS.shape[1] != sum(sizes)
        or mask_BS.shape[0]
        not in (
            1,
            cache.batch,
        )
    ):
        raise CacheMismatchError(
            f"the mask is {mask_BS.shape}, the cache has slots [{cache.batch}, {sum(sizes)}]"
        )
    return _keep(cache, jnp.split(mask_BS.astype(bool), np.cumsum(sizes)[:-1], axis=1))


def compact(cache: KVCache, *, capacity: int | None = None) -> KVCache:
    """The same tokens at the same positions, gathered into one tail without gaps.

    capacity: of the new cache; by default all slots that `cache` has. What was shared is copied.
    Logits are those of `cache`: attention does not depend on where a slot lies.

    Raises CapacityError if the tokens do not fit.
    """
    check_usable(cache)
    position_BS = cache.position_BS
    capacity = position_BS.shape[1] if capacity is None else capacity
    length_B = cache.length_B
    if not isinstance(length_B, jax.core.Tracer) and int(length_B.max()) > capacity:
        raise CapacityError(f"{int(length_B.max())} tokens do not fit into {capacity} slots")
    last = jnp.iinfo(jnp.int32).max
    order_BS = jnp.argsort(jnp.where(position_BS < 0, last, position_BS), axis=1)[:, :capacity]

    def gather(*parts: jax.Array) -> jax.Array:
        whole = [jnp.broadcast_to(x, (cache.batch, *x.shape[1:])) for x in parts]
        index = order_BS.reshape(order_BS.shape + (1,) * (parts[0].ndim - 2))
        found = jnp.take_along_axis(jnp.concatenate(whole, axis=1), index, axis=1)
        room = capacity - found.shape[1]
        return jnp.pad(found, ((0, 0), (0, room), *[(0, 0)] * (found.ndim - 2)))

    tail = jax.tree.map(gather, *cache.segments)
    filled = jnp.arange(capacity, dtype=jnp.int32)[None] < length_B[:, None]
    return KVCache(
        frozen=(),
        tail=tail.replace(position_BS=jnp.where(filled, tail.position_BS, -1)),
        cursor=length_B.max(),
        next_position_B=cache.next_position_B,
    )


def _keep(cache: KVCache, masks: list[jax.Array]) -> KVCache:
    """Empty the slots where a segment's mask is False; slots at the tail's end become free."""
    segments = [
        s.replace(position_BS=jnp.where(mask, s.position_BS, -1))
        for s, mask in zip(cache.segments, masks, strict=True)
    ]
    used_S = (segments[-1].position_BS >= 0).any(axis=0)
    slot_S = jnp.arange(1, used_S.shape[0] + 1, dtype=jnp.int32)
    return cache.replace(
        frozen=tuple(segments[:-1]),
        tail=segments[-1],
        cursor=jnp.where(used_S, slot_S, 0).max(),
    )
