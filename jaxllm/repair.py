"""Repair: run a part of a cache's text again, or run new tokens into the middle of it."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.growth import commit
from jaxllm.cache.kv import MOST_SLOTS, KVCache, check_no_memory, check_usable
from jaxllm.cache.surgery import keep, patch, shift, slots_at
from jaxllm.errors import TokenError
from jaxllm.inputs import check_model
from jaxllm.steps import forward
from jaxllm.weights.paths import Params
from jaxllm.whole import whole, whole_array


def recompute(
    model: nn.Module, params: Params, cache: KVCache, start: int, stop: int, *, chunk: int = 256
) -> KVCache:
    """The cache with the tokens at positions `start` to before `stop` run again and patched in.

    They are run against the tokens before them that the cache still has, so what was culled there
    is as if it had never been; where nothing was, the same numbers come out. Tokens from `stop` on
    keep what they absorbed: recompute up to the end for a text without traces. All other entries
    keep their bits. Positions in the range that hold no token are passed over, and gaps stay: for
    the text as if written without them, `close_gaps` first.

    Raises TokenError for an empty range, CacheMismatchError for a cache with a memory, and what
    `forward` raises.
    """
    check_model(model, params)
    check_usable(cache)
    check_no_memory(cache, "recompute")
    start = whole("start", start, 0, MOST_SLOTS, TokenError)
    stop = whole("stop", stop, 0, MOST_SLOTS, TokenError)
    chunk = whole("chunk", chunk, 1, error=TokenError)
    if not start < stop:
        raise TokenError(f"recompute needs 0 <= start < stop, got {start} and {stop}")
    if not isinstance(cache.next_position_B, jax.core.Tracer):
        stop = min(stop, int(cache.next_position_B.max()))
    for first in range(start, stop, chunk):
        last = min(first + chunk, stop)
        wanted = np.broadcast_to(
            np.arange(first, last, dtype=np.int32), (cache.batch, last - first)
        )
        at_BT = slots_at(cache, wanted)
        positions_BT = jnp.where(at_BT >= 0, wanted, -1)
        tokens_BT = jnp.take_along_axis(cache.token_BS, jnp.maximum(at_BT, 0), axis=1)
        before = keep(cache, cache.position_BS < first)
        out = forward(model, params, before, tokens_BT, positions_BT=positions_BT)
        cache = patch(cache, at_BT, out.delta)
    return cache


def insert(
    model: nn.Module, params: Params, cache: KVCache, position: int, tokens_BT: Any
) -> KVCache:
    """The cache with tokens `[B, T]` run and put in before `position`; what follows moves by T.

    The new tokens see what precedes them. What follows has its keys rotated (`shift`) but has not
    read them: `recompute` it for a text as if written so. They take T slots of the tail.

    Raises what `shift`, `forward` and `commit` raise: learned positions cannot be moved, so such
    models take an insertion only at the end or, through `forward` and `commit`, into a gap.
    """
    check_model(model, params)
    check_usable(cache)
    if not isinstance(tokens_BT, jax.Array):
        tokens_BT = whole_array("tokens", tokens_BT, TokenError)
    if tokens_BT.ndim != 2 or tokens_BT.shape[0] != cache.batch:
        raise TokenError(f"tokens must be [{cache.batch}, T], got shape {tokens_BT.shape}")
    position = whole("position", position, 0, MOST_SLOTS, TokenError)
    T = tokens_BT.shape[1]
    positions_BT = np.broadcast_to(position + np.arange(T, dtype=np.int32), tokens_BT.shape)
    moved = shift(cache, T, start=position)
    out = forward(model, params, moved, tokens_BT, positions_BT=positions_BT)
    return commit(moved, out.delta)
