"""Cache edits: rewind, cull, compact, move, replace.

Every function is pure and leaves its argument valid. A token is identified by its position, so
rewinding or culling changes a few integers and shares all keys and values. Ranges are of positions,
`start` to before `stop`, integers or one per row `[B]`; anything else raises TokenError.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import (
    EMPTY,
    MAX_SLOTS,
    Delta,
    KVCache,
    Segment,
    cast_delta,
    check_delta,
    check_no_state,
    check_usable,
    cull_mark,
    merge_labels,
)
from jaxllm.cache.state_rewind import Mark, check_mark, rewind_state
from jaxllm.config.model import Rope
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.ops import Entries, cast, dequantize, rerotate
from jaxllm.ops.kv_quant import concat_slots
from jaxllm.ops.slot_update import write_slots
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int, check_int_array

INT32 = np.iinfo(np.int32)


def rewind(cache: KVCache, n: Any = None, *, to: Any = None) -> KVCache:
    """Return the cache as it was `n` positions ago, or when each row's next position was `to`.

    The result equals a cache to which the later tokens were never committed; their slots can be
    written again. Keys and values are shared with `cache`. A recurrent layer's state is rewound to
    any position since the last multiple of 64, exactly, and to 0. A memory of segments is rewound
    within the current one, exactly to its start and otherwise up to the rounding of the cache's
    dtype. A `mark` takes any state back, exactly.

    Args:
        n, to: An integer, or one per row `[B]`. `to` can also be a `Mark` of this text.

    Raises:
        CapacityError: A position is before the first or after the last.
        CacheMismatchError: The cache has a state that cannot be rewound so far, or its text does
            not continue the mark's.
    """
    check_usable(cache)
    if (n is None) == (to is None):
        raise CapacityError("rewind needs either n (how many positions) or to (which position)")
    old_B = cache.next_position_B
    rows, place = cache.batch, to if isinstance(to, Mark) else None
    if place is not None:
        check_mark(cache, place)
        place = jax.tree.map(jnp.copy, place)  # steps may donate the arrays of the result
        to = place.next_position_B
    next_B = old_B - _to_int32("n", n, rows) if to is None else _to_int32("to", to, rows)
    next_B = jnp.broadcast_to(next_B, old_B.shape)
    if _is_concrete(next_B, old_B) and (int(next_B.min()) < 0 or bool((next_B > old_B).any())):
        raise CapacityError(f"cannot rewind from positions {old_B.tolist()} to {next_B.tolist()}")
    state = rewind_state(cache, next_B) if place is None else place.state

    def rewind_positions(position_BS: jax.Array) -> jax.Array:
        was_BS = jnp.where(position_BS < EMPTY, cull_mark(position_BS), position_BS)
        return jnp.where(was_BS < next_B[:, None], position_BS, EMPTY)

    back = _with_positions(cache, [rewind_positions(s.position_BS) for s in cache.segments])
    used_S = (back.tail.position_BS != EMPTY).any(axis=0)
    slot_S = jnp.arange(1, used_S.shape[0] + 1, dtype=jnp.int32)
    cursor = jnp.where(used_S, slot_S, 0).max()
    return back.replace(next_position_B=next_B, cursor=cursor, state=state)


def keep(cache: KVCache, mask_BS: Any) -> KVCache:
    """Cull the tokens where the mask is False; the positions of other tokens do not change.

    Culled tokens are never attended to again, but later tokens have attended to them: this is not
    the cache of a text without those tokens. Keys and values are shared; `compact` frees the slots.

    Args:
        mask_BS: bool `[B or 1, S]` over the slots of all segments in order, as in
            `KVCache.position_BS`.

    Raises:
        CacheMismatchError: The mask has another shape, or the cache has a memory, from which no
            token can be removed.
    """
    check_usable(cache)
    check_no_state(cache, "keep")
    return keep_slots(cache, mask_BS)


def keep_slots(cache: KVCache, mask_BS: Any) -> KVCache:
    """Cull keys and values as `keep`, but leave a memory unchanged."""
    mask_BS = _as_mask(mask_BS)
    if mask_BS.shape not in ((1, cache.slots), (cache.batch, cache.slots)):
        raise CacheMismatchError(
            f"mask has shape {mask_BS.shape}, expected ({cache.batch}, {cache.slots})"
        )
    return _with_positions(
        cache,
        [
            jnp.where(mask | (s.position_BS < 0), s.position_BS, cull_mark(s.position_BS))
            for s, mask in zip(cache.segments, _split_slots(cache, mask_BS), strict=True)
        ],
    )


def drop_range(cache: KVCache, start: Any, stop: Any) -> KVCache:
    """Cull the tokens at positions `start` to before `stop`; see `keep`."""
    check_usable(cache)
    check_no_state(cache, "drop_range")
    rows = cache.batch
    inside = [_range_mask(s.position_BS, start, stop, rows) for s in cache.segments]
    return _with_positions(
        cache,
        [
            jnp.where(drop, cull_mark(s.position_BS), s.position_BS)
            for s, drop in zip(cache.segments, inside, strict=True)
        ],
    )


def compact(cache: KVCache, *, capacity: int | None = None) -> KVCache:
    """Gather the tokens into one tail without gaps, at unchanged positions.

    Shared segments are copied, a memory stays. Logits do not change: attention does not depend on
    slot numbers. Arrays over slots, such as attention mass, can be gathered with
    `jnp.take_along_axis(mass, slot_order(cache), 1)`.

    Args:
        capacity: Slots of the new cache; default: all slots of `cache`.

    Raises:
        CapacityError: The tokens do not fit.
    """
    check_usable(cache)
    most = cache.slots if capacity is None else capacity
    capacity = check_int("a cache's capacity", most, 1, MAX_SLOTS, CapacityError)
    length_B = cache.length_B
    if _is_concrete(length_B) and int(length_B.max()) > capacity:
        raise CapacityError(f"{int(length_B.max())} tokens do not fit into {capacity} slots")
    tail = gather_slots(cache.segments, slot_order(cache)[:, :capacity], capacity)
    filled = jnp.arange(capacity, dtype=jnp.int32)[None] < length_B[:, None]
    return cache.replace(
        frozen=(),
        tail=tail.replace(position_BS=jnp.where(filled, tail.position_BS, EMPTY)),
        cursor=length_B.max(),
    )


def slot_order(cache: KVCache) -> jax.Array:
    """Return the slots of each row sorted by position, empty ones last, int32 `[B, S]`."""
    check_usable(cache)
    position_BS = cache.position_BS
    order_BS = jnp.argsort(jnp.where(position_BS < 0, INT32.max, position_BS), axis=1, stable=True)
    return order_BS.astype(jnp.int32)


def shift(cache: KVCache, by: Any, start: Any = 0, stop: Any = None) -> KVCache:
    """Move the tokens at positions `start` to before `stop` (None: the end) by `by` positions.

    Keys are rotated by the difference in float32 and rounded once; everything else keeps its bits.
    Keys of the first layer then equal those of a run at the new positions; those of deeper layers
    do so only if the whole text moves, and if no query grows with its position (Ministral 3).

    Args:
        by: An integer, or one per row.

    Raises:
        ConfigError: Keys are not rotated (learned positions), or rotated by angles that follow the
            text's length (`dynamic_inputs`), or attention segments would change
            (`LongAttention.period`).
        TokenError: Two tokens would share a position, or one would exceed the position limits.
    """
    check_usable(cache)
    end_B = cache.next_position_B
    stop_B = end_B if stop is None else _to_int32("stop", stop, cache.batch)
    by_B = _to_int32("by", by, cache.batch)
    is_uniform = all(np.ndim(x) == 0 for x in (by, start, 0 if stop is None else stop))
    moved = []
    for segment in cache.segments:
        inside = _range_mask(
            segment.position_BS, start, None if stop is None else stop_B, cache.batch
        )
        moved.append(segment.position_BS + jnp.where(inside, _to_column(by_B), 0))
    next_B = end_B + jnp.where((stop_B >= end_B) & (jnp.asarray(start) < end_B), by_B, 0)
    return _move_tokens(cache, moved, next_B, is_uniform)


def close_gaps(cache: KVCache) -> KVCache:
    """Renumber each row's tokens 0, 1, 2, ... in order, and rotate the keys accordingly.

    As StreamingLLM does with the tokens that it keeps (Xiao et al. 2024, section 3.2). Raises as
    `shift`.
    """
    check_usable(cache)
    order_BS = slot_order(cache)
    rank_BS = jnp.argsort(order_BS, axis=1).astype(jnp.int32)
    position_BS = jnp.where(cache.position_BS >= 0, rank_BS, cache.position_BS)
    return _move_tokens(cache, _split_slots(cache, position_BS), cache.length_B, cache.batch == 1)


def find_slots(cache: KVCache, positions_BT: Any) -> jax.Array:
    """Return the slots that hold these positions, int32 `[B, T]`; -1 if there is none."""
    check_usable(cache)
    position_BS = cache.position_BS
    positions_BT = _to_int32("positions", positions_BT)
    if positions_BT.ndim != 2 or positions_BT.shape[0] not in (1, cache.batch):
        raise TokenError(f"positions must have shape [{cache.batch}, T], got {positions_BT.shape}")
    equal_BTS = (position_BS[:, None] == positions_BT[:, :, None]) & (positions_BT >= 0)[:, :, None]
    return jnp.where(equal_BTS.any(axis=2), equal_BTS.argmax(axis=2).astype(jnp.int32), -1)


def patch(cache: KVCache, slot_BT: Any, delta: Delta) -> KVCache:
    """Replace the entries in slots `slot_BT` with the delta's, including token ids and positions.

    Args:
        slot_BT: int `[B, T]` over the slots of all segments in order, as from `find_slots`. A
            negative
            slot, or padding in the delta, changes nothing. A patched segment that rows share is
            copied for each row; other segments stay shared.

    Raises:
        CacheMismatchError: Slots or delta have another shape, a slot is empty, or the cache has a
            memory, or cache and delta were computed under different edits.
        TokenError: Two tokens would share a position.
    """
    check_usable(cache)
    check_no_state(cache, "patch")
    check_delta(delta)
    slot_BT = _to_int32("slots", slot_BT)
    if slot_BT.shape != delta.position_BS.shape or slot_BT.shape[0] != cache.batch:
        raise CacheMismatchError(
            f"slots have shape {slot_BT.shape}, expected that of the delta,"
            f" {delta.position_BS.shape}, with the cache's {cache.batch} rows"
        )
    slot_BT = jnp.where(delta.position_BS >= 0, slot_BT, -1)
    _check_slots(cache, slot_BT)
    first, segments = 0, []
    for segment in cache.segments:
        size = segment.position_BS.shape[1]
        inside = (slot_BT >= first) & (slot_BT < first + size)
        if not _is_concrete(inside) or bool(inside.any()):
            segment = _patch_segment(segment, jnp.where(inside, slot_BT - first, size), delta)
        segments.append(segment)
        first += size
    end_B = jnp.where(slot_BT >= 0, delta.position_BS + 1, 0).max(axis=1)
    next_B = jnp.maximum(cache.next_position_B, end_B)
    edits_B = cache.edits_B
    if delta.edits_B is not None:
        edits_B = merge_labels(edits_B, delta.edits_B)
    patched = _with_segments(cache, segments, next_position_B=next_B, edits_B=edits_B)
    _check_distinct(patched.position_BS)
    return patched


@jax.jit
def _patch_segment(segment: Segment, index_BT: jax.Array, delta: Delta) -> Segment:
    new = cast_delta(delta, segment).replace(patched_BS=jnp.ones_like(delta.patched_BS))
    return write_slots(segment, new, index_BT)


@partial(jax.jit, static_argnums=2)
def gather_slots(segments: tuple[Segment, ...], order_BS: jax.Array, slots: int) -> Segment:
    """Return the slots in this order as one segment, followed by empty slots."""
    room = max(slots - order_BS.shape[1], 0)

    def gather(*parts: jax.Array) -> jax.Array:
        index = order_BS.reshape(order_BS.shape + (1,) * (parts[0].ndim - 2))
        gathered = jnp.take_along_axis(concat_slots(parts, order_BS.shape[0]), index, axis=1)
        return jnp.pad(gathered, ((0, 0), (0, room), *[(0, 0)] * (gathered.ndim - 2)))

    gathered: Segment = jax.tree.map(gather, *segments)
    return gathered


def _move_tokens(
    cache: KVCache, positions: Sequence[jax.Array], next_B: jax.Array, same_shift: bool
) -> KVCache:
    """Move tokens to other positions and rotate their keys by the difference.

    same_shift: whether a slot that rows share moves by the same amount in all of them.
    """
    segments = []
    for segment, position_BS in zip(cache.segments, positions, strict=True):
        by_BS = jnp.where(segment.position_BS >= 0, position_BS - segment.position_BS, 0)
        if same_shift and segment.k[0].shape[0] == 1:
            most, least = by_BS.max(axis=0, keepdims=True), by_BS.min(axis=0, keepdims=True)
            by_BS = jnp.where(most > 0, most, least)  # 0 in rows without the token
        if not _is_concrete(by_BS) or bool((by_BS != 0).any()):
            ropes = movable_ropes(cache, by_BS)
            k = rerotate_keys(segment.k, by_BS, ropes)
            segment = segment.replace(k=k, position_BS=position_BS)
        segments.append(segment)
    moved = _with_segments(cache, segments, next_position_B=next_B)
    _check_positions(cache, moved)
    return moved


Ropes = tuple[Rope | None, ...]  # one per layer of an array of keys


def rerotate_heads(x_BSKH: jax.Array, by_BS: jax.Array, ropes: Ropes) -> jax.Array:
    """Rotate each layer's heads of an array of keys by its own rotary settings; float32."""
    rotated = x_BSKH = x_BSKH.astype(jnp.float32)
    for rope in dict.fromkeys(rope for rope in ropes if rope is not None):
        own_K = np.repeat([rope == one for one in ropes], x_BSKH.shape[2] // len(ropes))
        turned = rerotate(x_BSKH, by_BS, rope, head_dim=x_BSKH.shape[-1])
        rotated = turned if own_K.all() else jnp.where(own_K[None, None, :, None], turned, rotated)
    return rotated


@partial(jax.jit, static_argnums=2)
def rerotate_keys(
    keys: tuple[Entries, ...], by_BS: jax.Array, ropes: tuple[Ropes, ...]
) -> tuple[Entries, ...]:
    def rotate_array(k: Entries, ropes: Ropes) -> Entries:
        if not any(ropes):
            return k
        k_float = dequantize(k)
        new = cast(rerotate_heads(k_float, by_BS, ropes), k.dtype)
        turns_K = np.repeat([rope is not None for rope in ropes], k_float.shape[2] // len(ropes))
        moved_BSK = (by_BS != 0)[:, :, None] & turns_K[None, None]

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(moved_BSK.reshape(moved_BSK.shape + (1,) * (old.ndim - 3)), new, old)

        turned: Entries = jax.tree.map(choose, new, k)
        return turned

    return tuple(rotate_array(*of) for of in zip(keys, ropes, strict=True))


def movable_ropes(cache: KVCache, by: Any) -> tuple[Ropes, ...]:
    """Return the rotary settings of each array of keys, to move tokens by `by` positions.

    Raises ConfigError if keys cannot be rotated to other positions, or if a layer's attention would
    assign moved tokens to other segments.
    """
    config = cache.config
    for kind in set(map(config.attention_kind, range(config.num_hidden_layers))):
        if kind is None or (period := kind.period) == 1:
            continue
        if period and _is_concrete(by) and not (np.asarray(by) % period).any():
            continue
        said = f"can only move by multiples of {period} positions" if period else "cannot move"
        raise ConfigError(
            f"attention of kind {kind.kind!r} divides the text into segments by position, so cached"
            f" tokens {said}. Run the tokens again at their new positions"
        )
    if config.learns_positions:
        raise ConfigError(
            f"{config.model_type} has learned position embeddings, which are mixed into its keys:"
            " cached tokens cannot move. Run the tokens again at their new positions"
        )
    if config.rope_depends_on_length:
        raise ConfigError(
            "rotary angles that follow the text's length (dynamic, longrope): cached keys cannot be"
            " rotated to other positions"
        )
    return tuple(
        tuple(None if i is None else config.layer_rope(i) for i in numbers)
        for numbers in cache.array_layers
    )


def _check_positions(before: KVCache, after: KVCache) -> None:
    position_BS = after.position_BS
    if not _is_concrete(position_BS):
        return
    live = to_host(before.position_BS) >= 0
    positions = to_host(position_BS)[live]
    limit = after.config.position_limit
    if positions.size and (positions.min() < 0 or positions.max() >= limit):
        wrong = positions.min() if positions.min() < 0 else positions.max()
        raise TokenError(f"a token would move to {wrong}; positions run from 0 to {limit - 1}")
    _check_distinct(position_BS)


def _check_distinct(position_BS: jax.Array) -> None:
    """Raise TokenError if two tokens of a row have one position."""
    if not _is_concrete(position_BS):
        return
    for row, position_S in enumerate(to_host(position_BS)):
        unique, count = np.unique(position_S[position_S >= 0], return_counts=True)
        if (count > 1).any():
            raise TokenError(f"row {row} would have two tokens at position {unique[count > 1][0]}")


def _check_slots(cache: KVCache, slot_BT: jax.Array) -> None:
    if not _is_concrete(slot_BT, cache.cursor):
        return
    position_BS = to_host(cache.position_BS)
    for row, slots in enumerate(np.asarray(slot_BT)):
        slots = slots[slots >= 0]
        if slots.size and slots.max() >= cache.slots:
            raise CacheMismatchError(
                f"slot {slots.max()} out of range: the cache has {cache.slots} slots"
            )
        if len(set(slots.tolist())) < slots.size:
            raise CacheMismatchError(f"row {row}: a slot is patched twice")
        empty = slots[position_BS[row, slots] == EMPTY]
        if empty.size:
            raise CacheMismatchError(
                f"slot {empty[0]} of row {row} is empty. To add a token, use commit"
            )


def _with_positions(cache: KVCache, positions: Sequence[jax.Array]) -> KVCache:
    segments = [s.replace(position_BS=p) for s, p in zip(cache.segments, positions, strict=True)]
    return _with_segments(cache, segments)


def _with_segments(cache: KVCache, segments: Sequence[Segment], **changed: Any) -> KVCache:
    *frozen, tail = segments
    return cache.replace(frozen=tuple(frozen), tail=tail, **changed)


def _split_slots(cache: KVCache, x_BS: jax.Array) -> list[jax.Array]:
    """Split an array over all slots into one per segment."""
    sizes = [s.position_BS.shape[1] for s in cache.segments]
    return jnp.split(x_BS, np.cumsum(sizes)[:-1], axis=1)


def _range_mask(position_BS: jax.Array, start: Any, stop: Any, rows: int) -> jax.Array:
    """Return which slots hold a token in the range; stop None: no upper limit."""
    inside = (position_BS >= 0) & (position_BS >= _to_column(_to_int32("start", start, rows)))
    if stop is None:
        return inside
    return inside & (position_BS < _to_column(_to_int32("stop", stop, rows)))


def _to_column(x: jax.Array) -> jax.Array:
    """Reshape a scalar to `[1, 1]`, or one per row to `[B, 1]`."""
    return x.reshape(-1, 1)


def _as_mask(mask: Any) -> jax.Array:
    """Return a mask as an array. Raises CacheMismatchError unless it is bool."""
    if not isinstance(mask, jax.Array):
        try:
            mask = np.asarray(mask)
        except ValueError:
            raise CacheMismatchError(f"mask has ragged rows: {mask!r:.60}") from None
    if mask.dtype != bool:
        raise CacheMismatchError(
            f"mask must be bool (True: keep), got {mask.dtype}. Compare first, as in mass > 0"
        )
    return jnp.asarray(mask)


def _to_int32(name: str, x: Any, rows: int | None = None) -> jax.Array:
    """Return x as int32; if `rows` is given, x must be a scalar or have one entry per row.

    Raises TokenError, with the name, for anything else.
    """
    if not isinstance(x, jax.Array):
        x = check_int_array(name, x, TokenError)
        if x.size and (x.min() < -INT32.max or x.max() > INT32.max):
            raise TokenError(f"{name} must fit into 32 bits, got {x.min()} to {x.max()}")
    elif not jnp.issubdtype(x.dtype, jnp.integer):
        raise TokenError(f"{name} must be integers, got {x.dtype}")
    if rows is not None and x.shape not in ((), (1,), (rows,)):
        raise TokenError(f"{name} must be a scalar or one per row, [{rows}]; got shape {x.shape}")
    return jnp.asarray(x, jnp.int32)


def _is_concrete(*arrays: jax.Array) -> bool:
    return not any(isinstance(x, jax.core.Tracer) for x in arrays)
