"""Pipelined decoding: the rows are split into as many groups as there are pipeline stages.

In the plain loop of `generate` all stages but one are idle. Here, in each tick, every stage runs a
different group of rows. Tokens, random keys and cache slots are the same as in the plain loop.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache, constrain_cache, replicate_for_host
from jaxllm.generation.loops.finish import Finish, select_rows
from jaxllm.generation.loops.state import DecodeState, LoopConstants, sample
from jaxllm.steps import MassMode


def row_groups(model: Any, rows: int) -> np.ndarray | None:
    """Return the group of each row, int32 `[B]`, if stages decode one group each; else None.

    It is None if the rows are not divisible into groups.
    """
    stages, devices = len(model.stage_layers), model.num_data_shards(rows)
    if not stages or model.runner.chunks > 1 or rows % (devices * stages):
        return None
    size = rows // (devices * stages)
    return np.tile(np.repeat(np.arange(stages, dtype=np.int32), size), devices)


def decode_pipelined(
    model: Any,
    constants: LoopConstants,
    tail: KVCache,
    state: DecodeState,
    attention_mass: MassMode,
) -> tuple[KVCache, DecodeState]:
    """Run `state.decode_until_done` pipelined, for a model and rows with `row_groups`.

    The tail must have room for all tokens. The attention mass is not supported.
    """
    rows = tail.batch
    group_B, start = jnp.asarray(row_groups(model, rows)), tail.cursor
    stages = model.axes.stage

    def is_unfinished(carry: Any) -> jax.Array:
        return (carry[2].finish_B == Finish.RUNNING).any()

    def tick(carry: Any) -> Any:
        number, tail, state, flight, position_B = carry
        running_B = state.finish_B == Finish.RUNNING
        enters_B = group_B == number % stages
        position_B = jnp.where(enters_B, jnp.where(running_B, tail.next_position_B, -1), position_B)
        token_B = jnp.where(running_B, state.newest_B, 0)  # 0 is padding for rows that have ended
        tail = _record_tokens(tail, enters_B, position_B, token_B, start + number // stages)
        logits_BV, flight, segment = model.run_tick(
            constants.params,
            (*constants.frozen, tail.tail),
            flight,
            number,
            start,
            token_B,
            position_B,
        )
        leaves_B = (group_B == (number + 1) % stages) & (number + 1 >= stages)
        others_B = jnp.where(leaves_B, state.finish_B, jnp.int32(Finish.STOP))
        drawn = sample(constants.limits, state.replace(finish_B=others_B), logits_BV)
        state = select_rows(leaves_B, drawn, state)
        return number + 1, tail.replace(tail=segment), state, flight, position_B

    begin = (
        jnp.zeros((), jnp.int32),
        tail,
        state,
        model.empty_pipeline(rows),
        jnp.full((rows,), -1, jnp.int32),
    )
    _, tail, state, _, _ = jax.lax.while_loop(is_unfinished, tick, begin)
    return constrain_cache(tail, model), replicate_for_host(state, model)


def _record_tokens(
    tail: KVCache, enters_B: jax.Array, position_B: jax.Array, token_B: jax.Array, slot: jax.Array
) -> KVCache:
    """Record tokens that enter the pipeline in the cache; their keys and values follow later."""
    segment, real_B = tail.tail, enters_B & (position_B >= 0)
    here_BS = enters_B[:, None] & (jnp.arange(tail.capacity) == slot)[None]

    def put(old_BS: jax.Array, new_B: jax.Array) -> jax.Array:
        return jnp.where(here_BS, new_B[:, None], old_BS)

    return tail.replace(
        tail=segment.replace(
            position_BS=put(segment.position_BS, position_B),
            token_BS=put(segment.token_BS, token_B),
            patched_BS=segment.patched_BS & ~here_BS,
        ),
        cursor=jnp.where(real_B.any(), jnp.maximum(tail.cursor, slot + 1), tail.cursor),
        next_position_B=jnp.where(real_B, position_B + 1, tail.next_position_B),
    )
