"""The loop that writes texts: `generate`, `stream`, `speculative_generate` and `serve` are settings
of it.

A round runs each row's newest token, and the tokens that a draft proposes after it, in one pass.
Each column's token is drawn as without a draft, and the row goes on with the next column while the
draft was right. So a draft changes nothing but the speed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.cache.commit import commit_state
from jaxllm.cache.kv import EMPTY, KVCache, Segment, cast_delta, replicate_for_host
from jaxllm.generation.loops.draft import (
    Acceptance,
    PromptLookup,
    by_rejection,
    choose_or_resample,
    last_tokens,
    propose_tokens,
)
from jaxllm.generation.loops.finish import NO_TOKEN, Finish, is_eos, mask_draft, put_rows, take_rows
from jaxllm.generation.loops.microbatch import Microbatch, run_tokens
from jaxllm.generation.loops.rows import Drawn, RowState, draw, live_rows
from jaxllm.models.sites import NO_EDITS, Edits
from jaxllm.ops.compile_cache import CachedJit
from jaxllm.ops.recurrent import map_rows
from jaxllm.ops.slot_update import NO_SLOT, write_slots
from jaxllm.ops.target import Program
from jaxllm.steps import MassMode, run_and_commit
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


class LoopPlan(NamedTuple):
    """Constants of a loop, compiled into its program.

    Attributes:
        model: Predicts the tokens.
        rounds: Maximum number of rounds in a call.
        source, width: A draft, and how many tokens it proposes.
        acceptance: As in `speculative_generate`.
        top: Number of likeliest tokens to return.
        processed: Whether to return the log-probabilities after processors.
        brief: Return log-probabilities alone: the tokens are in the rows' texts.
        attention_mass: As for `forward`; only with a cache.
        names: The sites to read in full; only by `run_round`, with a cache.
    """

    model: Model
    rounds: int = 1
    source: Model | PromptLookup | None = None
    width: int = 0
    acceptance: Acceptance = "text"
    top: int = 0
    processed: bool = False
    brief: bool = False
    attention_mass: MassMode = False
    names: tuple[str, ...] = ()


class LoopInputs(struct.PyTreeNode):
    """Arrays that a loop reads.

    Attributes:
        params, draft_params: The model's parameters, and those of the draft.
        frozen: The cache's segments apart from its tail.
        edits: Checked; of all cache rows.
        uses_KR: Which rows use which of stacked samplers, and which rows take part. None: all do,
            with one sampler.
        row_R: Cache rows, one beyond the last for padding; None for all rows in order.
        adapter_R: Adapter index of each row.
        page_RP: As in `Microbatch`.
        forced_RK: Tokens to take for a draft's.
        wants_top: Whether to find the likeliest tokens, bool; None: always.
    """

    params: Params
    draft_params: Params | None = None
    frozen: tuple[Segment, ...] = ()
    edits: Edits = NO_EDITS
    uses_KR: Any = None
    row_R: Any = None
    adapter_R: Any = None
    page_RP: Any = None
    forced_RK: Any = None
    wants_top: Any = None


class Tails(NamedTuple):
    """The caches that a loop writes: the model's, and the draft's.

    target: A cache without its frozen segments, in which all rows write at the cursor; or only its
        tail, in which a token's slot is its position.
    states: `KVCache.state` of both, the model's with a tail alone; within a loop, of its rows.
    """

    target: KVCache | Segment
    draft: Segment | None = None
    states: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())


class Round(NamedTuple):
    """A round's tokens, `[columns, R]`, the attention mass and the sites that it read."""

    drawn: Drawn
    mass: jax.Array | None
    sites: dict[str, jax.Array]


