"""Capacity checks of a generation: text buffer, cache slots and model positions."""

from typing import Any

import flax.linen as nn
import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.decode.loops.overflow import Overflow, Segments, check_policy
from jaxllm.decode.loops.text import NO_TOKEN, check_positions
from jaxllm.errors import CapacityError
from jaxllm.files import check_memory
from jaxllm.inputs import check_border, stretches, warn_of_stretch
from jaxllm.shapes import bucket, pad_rows


def texts(
    cache: KVCache | None, tokens_BT: np.ndarray, lengths_B: np.ndarray, needed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's text so far, in a buffer for the full text: int32 `[B, L]`, `[B]`."""
    B = tokens_BT.shape[0]
    held = [[] if cache is None else cache.tokens(row) for row in range(B)]
    rows = [[*held[b], *tokens_BT[b, : lengths_B[b]].tolist()] for b in range(B)]
    longest = max(map(len, held)) + needed
    check_memory(8 * B * bucket(longest), f"a text of {longest:,} tokens in {B:,} rows")
    token_BL = pad_rows(rows, width=bucket(longest) + 1, fill=NO_TOKEN)
    return token_BL, np.array([len(row) for row in rows], np.int32)


def check_going_on(
    model: nn.Module, cache: KVCache | None, lengths_B: np.ndarray, new_B: Any
) -> None:
    """Check a generation against LongRoPE and dynamic RoPE; its last token never runs.

    Raises CapacityError or warns as `inputs.check_border` and `inputs.warn_of_stretch` do.
    """
    if not model.config.angles_follow_length:
        return
    held_B = np.zeros_like(lengths_B) if cache is None else np.asarray(cache.next_position_B)
    begin_B = np.where(held_B > 0, held_B, lengths_B)
    prompt_B = held_B + lengths_B
    check_border(begin_B, prompt_B + new_B - 1, model.config)
    if not stretches(begin_B, prompt_B, model.config):  # `prefill` warns of these
        warn_of_stretch(begin_B, prompt_B + new_B - 1, model.config)


def check_room(model: nn.Module, cache: KVCache, needed: int) -> None:
    """Raise CapacityError if `needed` more tokens do not fit into the cache or the model."""
    check_positions(int(np.asarray(cache.next_position_B).max()) + needed, model.config)
    if int(cache.cursor) + needed > cache.capacity:
        raise CapacityError(
            f"{needed} tokens of prompt and continuation do not fit: {int(cache.cursor)} of the"
            f" cache's {cache.capacity} slots are used. Make the cache with a larger capacity"
        )


def recent_part(
    cache: KVCache, tokens_BT: np.ndarray, lengths_B: np.ndarray, overflow: Overflow
) -> tuple[np.ndarray, np.ndarray]:
    """Truncate prompts that do not fit to the most recent tokens that the policy retains."""
    T = tokens_BT.shape[1]
    room = cache.capacity - int(cache.cursor)
    check_policy(cache.config, cache.capacity, overflow)
    recent = overflow.room_for(cache.capacity)
    if room >= T:
        return tokens_BT, lengths_B
    if isinstance(overflow, Segments):
        raise CapacityError(
            f"a prompt of {T} tokens does not fit into the {room} free slots. Prefill all but its"
            " last token with `prefill_in_segments`, then continue from that cache"
        )
    if int(cache.cursor):
        raise CapacityError(f"a prompt of {T} tokens does not fit into the {room} free slots")
    rows = [tokens_BT[b, :n][-recent:] for b, n in enumerate(lengths_B)]
    return pad_rows(rows, width=recent), np.array([len(row) for row in rows])
