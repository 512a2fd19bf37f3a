"""`commit`, the one place where a cache grows: a delta's tokens, from the tail's cursor on.

Checked where numbers are known, from Python; compiled programs have checked the room before.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import Delta, KVCache, Segment, cast_like, check_delta, check_usable
from jaxllm.cache.write import at_cursor, window_at_cursor
from jaxllm.errors import CacheMismatchError, CapacityError


def commit(cache: KVCache, delta: Delta, *, donate: bool = False) -> KVCache:
    """The cache with the delta's tokens written at its cursor.

    Trailing columns in which every row is padding take no slots. `cache` stays valid, at the cost
    of a copy of its tail (never of its frozen segments); with `donate=True` the write is in place
    and `cache` must not be used again.

    Raises CapacityError when the tokens do not fit, CacheMismatchError when the delta belongs to a
    cache of another shape, or when `cache` was donated before. Inside `jit`, where nothing can be
    raised, tokens that do not fit are dropped and no slot that was written before changes.
    """
    check_delta(delta)
    check_fits(cache, delta.position_BS)
    _check_match(cache, delta)
    frozen, grown = cache.frozen, cache.replace(frozen=())
    # The frozen segments stay out of the compiled call: what goes through it comes back copied.
    step = _commit_in_place if donate else _commit
    return step(grown, delta).replace(frozen=frozen)


def unchecked_commit(cache: KVCache, delta: Delta, after: tuple[jax.Array, ...] = ()) -> KVCache:
    """`commit` without its checks, for use inside compiled programs; after: see `at_cursor`."""
    used = (delta.position_BS >= 0).any(axis=0)
    columns = jnp.max(jnp.where(used, jnp.arange(1, used.shape[0] + 1, dtype=jnp.int32), 0))
    write = cache.writer or at_cursor
    written = write(cache.cursor, cache.tail, cast_like(delta, cache.tail), after)
    return cache.replace(
        tail=written,
        cursor=cache.cursor + columns,
        next_position_B=jnp.maximum(cache.next_position_B, delta.position_BS.max(axis=1) + 1),
        memory=delta.memory,
    )


_commit = jax.jit(unchecked_commit)
_commit_in_place = jax.jit(unchecked_commit, donate_argnums=0)


def settle(mass_XBS: jax.Array, tail: KVCache, new: int) -> jax.Array:
    """Attention mass over all slots and `new` tokens, `[..., B, S + T]`, by slots: `[..., B, S]`.

    The new tokens' share moves to the slots of the tail that `commit` gives them; frozen slots come
    first, whether `tail` has them or not.
    """
    if mass_XBS.ndim > 2:
        return jax.vmap(lambda mass: settle(mass, tail, new))(mass_XBS)
    mass_BS, new_BT = mass_XBS[:, :-new], mass_XBS[:, -new:]
    own_BS = window_at_cursor(jnp.zeros_like(mass_BS[:, -tail.capacity :]), new_BT, tail.cursor)
    return mass_BS.at[:, -tail.capacity :].add(own_BS)


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
    kept: Any = jax.tree.structure(cache.memory)
    if kept != jax.tree.structure(delta.memory):
        raise CacheMismatchError("the delta's memory is not of the cache's form")

    def form(segment: Segment) -> tuple[int, tuple[int, ...]]:
        shape = segment.k[0].shape
        return len(segment.k), (shape[0], *shape[2:])

    if form(cache.tail) != form(delta):
        raise CacheMismatchError(
            "the delta is of (layers, (rows, kv heads, head dim))"
            f" {form(delta)}, the cache of {form(cache.tail)}"
        )
