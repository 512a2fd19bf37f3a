"""Capacity checks of a generation: text buffer, cache slots and model positions."""

from typing import Any

import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.errors import CapacityError
from jaxllm.files import check_memory
from jaxllm.generation.loops.finish import NO_TOKEN, check_positions
from jaxllm.generation.loops.overflow import OverflowPolicy
from jaxllm.models.inputs import check_longrope_limit, rescales_rope, warn_dynamic_ntk
from jaxllm.ops.padding import bucket_size, pad_rows
from jaxllm.weights.model import Model


def initial_text(
    cache: KVCache | None, tokens_BT: np.ndarray, lengths_B: np.ndarray, needed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's text so far, in a buffer for the full text: int32 `[B, L]`, `[B]`."""
    B = tokens_BT.shape[0]
    held = [[] if cache is None else cache.tokens(row) for row in range(B)]
    rows = [[*held[b], *tokens_BT[b, : lengths_B[b]].tolist()] for b in range(B)]
    longest = max(map(len, held)) + needed
    check_memory(8 * B * bucket_size(longest), f"a text of {longest:,} tokens in {B:,} rows")
    token_BL = pad_rows(rows, width=bucket_size(longest) + 1, fill=NO_TOKEN)
    return token_BL, np.array([len(row) for row in rows], np.int32)


def check_continuation(
    model: Model, cache: KVCache | None, lengths_B: np.ndarray, new_B: Any
) -> None:
    """Check a generation against LongRoPE and dynamic RoPE; its last token never runs.

    Raises CapacityError or warns as `inputs.check_longrope_limit` and `inputs.warn_dynamic_ntk` do.
    """
    if not model.config.rope_depends_on_length:
        return
    held_B = np.zeros_like(lengths_B) if cache is None else np.asarray(cache.next_position_B)
    begin_B = np.where(held_B > 0, held_B, lengths_B)
    prompt_B = held_B + lengths_B
    check_longrope_limit(begin_B, prompt_B + new_B - 1, model.config)
    if not rescales_rope(begin_B, prompt_B, model.config):  # the prompt's check warns of these
        warn_dynamic_ntk(begin_B, prompt_B + new_B - 1, model.config)


def check_capacity(model: Model, cache: KVCache, needed: int) -> None:
    """Raise CapacityError if `needed` more tokens do not fit into the cache or the model."""
    check_positions(int(np.asarray(cache.next_position_B).max()) + needed, model.config)
    if int(cache.cursor) + needed > cache.capacity:
        raise CapacityError(
            f"{needed} tokens of prompt and continuation do not fit: {int(cache.cursor)} of the"
            f" cache's {cache.capacity} slots are used. Make the cache with a larger capacity"
        )


def truncate_to_recent(
    cache: KVCache, tokens_BT: np.ndarray, lengths_B: np.ndarray, overflow: OverflowPolicy
) -> tuple[np.ndarray, np.ndarray]:
    """Truncate prompts that do not fit to the most recent tokens that the policy retains."""
    T = tokens_BT.shape[1]
    room = cache.capacity - int(cache.cursor)
    overflow.check(cache.config, cache.capacity)
    recent = overflow.max_kept(cache.capacity)
    if room >= T:
        return tokens_BT, lengths_B
    if overflow.long_prompt or int(cache.cursor):
        remedy = overflow.long_prompt and f". {overflow.long_prompt}"
        raise CapacityError(
            f"a prompt of {T} tokens does not fit into the {room} free slots{remedy}"
        )
    rows = [tokens_BT[b, :n][-recent:] for b, n in enumerate(lengths_B)]
    return pad_rows(rows, width=recent), np.array([len(row) for row in rows])
