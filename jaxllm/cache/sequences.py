"""Sequences as llama.cpp keeps them, in a cache whose rows are the sequences.

The state is a `KVCache`: row s is sequence s, with slots of its own in the tail, and one frozen
segment of single rows holds what several sequences share: such a slot has the same position in
every row that has it, as llama.cpp's cell has a set of sequences. Any empty slot can be written
next, so what one sequence frees it can use again, and none takes room from another. The shapes
never change: no operation makes a program for a new number of segments.

By reference: a copied range is moved into the shared slots once, when it is first copied; from then
on every copy changes a few integers. Every function here is pure; its errors leave nothing changed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.cache.kv import (
    EMPTY,
    MOST_SLOTS,
    KVCache,
    Segment,
    check_no_memory,
    check_usable,
    init_cache,
)
from jaxllm.cache.surgery import gather_slots, movable_ropes, turn_keys
from jaxllm.cache.write import NOWHERE, at_slots
from jaxllm.config import ModelConfig
from jaxllm.errors import CacheMismatchError, CapacityError, TokenError
from jaxllm.shapes import power_of_two
from jaxllm.whole import whole


class Positions(NamedTuple):
    """Who has what where, on the host: int32 `[sequences, slots]`, negative where a row has none.

    own_BS: of the tail. shared_BN: of the shared slots (none: N = 0).
    """

    own_BS: np.ndarray
    shared_BN: np.ndarray

    @property
    def next_B(self) -> np.ndarray:
        """Where each sequence goes on: after its last position, at 0 where it is empty."""
        each = [x.max(axis=1, initial=EMPTY) for x in self]
        last_B: np.ndarray = np.maximum(*each)
        return last_B + 1

    @property
    def holders_N(self) -> np.ndarray:
        """How many sequences have each shared slot."""
        return np.asarray((self.shared_BN >= 0).sum(axis=0))


def init_sequences(
    config: ModelConfig,
    sequences: int,
    capacity: int,
    *,
    shared: int | None = None,
    dtype: str | None = None,
) -> KVCache:
    """Empty sequences 0, 1, ... with `capacity` slots each, and `shared` slots for what they share.

    shared: by default as many as one sequence has; 0 for none, then nothing can be copied. dtype:
    as for `init_cache`. Raises what `init_cache` raises, CapacityError for a negative `shared`.
    """
    cache = init_cache(config, sequences, capacity, dtype=dtype)
    shared = capacity if shared is None else shared
    shared = whole("shared", shared, 0, MOST_SLOTS, CapacityError)
    if not shared:
        return cache
    pool = init_cache(config, 1, shared, dtype=dtype).tail
    position_BN = np.full((sequences, shared), EMPTY, np.int32)
    return cache.replace(frozen=(pool.replace(position_BS=jax.device_put(position_BN)),))


def positions_of(state: KVCache) -> Positions:
    """The positions of all slots, read from the device.

    Raises CacheMismatchError for a cache that is not of this form, or was donated.
    """
    check_usable(state)
    check_no_memory(state, "sequences")
    pool = state.frozen[0] if state.frozen else None
    if len(state.frozen) > 1 or (pool and pool.position_BS.shape[0] != state.batch):
        raise CacheMismatchError(
            "sequences need a cache with at most one segment that rows share: make it with"
            " init_sequences"
        )
    none = np.zeros((state.batch, 0), np.int32)
    return Positions(np.array(state.tail.position_BS), np.array(pool.position_BS) if pool else none)


def with_positions(state: KVCache, now: Positions) -> KVCache:
    """The state with these positions; what follows from them is kept in step."""
    used = np.flatnonzero((now.own_BS >= 0).any(axis=0))
    cursor = np.array(used[-1] + 1 if used.size else 0, np.int32)
    own, shared, cursor, next_B = jax.device_put((*now, cursor, now.next_B.astype(np.int32)))
    return state.replace(
        frozen=tuple(pool.replace(position_BS=shared) for pool in state.frozen),
        tail=state.tail.replace(position_BS=own),
        cursor=cursor,
        next_position_B=next_B,
    )


def copy_sequence(
    state: KVCache,
    source: int,
    target: int,
    start: int = 0,
    stop: int | None = None,
    *,
    donate: bool = False,
) -> KVCache:
    """Give `target` what `source` has at positions `start` to before `stop`, by reference.

    What `source` had for itself moves to the shared slots, once. donate: write them in place.

    Raises CapacityError without shared slots enough, TokenError for an unknown sequence or where
    `target` has a token at one of these positions.
    """
    now = positions_of(state)
    _check(state, source, target)
    if source == target:
        return state
    own_S, shared_N = now.own_BS[source], now.shared_BN[source]
    moving = np.flatnonzero(_inside(own_S, start, stop))
    copied = [own_S[moving], shared_N[_inside(shared_N, start, stop)]]
    taken = np.intersect1d(np.concatenate(copied), np.concatenate([x[target] for x in now]))
    if taken.size:
        raise TokenError(f"sequence {target} already has a token at position {taken[0]}")
    free = np.flatnonzero(now.holders_N == 0)
    if moving.size > free.size:
        raise CapacityError(
            f"{moving.size} tokens are to be shared, {free.size} shared slots are empty: remove a"
            " sequence, defragment, or make the state with more of them"
        )
    free = free[: moving.size]
    if moving.size:
        pool = _poured(state.frozen[0], state.tail, 0, free, source, moving, donate=donate)
        state = state.replace(frozen=(pool,))
        shared_N[free], own_S[moving] = own_S[moving], EMPTY
    given = _inside(shared_N, start, stop)
    now.shared_BN[target, given] = shared_N[given]
    return with_positions(state, now)


def remove_range(
    state: KVCache, sequence: int | None = None, start: int = 0, stop: int | None = None
) -> KVCache:
    """Without the tokens at positions `start` to before `stop` of a sequence (None: of each).

    The slots are free at once; what came after has read what is gone, as in `keep`. A shared slot
    is free when nobody has it. Keys and values are shared with `state`. Raises TokenError for an
    unknown sequence.
    """
    now = positions_of(state)
    if sequence is not None:
        _check(state, sequence)
    rows = slice(None) if sequence is None else slice(sequence, sequence + 1)
    for x in now:
        x[rows] = np.where(_inside(x[rows], start, stop), EMPTY, x[rows])
    return with_positions(state, now)


def keep_sequence(state: KVCache, sequence: int) -> KVCache:
    """Without all sequences but this one. Raises TokenError for an unknown one."""
    now = positions_of(state)
    _check(state, sequence)
    others = np.arange(state.batch) != sequence
    for x in now:
        x[others] = EMPTY
    return with_positions(state, now)


def add_positions(
    state: KVCache, sequence: int, by: int, start: int = 0, stop: int | None = None
) -> KVCache:
    """Move the tokens at positions `start` to before `stop` by `by`; keys are rotated on.

    Other sequences keep what they share: where it moves, this one gets a copy in slots of its own.
    Tokens may meet at one position.

    Raises ConfigError for models whose keys do not rotate, CapacityError without room for such
    copies, TokenError for an unknown sequence or where a token would leave the model.
    """
    by = whole("by", by, -(1 << 62), 1 << 62, TokenError)
    return _renumbered(state, sequence, start, stop, lambda position: position + by)


def divide_positions(
    state: KVCache, sequence: int, divisor: int, start: int = 0, stop: int | None = None
) -> KVCache:
    """Divide the positions from `start` to before `stop`, rounding down (self-extend, Jin et al.
    2024). Otherwise as `add_positions`.
    """
    divisor = whole("divisor", divisor, 1, MOST_SLOTS, TokenError)
    return _renumbered(state, sequence, start, stop, lambda position: position // divisor)


def defragment(state: KVCache) -> KVCache:
    """The same sequences in the first slots, in the order of their positions.

    What only one sequence still has of the shared slots goes back to its own, if there is room.
    Logits stay: attention does not depend on where a slot lies.
    """
    now = positions_of(state)
    for row in range(state.batch):
        lone = np.flatnonzero((now.shared_BN[row] >= 0) & (now.holders_N == 1))
        lone = lone[: np.count_nonzero(now.own_BS[row] < 0)]
        state = _taken_back(state, now, row, lone)
    last = np.iinfo(np.int32).max
    order_BS = np.argsort(np.where(now.own_BS < 0, last, now.own_BS), axis=1, kind="stable")
    own_BS = np.take_along_axis(now.own_BS, order_BS, axis=1)
    tail = gather_slots((state.tail,), order_BS.astype(np.int32), state.capacity)
    frozen, shared_BN = state.frozen, now.shared_BN
    if state.frozen:
        first_N = np.where(now.holders_N == 0, last, shared_BN.max(axis=0))
        order_N = np.argsort(first_N, kind="stable")
        pool = state.frozen[0].replace(position_BS=jax.device_put(shared_BN[:1]))
        frozen = (gather_slots((pool,), order_N[None].astype(np.int32), order_N.size),)
        shared_BN = shared_BN[:, order_N]
    return with_positions(state.replace(tail=tail, frozen=frozen), Positions(own_BS, shared_BN))


def _renumbered(
    state: KVCache,
    row: int,
    start: int,
    stop: int | None,
    move: Callable[[np.ndarray], np.ndarray],
) -> KVCache:
    now, limit = positions_of(state), state.config.position_limit
    _check(state, row)
    lent = np.flatnonzero(_inside(now.shared_BN[row], start, stop) & (now.holders_N > 1))
    state = _taken_back(state, now, row, lent)
    before = Positions(*(x.copy() for x in now))
    for x in now:
        inside = _inside(x[row], start, stop)
        there = move(x[row, inside].astype(np.int64))
        wrong = there[(there < 0) | (there >= limit)]
        if wrong.size:
            raise TokenError(
                f"a token would move to {wrong[0]}; positions run from 0 to {limit - 1}"
            )
        x[row, inside] = there

    by = Positions(*(there - here for there, here in zip(now, before, strict=True)))
    ropes = movable_ropes(state, np.concatenate([x[row] for x in by]))

    def turned(segment: Segment, by_BS: np.ndarray) -> Segment:
        if not by_BS.any():
            return segment
        k = turn_keys(segment.k, jax.device_put(by_BS), ropes, state.config.head_dim)
        return segment.replace(k=k)

    state = state.replace(
        tail=turned(state.tail, by.own_BS),
        frozen=tuple(turned(pool, by.shared_BN[row : row + 1]) for pool in state.frozen),
    )
    return with_positions(state, now)


def _taken_back(state: KVCache, now: Positions, row: int, slots: np.ndarray) -> KVCache:
    """Shared slots of a row copied into its own; `now`, the caller's, is changed accordingly."""
    if not slots.size:
        return state
    free = np.flatnonzero(now.own_BS[row] < 0)
    if slots.size > free.size:
        raise CapacityError(
            f"sequence {row} needs {slots.size} slots of its own for what others share with it,"
            f" {free.size} are empty"
        )
    free = free[: slots.size]
    tail = _poured(state.tail, state.frozen[0], row, free, 0, slots, donate=False)
    now.own_BS[row, free], now.shared_BN[row, slots] = now.shared_BN[row, slots], EMPTY
    return state.replace(tail=tail)


