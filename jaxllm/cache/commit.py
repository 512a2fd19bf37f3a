"""`commit`: writes a delta's tokens to a cache, from the tail's cursor on.

From Python, room is checked first; compiled programs check it before they start.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import (
    Delta,
    KVCache,
    Segment,
    TreeDelta,
    cast_delta,
    check_delta,
    check_usable,
    merge_labels,
)
from jaxllm.cache.tree import select_path
from jaxllm.errors import CacheMismatchError, CapacityError, TokenError
from jaxllm.ops.recurrent import Pending, advance
from jaxllm.ops.slot_update import update_window, write_at_cursor


def commit(cache: KVCache, delta: Delta, node: Any = None, *, donate: bool = False) -> KVCache:
    """Return the cache with the delta's tokens written at its cursor.

    Of a tree's delta, it writes the path to `node`, a number or one per row `[B]`.

    Trailing columns in which every row is padding take no slots. `cache` stays valid, at the cost
    of a copy of its tail (never of its frozen segments). With `donate=True` the write is in place
    and `cache` must not be used again.

    Inside `jit`, where nothing can be raised, tokens that do not fit are dropped, and no slot that
    was written before changes.

    Raises:
        CapacityError: The tokens do not fit.
        CacheMismatchError: The delta belongs to a cache of another shape or of other edits, or
            `cache` was donated.
        TokenError: There is no such node, or the delta is not a tree's.
    """
    if node is not None:
        if not isinstance(delta, TreeDelta):
            raise TokenError("node selects a path of a tree's delta, forward(..., parents=...)")
        check_usable(cache)
        delta = select_path(delta, node, cache.next_position_B)
    check_delta(delta)
    check_fits(cache, delta.position_BS)
    _check_match(cache, delta)
    edits_B = merge_labels(cache.edits_B, delta.edits_B)
    frozen, grown = cache.frozen, cache.replace(frozen=(), edits_B=None)
    # Frozen segments stay out of the compiled call, which would copy them.
    step = _commit_in_place if donate else _commit
    return step(grown, delta.replace(edits_B=None)).replace(frozen=frozen, edits_B=edits_B)


def apply_delta(cache: KVCache, delta: Delta, wait_for: tuple[jax.Array, ...] = ()) -> KVCache:
    """Commit without checks, inside compiled programs.

    Args:
        wait_for: Arrays that must be computed before the write.
    """
    used = (delta.position_BS >= 0).any(axis=0)
    columns = jnp.max(jnp.where(used, jnp.arange(1, used.shape[0] + 1, dtype=jnp.int32), 0))
    write = cache.writer or write_at_cursor
    written = write(cache.cursor, cache.tail, cast_delta(delta, cache.tail), wait_for)
    return cache.replace(
        tail=written,
        cursor=cache.cursor + columns,
        next_position_B=jnp.maximum(cache.next_position_B, delta.position_BS.max(axis=1) + 1),
        state=commit_state(delta.state, delta.position_BS, wait_for),
    )


def commit_state(
    state: tuple[Any, ...], position_BT: jax.Array, wait_for: tuple[jax.Array, ...] = ()
) -> tuple[Any, ...]:
    """Return `KVCache.state` after tokens at these positions (-1: none).

    Args:
        state: `Delta.state`.
        wait_for: As for `ops.slot_update.write_at_cursor`.
    """
    return tuple(advance(x, position_BT, wait_for) if isinstance(x, Pending) else x for x in state)


_commit = jax.jit(apply_delta)
_commit_in_place = jax.jit(apply_delta, donate_argnums=0)


def to_cache_slots(mass_XBS: jax.Array, tail: KVCache, new: int) -> jax.Array:
    """Map attention mass over slots and `new` tokens, `[..., B, S + T]`, to slots, `[..., B, S]`.

    The new tokens' share moves to the tail slots that `commit` gives them. Frozen slots come first,
    whether or not `tail` contains them.
    """
    if mass_XBS.ndim > 2:
        return jax.vmap(lambda mass: to_cache_slots(mass, tail, new))(mass_XBS)
    mass_BS, new_BT = mass_XBS[:, :-new], mass_XBS[:, -new:]
    own_BS = update_window(jnp.zeros_like(mass_BS[:, -tail.capacity :]), new_BT, tail.cursor)
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
            " used. Make a cache of larger capacity"
        )


def _check_match(cache: KVCache, delta: Delta) -> None:
    state = tuple(x.state if isinstance(x, Pending) else x for x in delta.state)
    structure: Any = jax.tree.structure(cache.state)
    if structure != jax.tree.structure(state):
        raise CacheMismatchError("the delta's state does not have the structure of the cache's")

    def signature(segment: Segment) -> tuple[int, tuple[int, ...]]:
        shape = segment.k[0].shape
        return len(segment.k), (shape[0], *shape[2:])

    if signature(cache.tail) != signature(delta):
        raise CacheMismatchError(
            "delta and cache differ in (layers, (rows, kv heads, head dim)): got"
            f" {signature(delta)}, expected {signature(cache.tail)}"
        )
