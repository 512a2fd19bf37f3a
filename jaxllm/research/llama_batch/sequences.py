"""llama.cpp's sequence operations, on a cache whose rows are the sequences.

The state is a `KVCache`. Row s is sequence s, with its own slots in the tail. One frozen segment
holds slots that several sequences share; such a slot has the same position in every row that has
it, as llama.cpp's cell has a set of sequences. Any empty slot can be written next, so a sequence
reuses the slots that it frees, and takes none from another. Shapes never change, so no operation
compiles a program for a new number of segments.

Copies are by reference: a range moves to the shared slots when it is first copied; every further
copy changes a few integers. Every function is pure; an error leaves nothing changed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.cache.kv import (
    EMPTY,
    MAX_SLOTS,
    KVCache,
    Segment,
    check_no_state,
    check_usable,
    init_cache,
)
from jaxllm.cache.operations import gather_slots, movable_ropes, rerotate_keys
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CacheMismatchError, CapacityError, TokenError
from jaxllm.ops.padding import next_power_of_two
from jaxllm.ops.slot_update import NO_SLOT, write_slots
from jaxllm.runtime.validation import check_int


class Positions(NamedTuple):
    """The positions of all slots on the host, int32 `[sequences, slots]`; negative: no token.

    Attributes:
        own_BS: In the tail.
        shared_BN: In the shared slots (N = 0 if there are none).
    """

    own_BS: np.ndarray
    shared_BN: np.ndarray

    @property
    def next_B(self) -> np.ndarray:
        """Each sequence's next position: after its last, 0 if it is empty."""
        each = [x.max(axis=1, initial=EMPTY) for x in self]
        last_B: np.ndarray = np.maximum(*each)
        return last_B + 1

    @property
    def ref_count_N(self) -> np.ndarray:
        """Number of sequences that have each shared slot."""
        return np.asarray((self.shared_BN >= 0).sum(axis=0))


def init_sequences(
    config: ModelConfig,
    sequences: int,
    capacity: int,
    *,
    shared: int | None = None,
    dtype: str | None = None,
) -> KVCache:
    """Return empty sequences 0, 1, ... with `capacity` slots each, and `shared` slots for copies.

    Args:
        shared: Default: as many as one sequence has; with 0, nothing can be copied.
        dtype: As for `init_cache`.

    Raises:
        CapacityError: `shared` is negative; further errors as `init_cache`.
    """
    cache = init_cache(config, sequences, capacity, dtype=dtype)
    shared = capacity if shared is None else shared
    shared = check_int("shared", shared, 0, MAX_SLOTS, CapacityError)
    if not shared:
        return cache
    pool = init_cache(config, 1, shared, dtype=dtype).tail
    position_BN = np.full((sequences, shared), EMPTY, np.int32)
    return cache.replace(frozen=(pool.replace(position_BS=jax.device_put(position_BN)),))


def read_positions(state: KVCache) -> Positions:
    """Read the positions of all slots from the device.

    Raises:
        CacheMismatchError: For a cache of another structure, or one that was donated.
    """
    check_usable(state)
    check_no_state(state, "sequences")
    pool = state.frozen[0] if state.frozen else None
    if len(state.frozen) > 1 or (pool and pool.position_BS.shape[0] != state.batch):
        raise CacheMismatchError(
            "sequences need a cache with at most one frozen segment: create it with init_sequences"
        )
    none = np.zeros((state.batch, 0), np.int32)
    return Positions(np.array(state.tail.position_BS), np.array(pool.position_BS) if pool else none)


