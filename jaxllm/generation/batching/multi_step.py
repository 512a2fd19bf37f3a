"""Multi-step decoding: several tokens for every active row in one compiled loop.

A round runs each row's newest token, and the tokens that a draft proposes after it, in one pass.
Each column's token is drawn as without a draft, and the row goes on with the next column while the
draft was right. Only tokens of the text enter the cache: a draft changes nothing but the speed.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import EMPTY, Segment, cast_delta
from jaxllm.cache.slot_update import NO_SLOT, write_slots
from jaxllm.generation.batching.batched_sampling import Drawn, Samplers, draw_by_kind
from jaxllm.generation.batching.drafting import catch_up, propose_tokens
from jaxllm.generation.batching.seats import (
    ServeState,
    StepSamples,
    kind_mask,
    read_sampled,
    top_width,
)
from jaxllm.generation.batching.slots import Microbatch, bucket_rows, row_adapters, run_tokens
from jaxllm.generation.loops.finish import NO_TOKEN, mask_draft, pad_eos_ids, put_rows, take_rows
from jaxllm.generation.loops.prompt_lookup import PromptLookup, last_tokens
from jaxllm.generation.sampling.sampler import Context
from jaxllm.models.sites import NO_EDITS, Edits
from jaxllm.ops.target import Program
from jaxllm.runtime.multihost import to_host
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


def plan_rounds(state: ServeState, burst: int, chunk: int) -> tuple[ServeState, int]:
    """Return how many rounds to run in one call; 0 for a step, if a row has a prompt to run or
    reads.

    A draft model first runs up to `chunk` tokens of the texts that it lacks.
    """
    seats, draft = state.active, state.draft
    watched = any(seat.request.until is not None for seat in seats.values())
    if not all(seat.can_burst for seat in seats.values()) or (watched and not draft.width):
        return state, 0
    if not draft.width:
        return state, burst
    lengths = {row: (seat.num_drafted, seat.num_run - 1) for row, seat in seats.items()}
    draft, ran = catch_up(draft, state.context.token_BL, lengths, chunk)
    seats = {row: dataclasses.replace(seat, num_drafted=ran[row]) for row, seat in seats.items()}
    lags = any(ran[row] < needed for row, (_, needed) in lengths.items())
    return state._replace(draft=draft, active=seats), 0 if lags else 1 if watched else burst


def run_burst(
    model: Model, params: Params, state: ServeState, burst: int, rounds: int, few_rows: bool
) -> tuple[ServeState, list[StepSamples]]:
    """Run several steps in one call, if all rows decode; stop when a row ends."""
    at, arguments = burst_arguments(model, params, state, burst, rounds, few_rows)
    done, results, tails, context, samplers = decode_burst(*arguments)
    count, arrays = to_host((done, results))
    steps = [
        {row: read_sampled(arrays, (i, j, r)) for row, r in at.items() if arrays.valid_B[i, j, r]}
        for i in range(count)
        for j in range(state.draft.width + 1)
    ]
    return state._replace(
        cache=state.cache.replace(tail=tails[0]),
        context=context,
        samplers=dict(zip(state.samplers, samplers, strict=True)),
        draft=state.draft.with_tail(tails[1]),
    ), steps


def burst_arguments(
    model: Model, params: Params, state: ServeState, burst: int, rounds: int, few_rows: bool
) -> tuple[dict[int, int], tuple[Any, ...]]:
    """Return the place of each row in a burst, and the arguments of `decode_burst`."""
    rows, seats, draft = state.cache.batch, state.active, state.draft
    R = min(bucket_rows(len(seats)), rows) if few_rows else rows
    row_R = None
    if rows > R:
        row_R = np.full(R, rows, np.int32)
        row_R[: len(seats)] = list(seats)
    at = {row: row if row_R is None else r for r, row in enumerate(seats)}
    widest = max(len(seat.request.eos_token_ids) for seat in seats.values())
    limit_R = np.zeros(R, np.int32)
    eos_RE = np.full((R, pad_eos_ids(range(widest)).size), NO_TOKEN, np.int32)
    for row, seat in seats.items():
        ids = pad_eos_ids(seat.request.eos_token_ids)
        limit_R[at[row]] = seat.prompt_T.size + seat.request.max_new_tokens
        eos_RE[at[row], : ids.size] = ids
    return at, (
        (state.cache.tail, draft.tail),
        state.context,
        tuple(state.samplers.values()),
        (model, draft.source),
        (params, draft.params),
        state.cache.frozen,
        row_R,
        kind_mask(state, at, R),
        limit_R,
        eos_RE,
        burst,
        draft.width,
        np.int32(rounds),
        row_adapters({at[row]: seat.request.adapter for row, seat in seats.items()}, R),
        top_width(model, seats),
        state.edits,
    )


@partial(Program, static_argnums=(3, 10, 11, 14), donate_argnums=(0, 1, 2))
def decode_burst(
    tails: tuple[Segment, Segment | None],
    context: Context,
    samplers: Samplers,
    models: tuple[Model, Model | PromptLookup | None],
    params: tuple[Params, Params | None],
    frozen: tuple[Segment, ...],
    row_R: jax.Array | None,
    kind_KR: jax.Array,
    limit_R: jax.Array,
    eos_RE: jax.Array,
    burst: int,
    width: int,
    rounds: jax.Array,
    adapter_R: jax.Array | None = None,
    top: int = 0,
    edits: Edits = NO_EDITS,
) -> tuple[jax.Array, Drawn, tuple[Segment, Segment | None], Context, Samplers]:
    """Decode up to `rounds` rounds in every live row; stop after the round in which a row ends.

    tails, models, params: the model's, and the draft's if it has any. frozen: the cache's other
    segments. row_R, adapter_R, edits: as in `Microbatch`. kind_KR: kinds of samplers; a row without
    one is not live. limit_R: length at which a row's text ends. rounds: at most `burst`, which is
    static, as are `width`, the number of tokens to propose, and `top`, as in `draw_by_kind`.
    Returns the number of rounds, `[]`, then the tokens of all rounds and columns, `[burst,
    width + 1, R]`, and the new state.
    """
    live_R = kind_KR.any(axis=0)
    model, source = models
    blank = jnp.zeros((burst, width + 1, *live_R.shape))
    whole, no = blank.astype(jnp.int32), blank.astype(bool)
    results = Drawn(whole, blank, no, draft_B=whole if width else None, valid_B=no)
    if top:
        blank = jnp.zeros((*blank.shape, top))
        results = results._replace(top_token_BN=blank.astype(jnp.int32), top_logprob_BN=blank)

    def is_unfinished(carry: Any) -> jax.Array:
        i, ended, *_ = carry
        going: jax.Array = (i < rounds) & ~ended
        return going

    def run_round(carry: Any) -> Any:
        i, _, results, (tail, its_tail), context, samplers = carry
        token_RT = last_tokens(context, 1)  # in the text, but has not run
        if source is not None:
            draft_RK, its_tail = propose_tokens(
                source, params[1], its_tail, width, row_R, context, samplers, kind_KR, limit_R,
                model.config.vocab_size,
            )  # fmt: skip
            ends_RK = (draft_RK[:, :, None] == eos_RE[:, None]).any(axis=2)
            draft_RK = mask_draft(draft_RK, limit_R - context.length_B - 1, ends_RK)
            token_RT = jnp.concatenate([token_RT, draft_RK], axis=1)
        at_RT = context.length_B[:, None] + jnp.arange(-1, width, dtype=jnp.int32)[None]
        places = Microbatch(
            row_R=row_R,
            token_RT=token_RT,
            position_RT=jnp.where(live_R[:, None] & (token_RT >= 0), at_RT, EMPTY),
            slot_RT=None,
            length_R=context.length_B,
            column_R=None,
            member_RB=None,
            adapter_R=adapter_R,
            edits=edits,
        )

        def run_columns(places: Microbatch) -> Any:
            segments = (*frozen, tail)
            return run_tokens(model, params[0], segments, places, None, "logits")[:3]

        def run_first_column(places: Microbatch) -> Any:
            token_R1, position_R1 = places.token_RT[:, :1], places.position_RT[:, :1]
            found = run_columns(places.replace(token_RT=token_R1, position_RT=position_R1))
            return jax.tree.map(
                lambda x: jnp.pad(x, ((0, 0), (0, width), *[(0, 0)] * (x.ndim - 2))), found
            )

        if isinstance(source, PromptLookup):  # often finds nothing, and empty columns cost as much
            out_RTV, delta, waits = jax.lax.cond(
                (token_RT[:, 1:] >= 0).any(), run_columns, run_first_column, places
            )
        else:
            out_RTV, delta, waits = run_columns(places)

        def draw_column(carry: Any, column: Any) -> Any:
            going_R, ended_R, context, samplers = carry
            out_RV, draft_R = column
            drawn, context, samplers = draw_by_kind(
                context, samplers, kind_KR & going_R[None], out_RV, top
            )
            ends_R = (drawn.token_B[:, None] == eos_RE).any(axis=1) | ~drawn.finite_B
            ends_R |= context.length_B >= limit_R
            drawn = drawn._replace(draft_B=draft_R if width else None, valid_B=going_R)
            ended_R |= going_R & ends_R
            going_R &= ~ends_R & (drawn.token_B == draft_R)
            return (going_R, ended_R, context, samplers), drawn

        draft_RT = jnp.pad(token_RT[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TOKEN)
        (_, ended_R, context, samplers), drawn = jax.lax.scan(
            draw_column,
            (live_R, jnp.zeros_like(live_R), context, samplers),
            (jnp.moveaxis(out_RTV, 1, 0), draft_RT.T),
        )
        slot_RT = jnp.where(drawn.valid_B.T, at_RT, NO_SLOT)
        tail = write_slots(tail, cast_delta(delta, tail), slot_RT, row_R, wait_for=waits)
        results = jax.tree.map(lambda x, new: x.at[i].set(new), results, drawn)
        return i + 1, ended_R.any(), results, (tail, its_tail), context, samplers

    start: Any = (jnp.zeros((), jnp.int32), jnp.zeros((), bool), results, tails)
    state = take_rows((context, samplers), row_R)
    loop: Any = jax.lax.while_loop(is_unfinished, run_round, (*start, *state))
    done, _, results, tails, *state = loop
    return done, results, tails, *put_rows((context, samplers), row_R, tuple(state))
