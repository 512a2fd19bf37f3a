"""Cache repair: recompute part of a cached text, or insert new tokens into the middle of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.commit import commit
from jaxllm.cache.kv import MAX_SLOTS, KVCache, check_no_state, check_usable
from jaxllm.cache.operations import find_slots, keep, patch, shift
from jaxllm.errors import TokenError
from jaxllm.models.inputs import check_model
from jaxllm.runtime.validation import check_int, check_int_array
from jaxllm.steps import forward
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


def recompute(
    model: Model, params: Params, cache: KVCache, start: int, stop: int, *, chunk: int = 256
) -> KVCache:
    """Return the cache with the tokens at positions `start` to `stop - 1` recomputed.

    They attend only to earlier tokens that are still in the cache, so tokens culled there no longer
    influence them; if none were culled, the values do not change. All other entries keep their
    bits, so tokens from `stop` on still carry that influence: recompute to the end to remove it.
    Positions in the range without a token are skipped, and gaps stay; call `close_gaps` first for a
    contiguous text.

    Raises:
        TokenError: For an empty range.
        CacheMismatchError: For a cache with a memory, and what `forward` raises.
    """
    check_model(model, params)
    check_usable(cache)
    check_no_state(cache, "recompute")
    start = check_int("start", start, 0, MAX_SLOTS, TokenError)
    stop = check_int("stop", stop, 0, MAX_SLOTS, TokenError)
    chunk = check_int("chunk", chunk, 1, error=TokenError)
    if not start < stop:
        raise TokenError(f"recompute requires start < stop, got {start} and {stop}")
    if not isinstance(cache.next_position_B, jax.core.Tracer):
        stop = min(stop, int(cache.next_position_B.max()))
    for first in range(start, stop, chunk):
        last = min(first + chunk, stop)
        wanted_BT = np.broadcast_to(
            np.arange(first, last, dtype=np.int32), (cache.batch, last - first)
        )
        at_BT = find_slots(cache, wanted_BT)
        positions_BT = jnp.where(at_BT >= 0, wanted_BT, -1)
        tokens_BT = jnp.take_along_axis(cache.token_BS, jnp.maximum(at_BT, 0), axis=1)
        before = keep(cache, cache.position_BS < first)
        out = forward(model, params, before, tokens_BT, positions_BT=positions_BT)
        cache = patch(cache, at_BT, out.delta)
    return cache


def insert(model: Model, params: Params, cache: KVCache, position: int, tokens_BT: Any) -> KVCache:
    """Return the cache with tokens `[B, T]` inserted before `position`; later tokens move by T.

    The new tokens attend to those before them and take T slots of the tail. Keys of later tokens
    are rotated (`shift`), but those tokens have not attended to the new ones: `recompute` them for
    an exact result.

    Raises what `shift`, `forward` and `commit` raise. Learned positions cannot be shifted: such
    models accept an insertion only at the end or, with `forward` and `commit`, into a gap.
    """
    check_model(model, params)
    check_usable(cache)
    if not isinstance(tokens_BT, jax.Array):
        tokens_BT = check_int_array("tokens", tokens_BT, TokenError)
    if tokens_BT.ndim != 2 or tokens_BT.shape[0] != cache.batch:
        raise TokenError(f"tokens must be [{cache.batch}, T], got shape {tokens_BT.shape}")
    position = check_int("position", position, 0, MAX_SLOTS, TokenError)
    T = tokens_BT.shape[1]
    positions_BT = np.broadcast_to(position + np.arange(T, dtype=np.int32), tokens_BT.shape)
    moved = shift(cache, T, start=position)
    out = forward(model, params, moved, tokens_BT, positions_BT=positions_BT)
    return commit(moved, out.delta)
