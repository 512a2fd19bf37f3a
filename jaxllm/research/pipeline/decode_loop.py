"""Pipelined decoding: the rows are split into as many groups as there are pipeline stages.

In the plain loop of `generate` all stages but one are idle. Here, in each tick, every stage runs a
different group of rows. Tokens, random keys and cache slots are the same as in the plain loop.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache, constrain_cache, replicate_for_host
from jaxllm.generation.loops.draft import last_tokens
from jaxllm.generation.loops.rounds import LoopInputs, LoopPlan, Tails, blank_results
from jaxllm.generation.loops.rows import Drawn, RowState, draw, live_rows
from jaxllm.ops.compile_cache import CachedJit


def row_groups(model: Any, rows: int) -> np.ndarray | None:
    """Return the group of each row, int32 `[B]`; None if rows are not divisible into groups."""
    stages, devices = model.axes.stage, model.num_data_shards(rows)
    if model.chunks > 1 or rows % (devices * stages):
        return None
    size = rows // (devices * stages)
    return np.tile(np.repeat(np.arange(stages, dtype=np.int32), size), devices)


def run_pipelined(
    plan: LoopPlan, inputs: LoopInputs, tails: Tails, rows: RowState
) -> tuple[Tails, RowState, jax.Array, Drawn]:
    """Run `rounds.run_rounds` pipelined until all rows have ended; `row_groups` must be possible.

    The tail must have room for all tokens. The attention mass is not supported.
    """
    model: Any = plan.model
    tail, batch, stages = tails.target, rows.finish_B.shape[0], model.axes.stage
    assert isinstance(tail, KVCache)
    group_B, start = jnp.asarray(row_groups(model, batch)), tail.cursor

    def is_unfinished(carry: Any) -> jax.Array:
        return live_rows(carry[2], None).any()

    def tick(carry: Any) -> Any:
        number, tail, rows, results, flight, position_B = carry
        running_B = live_rows(rows, None)
        enters_B = group_B == number % stages
        position_B = jnp.where(enters_B, jnp.where(running_B, tail.next_position_B, -1), position_B)
        newest_B = last_tokens(rows.context, 1)[:, 0]
        token_B = jnp.where(running_B, newest_B, 0)  # 0 is padding for rows that have ended
        tail = _record_tokens(tail, enters_B, position_B, token_B, start + number // stages)
        logits_BV, flight, segment = model.run_tick(
            inputs.params, (*inputs.frozen, tail.tail), flight, number, start, token_B, position_B
        )
        leaves_B = running_B & (group_B == (number + 1) % stages) & (number + 1 >= stages)
        finite_B = jnp.isfinite(logits_BV).all(axis=1)
        rows, drawn, _ = draw(
            rows, None, leaves_B, logits_BV, finite_B, top=plan.top, processed=plan.processed
        )
        done = jnp.maximum((number + 1) // stages - 1, 0)  # rounds of the rows that leave
        put = partial(_put_round, done=done, leaves_B=leaves_B)
        results = jax.tree.map(put, results, drawn.brief() if plan.brief else drawn)
        return number + 1, tail.replace(tail=segment), rows, results, flight, position_B

    begin = (
        jnp.zeros((), jnp.int32),
        tail,
        rows,
        blank_results(plan, rows),
        model.empty_pipeline(batch),
        jnp.full((batch,), -1, jnp.int32),
    )
    number, tail, rows, results, *_ = jax.lax.while_loop(is_unfinished, tick, begin)
    host = replicate_for_host((rows, -(-number // stages), results), model)
    return Tails(constrain_cache(tail, model)), *host


def _put_round(x: jax.Array, new: jax.Array, *, done: jax.Array, leaves_B: jax.Array) -> jax.Array:
    """Set a round's only column in the rows that leave the pipeline."""
    where = leaves_B.reshape(-1, *[1] * (new.ndim - 1))
    return x.at[done, 0].set(jnp.where(where, new, x[done, 0]))


def _record_tokens(
    tail: KVCache, enters_B: jax.Array, position_B: jax.Array, token_B: jax.Array, slot: jax.Array
) -> KVCache:
    """Record tokens that enter the pipeline in the cache; their keys and values follow later."""
    segment, real_B = tail.tail, enters_B & (position_B >= 0)
    is_target_BS = enters_B[:, None] & (jnp.arange(tail.capacity) == slot)[None]

    def put(old_BS: jax.Array, new_B: jax.Array) -> jax.Array:
        return jnp.where(is_target_BS, new_B[:, None], old_BS)

    return tail.replace(
        tail=segment.replace(
            position_BS=put(segment.position_BS, position_B),
            token_BS=put(segment.token_BS, token_B),
            patched_BS=segment.patched_BS & ~is_target_BS,
        ),
        cursor=jnp.where(real_B.any(), jnp.maximum(tail.cursor, slot + 1), tail.cursor),
        next_position_B=jnp.where(real_B, position_B + 1, tail.next_position_B),
    )


PIPELINED_ROUNDS = CachedJit(run_pipelined, static_argnums=(0,), donate_argnums=2)
