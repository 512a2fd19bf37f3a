"""Rewinding the state of layers, at most to the start of the current chunk or segment.

A recurrent layer's rows since the last boundary are dropped, which is exact. A kind of attention
with segments rewinds within the current one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.cache.kv import KVCache, check_no_state, check_usable
from jaxllm.errors import CacheMismatchError
from jaxllm.ops.recurrent import RecurrentState, drop
from jaxllm.runtime.multihost import to_host


class Mark(struct.PyTreeNode):
    """A place in a text, to which `rewind` returns from any later one.

    It has a copy of the layers' states, and the tokens up to there, but no keys and values.

    Attributes:
        next_position_B: int32, the next position of each row.
        position_BS, token_BS: int32, of the cache's slots; see `Segment`.
        state: Each layer's state, `KVCache.state`.
    """

    next_position_B: jax.Array
    position_BS: jax.Array
    token_BS: jax.Array
    state: tuple[Any, ...]


def mark(cache: KVCache) -> Mark:
    """Return the cache's place in the text, for `rewind(cache, to=mark)`.

    Models with recurrent layers need it to go back to before the last multiple of 64 tokens.
    """
    check_usable(cache)
    place = Mark(cache.next_position_B, cache.position_BS, cache.token_BS, cache.state)
    copied: Mark = jax.tree.map(jnp.copy, place)  # steps may donate the cache's arrays
    return copied


def check_mark(cache: KVCache, place: Mark) -> None:
    """Raise CacheMismatchError unless the cache's text continues that of the mark."""
    theirs = to_host((place.position_BS, place.token_BS))
    ours = to_host((cache.position_BS, cache.token_BS))
    if len(theirs[0]) != cache.batch:
        raise CacheMismatchError(f"the mark has {len(theirs[0])} rows, the cache {cache.batch}")
    for row, limit in enumerate(to_host(place.next_position_B)):
        texts = []
        for position_BS, token_BS in (theirs, ours):
            at = np.flatnonzero((position_BS[row] >= 0) & (position_BS[row] < limit))
            at = at[np.argsort(position_BS[row, at])]
            texts.append((position_BS[row, at], token_BS[row, at]))
        if not all(np.array_equal(*pair) for pair in zip(*texts, strict=True)):
            raise CacheMismatchError(
                f"rewind: the text of row {row} does not continue that of the mark, which has"
                f" {limit} positions"
            )


def rewind_state(cache: KVCache, next_B: jax.Array) -> tuple[Any, ...]:
    """Return each layer's state as it was when each row's next position was `next_B`.

    Raises CacheMismatchError for other kinds of state, for rows that would return to before the
    current chunk or segment, and if needed tokens of the segment are no longer in the cache.
    """
    begin_B = rewind_limit(cache)
    if not cache.state:
        return ()
    if isinstance(next_B, jax.core.Tracer) or isinstance(cache.cursor, jax.core.Tracer):
        check_no_state(cache, "rewind inside a compiled program")
    _check_rewind(cache, to_host(next_B), begin_B)
    if (to_host(next_B) == to_host(cache.next_position_B)).all():
        return cache.state
    layers = []
    for layer, state in enumerate(cache.state):
        if state is None or isinstance(state, RecurrentState):
            layers.append(None if state is None else drop(state, next_B))
            continue
        kind, rope = cache.config.attention_kind(layer), cache.config.layer_rope(layer)
        assert kind is not None
        entries = [(s.k[layer], s.v[layer], s.position_BS) for s in cache.segments]
        layers.append(kind.rewind(state, entries, next_B, cache.next_position_B, rope))
    return tuple(layers)


def rewind_limit(cache: KVCache) -> np.ndarray:
    """Return the position to which each row can be rewound, int32 `[B]`; 0 without a state.

    Rows with recurrent layers can also be rewound to 0. Raises CacheMismatchError for another kind
    of state.
    """
    if not cache.state:
        return np.zeros(cache.batch, np.int32)
    kind, state = cache.config.attention, next(x for x in cache.state if x is not None)
    if kind is not None and kind.segment_length is not None:
        return np.asarray(to_host(kind.segment_start(state)))
    if not isinstance(state, RecurrentState):
        check_no_state(cache, "rewind")
    return to_host(state.start_B)


def _check_rewind(cache: KVCache, next_B: np.ndarray, begin_B: np.ndarray) -> None:
    position_BS, last_B = to_host(cache.position_BS), to_host(cache.next_position_B)
    sums_tokens = cache.config.segment_length is None  # recurrent layers
    for row, (to, begin, next_position) in enumerate(zip(next_B, begin_B, last_B, strict=True)):
        if to < begin and (to or not sums_tokens):
            part = "chunk" if sums_tokens else "segment"
            raise CacheMismatchError(
                f"rewind: row {row} cannot go back to position {to}: its state can be rewound to"
                f" {begin}, the start of the current {part}, since additions of finished {part}s"
                " cannot be removed. Go back to a `mark` of that time, or continue from a cache"
                " that was forked or saved before"
            )
        if sums_tokens:
            continue
        count = ((position_BS[row] >= begin) & (position_BS[row] < to)).sum()
        if begin < to < next_position and count < to - begin:
            raise CacheMismatchError(
                f"rewind: row {row} has only {count} of the tokens from position {begin} to {to},"
                f" from which its memory must be recomputed. Go back to {begin}, or continue from a"
                " cache that was forked or saved before"
            )