def _poured(
    into: Segment,
    source: Segment,
    into_row: int,
    into_slots: np.ndarray,
    row: int,
    slots: np.ndarray,
    *,
    donate: bool,
) -> Segment:
    """`into` with some slots of `source` in it; positions are the caller's business."""
    width = power_of_two(slots.size)
    padding = (0, width - slots.size)
    step = _POUR_IN_PLACE if donate else _POUR
    position_BS, kept = into.position_BS, into.replace(position_BS=None)
    poured: Segment = step(
        kept,
        source.replace(position_BS=None),
        np.int32(into_row),
        np.pad(into_slots, padding, constant_values=NOWHERE).astype(np.int32),
        np.int32(row),
        np.pad(slots, padding).astype(np.int32),
    )
    return poured.replace(position_BS=position_BS)


def _pour(
    into: Segment, source: Segment, into_row: Any, into_P: Any, row: Any, slot_P: Any
) -> Segment:
    taken = jax.tree.map(lambda x: x[row, slot_P][None], source)
    return at_slots(into, taken, into_P[None], into_row[None])


_POUR = jax.jit(_pour)
_POUR_IN_PLACE = jax.jit(_pour, donate_argnums=0)


def _inside(position: np.ndarray, start: int, stop: int | None) -> np.ndarray:
    start = whole("start", start, -MOST_SLOTS, MOST_SLOTS, TokenError)
    inside: np.ndarray = (position >= 0) & (position >= start)
    if stop is None:
        return inside
    return inside & (position < whole("stop", stop, -MOST_SLOTS, MOST_SLOTS, TokenError))


def _check(state: KVCache, *sequences: int) -> None:
    for sequence in sequences:
        whole("a sequence", sequence, 0, state.batch - 1, TokenError)