def run_round(
    plan: LoopPlan, inputs: LoopInputs, tails: Tails, rows: RowState
) -> tuple[Tails, RowState, Round]:
    """Run the newest token of each live row and a draft's after it; draw the tokens that follow."""
    target, draft_tail, (state, draft_state) = tails
    live_R, token_RT, q_KRV = live_rows(rows, inputs.uses_KR), last_tokens(rows.context, 1), None
    draft_RK, began_R = inputs.forced_RK, rows.context.length_B
    if plan.source is not None:
        draft_RK, q_KRV, draft_tail, draft_state = propose_tokens(
            plan.source, inputs.draft_params, draft_tail, draft_state, plan.width, inputs.row_R,
            rows, inputs.uses_KR, plan.model.config.vocab_size, plan.acceptance,
        )  # fmt: skip
    if draft_RK is not None:
        room_R = jnp.where(rows.retry_B, 0, rows.limit_B - rows.context.length_B - 1)
        draft_RK = mask_draft(draft_RK, room_R, is_eos(draft_RK, rows.eos_BE))
        token_RT = jnp.concatenate([token_RT, draft_RK], axis=1)
    real_RT = live_R[:, None] & (token_RT >= 0)
    at_1T, mass, sites = jnp.arange(token_RT.shape[1], dtype=jnp.int32)[None], None, {}
    if isinstance(target, KVCache):
        position_RT = jnp.where(real_RT, target.next_position_B[:, None] + at_1T, EMPTY)
        out = run_and_commit(
            plan.model, inputs.params, inputs.frozen, target, token_RT, position_RT, plan.names,
            attention_mass=plan.attention_mass, edits=inputs.edits,
        )  # fmt: skip
        target, mass, sites = out.cache, out.attention_mass, out.sites
        rows, drawn = _draw_columns(plan, inputs, rows, live_R, out.logits, token_RT, q_KRV)
    else:
        position_RT = jnp.where(real_RT, rows.context.length_B[:, None] - 1 + at_1T, EMPTY)
        logits_RTV, delta, waits = _run_columns(
            plan, inputs, tails, token_RT, position_RT, rows.context.length_B
        )
        rows, drawn = _draw_columns(plan, inputs, rows, live_R, logits_RTV, token_RT, q_KRV)
        ran_RT = jnp.where(drawn.valid_B.T, position_RT, EMPTY)
        slot_RT = jnp.where(ran_RT >= 0, ran_RT, NO_SLOT)
        state = commit_state(delta.state, ran_RT, waits)
        at_R = inputs.row_R if inputs.page_RP is None else inputs.page_RP
        target = write_slots(target, cast_delta(delta, target), slot_RT, at_R, wait_for=waits)
    if draft_state:  # the next round runs the last two tokens
        drafted_RT = began_R[:, None] - 2 + at_1T
        known_RT = drafted_RT < rows.context.length_B[:, None] - 2
        draft_state = commit_state(draft_state, jnp.where(known_RT, drafted_RT, EMPTY))
    return Tails(target, draft_tail, (state, draft_state)), rows, Round(drawn, mass, sites)


def _run_columns(
    plan: LoopPlan,
    inputs: LoopInputs,
    tails: Tails,
    token_RT: jax.Array,
    position_RT: jax.Array,
    length_R: jax.Array,
) -> Any:
    """Return the logits of all columns, the new keys and values, and what their write waits for."""
    places = Microbatch(
        row_R=inputs.row_R,
        token_RT=token_RT,
        position_RT=position_RT,
        slot_RT=None,
        length_R=length_R,
        column_R=None,
        adapter_R=inputs.adapter_R,
        edits=inputs.edits,
        page_RP=inputs.page_RP,
    )

    def run_all(places: Microbatch) -> Any:
        assert isinstance(tails.target, Segment)
        past = ((*inputs.frozen, tails.target), tails.states[0])
        return run_tokens(plan.model, inputs.params, *past, places)[:3]

    def widen(x: jax.Array, axis: int = 1) -> jax.Array:
        return jnp.pad(x, [(0, plan.width if i == axis else 0) for i in range(x.ndim)])

    def run_first(places: Microbatch) -> Any:
        first = {name: getattr(places, name)[:, :1] for name in ("token_RT", "position_RT")}
        logits_R1V, delta, _ = run_all(places.replace(**first))
        states = tuple(x and x.replace(rows=map_rows(widen, x.rows)) for x in delta.state)
        logits_RTV, wide = jax.tree.map(widen, (logits_R1V, delta.replace(state=())))
        return logits_RTV, wide.replace(state=states)

    if isinstance(plan.source, PromptLookup):  # often finds nothing; empty columns cost as much
        drafted_RK = position_RT[:, 1:] >= 0
        # What is written comes out of the conditional, in which all reads are.
        return *jax.lax.cond(drafted_RK.any(), lambda x: run_all(x)[:2], run_first, places), ()
    return run_all(places)


