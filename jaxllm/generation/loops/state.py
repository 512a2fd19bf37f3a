"""State of a generation loop, and the pure functions that advance it.

`generate` compiles them: one step, the loop of steps, and (`pipelined`) the loop for a
pipelined model.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.cache.kv import KVCache, Segment, replicate_for_host
from jaxllm.generation.loops.finish import Finish, finish_reasons, set_column
from jaxllm.generation.sampling.sampler import Context, Sampler, apply_processors, draw_next
from jaxllm.models.sites import NO_EDITS, Edits
from jaxllm.ops.row_sums import log_softmax
from jaxllm.ops.token_logprobs import pick_token
from jaxllm.steps import MassMode, run_and_commit
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


class StopLimits(struct.PyTreeNode):
    """Stop conditions, constant over the loop.

    budget_B: maximum number of new tokens per row. eos_E: end-of-text ids, padded with -1.
    """

    budget_B: jax.Array
    eos_E: jax.Array


class LoopConstants(struct.PyTreeNode):
    """Loop constants.

    frozen: the cache's read-only segments, that is, all but its tail. edits: checked. names: the
    sites to read, in full; static.
    """

    params: Params
    frozen: tuple[Segment, ...]
    limits: StopLimits
    edits: Edits = NO_EDITS
    names: tuple[str, ...] = struct.field(pytree_node=False, default=())


class DecodeState(struct.PyTreeNode):
    """Loop state of each row, except the cache.

    newest_B: last token, not yet in the cache. finish_B: a `Finish`. context: text and random key;
    each step folds the text length into the key. logprob_BL, top_BLN: as in `GenerateResult`,
    indexed by position in the text; processed_BL likewise, or None. mass: accumulated attention
    mass. sites: what the newest step read.
    """

    newest_B: jax.Array
    finish_B: jax.Array
    context: Context
    sampler: Sampler
    logprob_BL: jax.Array
    top_BLN: tuple[jax.Array, jax.Array]
    mass: jax.Array | None
    processed_BL: jax.Array | None = None
    sites: dict[str, jax.Array] = struct.field(default_factory=dict)


def is_running(state: DecodeState) -> bool:
    """Return whether any row is still running."""
    return bool((np.asarray(state.finish_B) == Finish.RUNNING).any())


def sample(limits: StopLimits, state: DecodeState, logits_BV: jax.Array) -> DecodeState:
    """Sample a token for every running row, and update its finish reason."""
    context, finite_B = state.context, jnp.isfinite(logits_BV).all(axis=1)
    running_B = state.finish_B == Finish.RUNNING
    grows_B = running_B & finite_B
    key_B = jax.vmap(jax.random.fold_in)(context.key_B, context.length_B)
    now = context.replace(key_B=key_B)
    scores_BV = apply_processors(logits_BV, state.sampler, now)
    token_B, sampler = draw_next(scores_BV, state.sampler, now)
    logprob_BV = log_softmax(logits_BV)
    logprob_B, processed_BL = pick_token(logprob_BV, token_B), state.processed_BL
    before_B, length_B = context.length_B, context.length_B + grows_B.astype(jnp.int32)
    if processed_BL is not None:
        processed_B = pick_token(log_softmax(scores_BV), token_B)
        processed_BL = set_column(processed_BL, before_B, processed_B, grows_B)
    limit_B = context.prompt_B + limits.budget_B
    finish_B = finish_reasons(token_B, length_B, limit_B, limits.eos_E, finite_B)
    top = jax.lax.top_k(logprob_BV, state.top_BLN[0].shape[2])[::-1]
    return state.replace(
        newest_B=jnp.where(grows_B, token_B, state.newest_B),
        finish_B=jnp.where(running_B, finish_B, state.finish_B),
        context=context.replace(
            token_BL=set_column(context.token_BL, before_B, token_B, grows_B), length_B=length_B
        ),
        sampler=sampler,
        logprob_BL=set_column(state.logprob_BL, before_B, logprob_B, grows_B),
        processed_BL=processed_BL,
        top_BLN=tuple(
            set_column(old, before_B, new, grows_B)
            for old, new in zip(state.top_BLN, top, strict=True)
        ),
    )


def decode_and_sample(
    model: Model,
    constants: LoopConstants,
    tail: KVCache,
    state: DecodeState,
    attention_mass: MassMode,
) -> tuple[KVCache, DecodeState]:
    """Run and commit the newest tokens of running rows, then sample the next ones.

    The returned state's mass and sites are those of this step alone.
    """
    running_B = state.finish_B == Finish.RUNNING
    position_BT = jnp.where(running_B, tail.next_position_B, -1)[:, None]
    token_BT = state.newest_B[:, None]
    out = run_and_commit(
        model,
        constants.params,
        constants.frozen,
        tail,
        token_BT,
        position_BT,
        constants.names,
        attention_mass=attention_mass,
        edits=constants.edits,
    )
    state = state.replace(mass=out.attention_mass, sites=out.sites)
    state = sample(constants.limits, state, out.logits[:, 0])
    return out.cache, replicate_for_host(state, model)


def decode_forced(
    model: Model, constants: LoopConstants, tail: KVCache, state: DecodeState, token_BT: jax.Array
) -> tuple[KVCache, DecodeState]:
    """Run the newest tokens and those that a grammar forces after them in one pass; sample all.

    token_BT: the newest tokens and T - 1 forced ones. Each forced token is sampled from its own
    logits, of which the mask leaves it alone; so the state is that of T steps.
    """
    position_BT = (
        tail.next_position_B[:, None] + jnp.arange(token_BT.shape[1], dtype=jnp.int32)[None]
    )
    out = run_and_commit(
        model, constants.params, constants.frozen, tail, token_BT, position_BT,
        edits=constants.edits,
    )  # fmt: skip

    def sample_column(state: DecodeState, logits_BV: jax.Array) -> tuple[DecodeState, None]:
        return sample(constants.limits, state, logits_BV), None

    state, _ = jax.lax.scan(sample_column, state, jnp.moveaxis(out.logits, 1, 0))
    return out.cache, replicate_for_host(state, model)


def decode_until_done(
    model: Model,
    constants: LoopConstants,
    tail: KVCache,
    state: DecodeState,
    attention_mass: MassMode,
) -> tuple[KVCache, DecodeState]:
    """Run steps until every row has ended or the tail is full, accumulating the attention mass."""

    def is_unfinished(carry: tuple[KVCache, DecodeState]) -> jax.Array:
        tail, state = carry
        return (state.finish_B == Finish.RUNNING).any() & (tail.cursor < tail.capacity)

    def body(carry: tuple[KVCache, DecodeState]) -> tuple[KVCache, DecodeState]:
        tail, before = carry
        tail, state = decode_and_sample(model, constants, tail, before, attention_mass)
        if before.mass is not None and state.mass is not None:
            state = state.replace(mass=before.mass + state.mass)
        return tail, state

    tail, state = jax.lax.while_loop(is_unfinished, body, (tail, state))
    return tail, state
