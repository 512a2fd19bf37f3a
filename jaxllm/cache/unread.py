"""How far a memory can go back: to the border of the segment in hand, and within that segment.

What finished segments have added to Infini-attention's memory cannot be taken out of it. What the
segment in hand adds stands apart, and is summed again over those of its tokens that stay: from
their keys in the cache, turned back, so in the cache's format.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache, check_no_memory
from jaxllm.config import Rope
from jaxllm.distributed import fetched
from jaxllm.errors import CacheMismatchError
from jaxllm.ops.compressive import Memory, Update, at_border, write
from jaxllm.ops.entries import dense, side_by_side
from jaxllm.ops.rope import inverse_frequencies, turn


def memory_before(cache: KVCache, next_B: jax.Array) -> tuple[Any, ...]:
    """What the layers kept when each row's next position was `next_B`.

    Raises CacheMismatchError for memories of another kind, for rows that would go back to a
    finished segment, and where tokens of the segment in hand are no longer in the cache.
    """
    length = cache.config.segment_length
    if not cache.memory or length is None:
        check_no_memory(cache, "rewind")
        return ()
    if isinstance(next_B, jax.core.Tracer) or isinstance(cache.cursor, jax.core.Tracer):
        check_no_memory(cache, "rewind inside a compiled program")
    begin_B = fetched(cache.memory[0].segment_B) * length
    _check(cache, fetched(next_B), begin_B)
    if (fetched(next_B) == fetched(cache.next_position_B)).all():
        return cache.memory
    layers = []
    for layer, memory in enumerate(cache.memory):
        kind, rope = cache.config.long_attention(layer), cache.config.rotary(layer)
        assert kind is not None
        entries = [(s.k[layer], s.v[layer], s.position_BS) for s in cache.segments]
        form = (length, kind.update or "linear", rope)
        layers.append(_summed_again(memory, entries, next_B, cache.next_position_B, *form))
    return tuple(layers)


def _check(cache: KVCache, next_B: np.ndarray, begin_B: np.ndarray) -> None:
    position_BS, now_B = fetched(cache.position_BS), fetched(cache.next_position_B)
    for row, (to, begin, now) in enumerate(zip(next_B, begin_B, now_B, strict=True)):
        if to < begin:
            raise CacheMismatchError(
                f"rewind: row {row} would go back to position {to}. Its memory goes back to"
                f" {begin}, where the segment in hand begins: what finished segments have added"
                " cannot be taken out. Go on from a cache that was forked or saved before"
            )
        there = ((position_BS[row] >= begin) & (position_BS[row] < to)).sum()
        if begin < to < now and there < to - begin:
            raise CacheMismatchError(
                f"rewind: row {row} has {there} of the tokens from position {begin} to {to}, which"
                f" its memory must be summed up from again. Go back to {begin}, or go on from a"
                " cache that was forked or saved before"
            )


@partial(jax.jit, static_argnums=(4, 5, 6))
def _summed_again(
    memory: Memory,
    entries: list[Any],
    next_B: jax.Array,
    now_B: jax.Array,
    length: int,
    update: Update,
    rope: Rope | None,
) -> Memory:
    """A layer's memory, its segment in hand up to `next_B`; as it is where nothing is undone."""
    rows = next_B.shape[0]
    k_BSKH, v_BSKH, position_BS = (
        side_by_side([dense(x) for x in each], rows) for each in zip(*entries, strict=True)
    )
    begin_B1 = (memory.segment_B * length)[:, None]
    stays_BS = (position_BS >= begin_B1) & (position_BS < next_B[:, None])
    if rope is not None:
        k_BSKH = _turned_back(k_BSKH, position_BS % length, rope)
    summed = write(at_border(memory), k_BSKH, v_BSKH, stays_BS, update)

    def where_undone(new: jax.Array, old: jax.Array) -> jax.Array:
        undone_B = (next_B < now_B).reshape((rows,) + (1,) * (new.ndim - 1))
        return jnp.where(undone_B, new, old)

    found: Memory = jax.tree.map(where_undone, summed, memory)
    return found


def _turned_back(k_BSKH: jax.Array, place_BS: jax.Array, rope: Rope) -> jax.Array:
    """Keys as they were before they were turned by their places, float32."""
    head_dim = k_BSKH.shape[-1]
    width, magnitude = rope.width(head_dim), inverse_frequencies(rope, head_dim=head_dim)[1]
    k_BSKH = turn(k_BSKH, -place_BS, rope, head_dim=head_dim)
    if magnitude == 1.0:
        return k_BSKH
    return jnp.concatenate([k_BSKH[..., :width] / magnitude, k_BSKH[..., width:]], axis=-1)