def _draw_columns(
    plan: LoopPlan,
    inputs: LoopInputs,
    rows: RowState,
    live_R: jax.Array,
    logits_RTV: jax.Array,
    token_RT: jax.Array,
    q_KRV: jax.Array | None,
) -> tuple[RowState, Drawn]:
    """Draw a token from each column, up to the first that is not the next column's."""
    finite_RT = jnp.isfinite(logits_RTV).all(axis=2)
    options: Any = {
        "top": plan.top, "wants_top": inputs.wants_top, "processed": plan.processed,
    }  # fmt: skip
    if token_RT.shape[1] == 1:
        rows, drawn, _ = draw(
            rows, inputs.uses_KR, live_R, logits_RTV[:, 0], finite_RT[:, 0], **options
        )
        return rows, jax.tree.map(lambda x: x[None], drawn)
    # A draft token's keys or values that are not finite may spoil the columns before it.
    real_RT, guesses = token_RT >= 0, plan.source is not None
    retry_R = live_R & real_RT[:, 1] & ~(finite_RT | ~real_RT).all(axis=1) & guesses
    draft_RT = jnp.pad(token_RT[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TOKEN)
    q_TRV = None if q_KRV is None else jnp.pad(q_KRV, ((0, 1), (0, 0), (0, 0)))
    resamples = by_rejection(rows, plan.acceptance)

    def draw_column(carry: Any, column: Any) -> Any:
        rows, going_R = carry
        logits_RV, finite_R, draft_R, q_RV = column
        choose = choose_or_resample(draft_R, q_RV) if resamples else None
        rows, drawn, _ = draw(
            rows, inputs.uses_KR, going_R, logits_RV, finite_R, choose=choose, **options
        )
        right_R = (draft_R >= 0) & (drawn.token_B == draft_R)
        return (rows, right_R & (drawn.finish_B == Finish.RUNNING)), drawn._replace(draft_B=draft_R)

    columns = (jnp.moveaxis(logits_RTV, 1, 0), finite_RT.T, draft_RT.T, q_TRV)
    (rows, _), drawn = jax.lax.scan(draw_column, (rows, live_R & ~retry_R), columns)
    return rows.replace(retry_B=retry_R), drawn


def run_rounds(
    plan: LoopPlan,
    inputs: LoopInputs,
    tails: Tails,
    rows: RowState,
    rounds: jax.Array,
    least_live: jax.Array,
    mass: jax.Array | None = None,
) -> tuple[Tails, RowState, jax.Array | None, jax.Array, Drawn]:
    """Run rounds while enough rows are live, and the cache has room.

    Args:
        tails: Its arrays are overwritten.
        rounds: At most `plan.rounds`, which is the size of the result.
        least_live: The loop stops when fewer rows are live.
        mass: Attention mass so far, to which that of the rounds is added.

    Returns:
        The new state and mass, the number of rounds, and the tokens of each round and column,
        `[rounds, columns, R]`.
    """
    whole_rows, whole_states = rows, tails.states
    rows, states = take_rows((rows, whole_states), inputs.row_R)
    tails = tails._replace(states=states)
    results = blank_results(plan, rows)

    def goes_on(carry: Any) -> jax.Array:
        i, tails, rows, *_ = carry
        enough = live_rows(rows, inputs.uses_KR).sum(dtype=jnp.int32) >= least_live
        going = (i < rounds) & enough
        if isinstance(tails.target, KVCache):
            going &= tails.target.cursor < tails.target.capacity
        return going

    def step(carry: Any) -> Any:
        i, tails, rows, mass, results = carry
        tails, rows, out = run_round(plan, inputs, tails, rows)
        mass = None if mass is None else mass + out.mass
        drawn = out.drawn.brief() if plan.brief else out.drawn
        results = jax.tree.map(lambda x, new: x.at[i].set(new), results, drawn)
        return i + 1, tails, rows, mass, results

    start = (jnp.zeros((), jnp.int32), tails, rows, mass, results)
    done, tails, rows, mass, results = jax.lax.while_loop(goes_on, step, start)
    rows, states = put_rows((whole_rows, whole_states), inputs.row_R, (rows, tails.states))
    tails = tails._replace(states=states)
    host = replicate_for_host((rows, done, results), plan.model)
    return tails, host[0], mass, *host[1:]


def blank_results(plan: LoopPlan, rows: RowState) -> Drawn:
    """Return what `plan.rounds` rounds have drawn before they run."""
    shape = (plan.rounds, plan.width + 1, *rows.finish_B.shape)
    number, token = jnp.zeros(shape), jnp.full(shape, NO_TOKEN, jnp.int32)
    top = (*shape, plan.top)
    drawn = Drawn(
        token_B=token,
        logprob_B=number,
        valid_B=number.astype(bool),
        finish_B=token,
        draft_B=token,
        top_token_BN=jnp.full(top, NO_TOKEN, jnp.int32) if plan.top else None,
        top_logprob_BN=jnp.zeros(top) if plan.top else None,
        processed_B=number if plan.processed else None,
    )
    return drawn.brief() if plan.brief else drawn


def _run_one_round(
    plan: LoopPlan, inputs: LoopInputs, tails: Tails, rows: RowState
) -> tuple[Tails, RowState, Round]:
    """Return what `run_round` returns, as one of several rounds: `[1, columns, R]`."""
    tails, rows, out = run_round(plan, inputs, tails, rows)
    drawn = out.drawn
    if inputs.forced_RK is None:
        drawn = drawn._replace(valid_B=None, finish_B=None, draft_B=None)
    out = out._replace(drawn=jax.tree.map(lambda x: x[None], drawn))
    return tails, *replicate_for_host((rows, out), plan.model)


ROUND = CachedJit(_run_one_round, static_argnums=(0,), donate_argnums=2)
ROUNDS = CachedJit(run_rounds, static_argnums=(0,), donate_argnums=2)
SERVED_ROUNDS = Program(run_rounds, static_argnums=0, donate_argnums=(2, 3))