def with_positions(state: KVCache, positions: Positions) -> KVCache:
    """Return the state with these positions, and cursor and next positions to match."""
    used = np.flatnonzero((positions.own_BS >= 0).any(axis=0))
    cursor = np.array(used[-1] + 1 if used.size else 0, np.int32)
    own_BS, shared_BN, cursor, next_B = jax.device_put(
        (*positions, cursor, positions.next_B.astype(np.int32))
    )
    return state.replace(
        frozen=tuple(pool.replace(position_BS=shared_BN) for pool in state.frozen),
        tail=state.tail.replace(position_BS=own_BS),
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
    """Copy the tokens of `source` at positions `start` to before `stop` to `target`, by reference.

    Tokens in the tail of `source` move to shared slots first. donate: write those in place.

    Raises:
        CapacityError: Too few shared slots.
        TokenError: Unknown sequence, or `target` has a token at one of these positions.
    """
    at = read_positions(state)
    _check_sequences(state, source, target)
    if source == target:
        return state
    own_S, shared_N = at.own_BS[source], at.shared_BN[source]
    moving = np.flatnonzero(_range_mask(own_S, start, stop))
    copied = [own_S[moving], shared_N[_range_mask(shared_N, start, stop)]]
    duplicates = np.intersect1d(np.concatenate(copied), np.concatenate([x[target] for x in at]))
    if duplicates.size:
        raise TokenError(f"sequence {target} already has a token at position {duplicates[0]}")
    free = np.flatnonzero(at.ref_count_N == 0)
    if moving.size > free.size:
        raise CapacityError(
            f"{moving.size} tokens to copy, but only {free.size} shared slots are empty. Remove a"
            " sequence, defragment, or create the state with more shared slots"
        )
    free = free[: moving.size]
    if moving.size:
        pool = _copy_slots(state.frozen[0], state.tail, 0, free, source, moving, donate=donate)
        state = state.replace(frozen=(pool,))
        shared_N[free], own_S[moving] = own_S[moving], EMPTY
    is_copied_N = _range_mask(shared_N, start, stop)
    at.shared_BN[target, is_copied_N] = shared_N[is_copied_N]
    return with_positions(state, at)


def remove_range(
    state: KVCache, sequence: int | None = None, start: int = 0, stop: int | None = None
) -> KVCache:
    """Remove the tokens of a sequence (None: of each) at positions `start` to before `stop`.

    Tail slots are free at once, a shared slot if no sequence has it. Later tokens have attended to
    the removed ones, as in `keep`. Keys and values are shared with `state`.

    Raises:
        TokenError: For an unknown sequence.
    """
    at = read_positions(state)
    if sequence is not None:
        _check_sequences(state, sequence)
    rows = slice(None) if sequence is None else slice(sequence, sequence + 1)
    for x in at:
        x[rows] = np.where(_range_mask(x[rows], start, stop), EMPTY, x[rows])
    return with_positions(state, at)


def keep_sequence(state: KVCache, sequence: int) -> KVCache:
    """Remove all sequences but this one. Raises TokenError for an unknown one."""
    at = read_positions(state)
    _check_sequences(state, sequence)
    others = np.arange(state.batch) != sequence
    for x in at:
        x[others] = EMPTY
    return with_positions(state, at)


def add_positions(
    state: KVCache, sequence: int, by: int, start: int = 0, stop: int | None = None
) -> KVCache:
    """Move the tokens at positions `start` to before `stop` by `by`, and rotate their keys.

    Other sequences keep their shared tokens: this one first gets copies in its own slots. Several
    tokens may end up at one position.

    Raises:
        ConfigError: The model's keys are not rotated.
        CapacityError: No room for such copies.
        TokenError: Unknown sequence, or a token would exceed the position limits.
    """
    by = check_int("by", by, -(1 << 62), 1 << 62, TokenError)
    return _renumber(state, sequence, start, stop, lambda position: position + by)


def divide_positions(
    state: KVCache, sequence: int, divisor: int, start: int = 0, stop: int | None = None
) -> KVCache:
    """Divide positions from `start` to before `stop`, rounding down (Jin et al. 2024, Self-Extend).

    Otherwise as `add_positions`.
    """
    divisor = check_int("divisor", divisor, 1, MAX_SLOTS, TokenError)
    return _renumber(state, sequence, start, stop, lambda position: position // divisor)


def defragment(state: KVCache) -> KVCache:
    """Move all tokens to the first slots, in order of position.

    Shared slots that only one sequence has return to its own slots, if there is room. Logits do not
    change: attention does not depend on slot numbers.
    """
    at = read_positions(state)
    for row in range(state.batch):
        lone = np.flatnonzero((at.shared_BN[row] >= 0) & (at.ref_count_N == 1))
        lone = lone[: np.count_nonzero(at.own_BS[row] < 0)]
        state = _unshare_slots(state, at, row, lone)
    last = np.iinfo(np.int32).max
    order_BS = np.argsort(np.where(at.own_BS < 0, last, at.own_BS), axis=1, kind="stable")
    own_BS = np.take_along_axis(at.own_BS, order_BS, axis=1)
    tail = gather_slots((state.tail,), order_BS.astype(np.int32), state.capacity)
    frozen, shared_BN = state.frozen, at.shared_BN
    if state.frozen:
        first_N = np.where(at.ref_count_N == 0, last, shared_BN.max(axis=0))
        order_N = np.argsort(first_N, kind="stable")
        pool = state.frozen[0].replace(position_BS=jax.device_put(shared_BN[:1]))
        frozen = (gather_slots((pool,), order_N[None].astype(np.int32), order_N.size),)
        shared_BN = shared_BN[:, order_N]
    return with_positions(state.replace(tail=tail, frozen=frozen), Positions(own_BS, shared_BN))


def _renumber(
    state: KVCache,
    row: int,
    start: int,
    stop: int | None,
    move: Callable[[np.ndarray], np.ndarray],
) -> KVCache:
    at, limit = read_positions(state), state.config.position_limit
    _check_sequences(state, row)
    lent = np.flatnonzero(_range_mask(at.shared_BN[row], start, stop) & (at.ref_count_N > 1))
    state = _unshare_slots(state, at, row, lent)
    before = Positions(*(x.copy() for x in at))
    for x in at:
        inside = _range_mask(x[row], start, stop)
        moved = move(x[row, inside].astype(np.int64))
        wrong = moved[(moved < 0) | (moved >= limit)]
        if wrong.size:
            raise TokenError(
                f"a token would move to {wrong[0]}; positions run from 0 to {limit - 1}"
            )
        x[row, inside] = moved

    by = Positions(*(new - old for new, old in zip(at, before, strict=True)))
    ropes = movable_ropes(state, np.concatenate([x[row] for x in by]))

    def rotate_segment(segment: Segment, by_BS: np.ndarray) -> Segment:
        if not by_BS.any():
            return segment
        k = rerotate_keys(segment.k, jax.device_put(by_BS), ropes)
        return segment.replace(k=k)

    state = state.replace(
        tail=rotate_segment(state.tail, by.own_BS),
        frozen=tuple(rotate_segment(pool, by.shared_BN[row : row + 1]) for pool in state.frozen),
    )
    return with_positions(state, at)


def _unshare_slots(state: KVCache, positions: Positions, row: int, slots: np.ndarray) -> KVCache:
    """Copy shared slots of a row into its own; updates the caller's `positions` in place."""
    if not slots.size:
        return state
    free = np.flatnonzero(positions.own_BS[row] < 0)
    if slots.size > free.size:
        raise CapacityError(
            f"sequence {row} needs {slots.size} own slots for tokens that it shares, but only"
            f" {free.size} are empty"
        )
    free = free[: slots.size]
    tail = _copy_slots(state.tail, state.frozen[0], row, free, 0, slots, donate=False)
    positions.own_BS[row, free], positions.shared_BN[row, slots] = (
        positions.shared_BN[row, slots],
        EMPTY,
    )
    return state.replace(tail=tail)


def _copy_slots(
    into: Segment,
    source: Segment,
    into_row: int,
    into_slots: np.ndarray,
    row: int,
    slots: np.ndarray,
    *,
    donate: bool,
) -> Segment:
    """Copy slots of `source` to `into`, without positions."""
    width = next_power_of_two(slots.size)
    padding = (0, width - slots.size)
    step = _COPY_IN_PLACE if donate else _COPY
    position_BS, entries = into.position_BS, into.replace(position_BS=None)
    copied: Segment = step(
        entries,
        source.replace(position_BS=None),
        np.int32(into_row),
        np.pad(into_slots, padding, constant_values=NO_SLOT).astype(np.int32),
        np.int32(row),
        np.pad(slots, padding).astype(np.int32),
    )
    return copied.replace(position_BS=position_BS)


def _copy(
    into: Segment, source: Segment, into_row: Any, into_P: Any, row: Any, slot_P: Any
) -> Segment:
    copied = jax.tree.map(lambda x: x[row, slot_P][None], source)
    return write_slots(into, copied, into_P[None], into_row[None])


_COPY = jax.jit(_copy)
_COPY_IN_PLACE = jax.jit(_copy, donate_argnums=0)


def _range_mask(position: np.ndarray, start: int, stop: int | None) -> np.ndarray:
    start = check_int("start", start, -MAX_SLOTS, MAX_SLOTS, TokenError)
    inside: np.ndarray = (position >= 0) & (position >= start)
    if stop is None:
        return inside
    return inside & (position < check_int("stop", stop, -MAX_SLOTS, MAX_SLOTS, TokenError))


def _check_sequences(state: KVCache, *sequences: int) -> None:
    for sequence in sequences:
        check_int("a sequence", sequence, 0, state.batch - 1, TokenError)
