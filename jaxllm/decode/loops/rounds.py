"""Generation by a model in stages: as many groups of rows go round as there are stages.

The loop of `generate` takes a step of all rows after another, in which all stages but one wait.
Here it takes a tick of all stages, each with a group of rows of its own; a row's tokens, its keys
and the slots of its cache are those of that loop.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.cache.kv import KVCache, where_placed, where_read
from jaxllm.decode.loops.state import Fixed, State, sample
from jaxllm.decode.loops.text import Finish
from jaxllm.steps import Mass


def until_ended(
    model: Any, fixed: Fixed, tail: KVCache, state: State, attention_mass: Mass
) -> tuple[KVCache, State]:
    """As `state.until_ended` by a model `InRounds`, with room for all in the tail, and no mass."""
    rows = tail.batch
    group_B, start = jnp.asarray(model.groups(rows)), tail.cursor
    stages = model.stages

    def unfinished(carry: Any) -> jax.Array:
        return (carry[2].finish_B == Finish.RUNNING).any()

    def tick(carry: Any) -> Any:
        number, tail, state, flight, position_B = carry
        running_B = state.finish_B == Finish.RUNNING
        enters_B = group_B == number % stages
        position_B = jnp.where(enters_B, jnp.where(running_B, tail.next_position_B, -1), position_B)
        token_B = jnp.where(running_B, state.newest_B, 0)  # of rows that have ended: padding
        tail = _entered(tail, enters_B, position_B, token_B, start + number // stages)
        logits_BV, flight, segment = model.tick(
            fixed.params, (*fixed.frozen, tail.tail), flight, number, start, token_B, position_B
        )
        leaves_B = (group_B == (number + 1) % stages) & (number + 1 >= stages)
        others_B = jnp.where(leaves_B, state.finish_B, jnp.int32(Finish.STOP))
        drawn = sample(fixed.limits, state.replace(finish_B=others_B), logits_BV)
        state = jax.tree.map(lambda new, old: _chosen(leaves_B, new, old), drawn, state)
        return number + 1, tail.replace(tail=segment), state, flight, position_B

    begin = (
        jnp.zeros((), jnp.int32),
        tail,
        state,
        model.flight(rows),
        jnp.full((rows,), -1, jnp.int32),
    )
    _, tail, state, _, _ = jax.lax.while_loop(unfinished, tick, begin)
    return where_placed(tail, model), where_read(state, model)


def _entered(
    tail: KVCache, enters_B: jax.Array, position_B: jax.Array, token_B: jax.Array, slot: jax.Array
) -> KVCache:
    """The cache with what it says of the tokens that enter, but for their keys and values."""
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


def _chosen(rows_B: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """An array of the new state, of these rows alone. What is not by row does not change."""
    if new.ndim == 0 or new.shape[0] != rows_B.shape[0]:
        return new
    return jnp.where(rows_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)
