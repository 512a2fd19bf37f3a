"""Beam search in one compiled loop.

Each prompt is prefilled once. Its N beams share that cache, each with its own tail, and every step
reorders the tails with `select`. Scores, length penalty and stopping conditions are those of
transformers' `generate(num_beams=N)`, but excluded candidates score -inf instead of -1e9.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.cache.batch_ops import select
from jaxllm.cache.commit import apply_delta
from jaxllm.cache.kv import KVCache, cache_nbytes, check_usable, constrain_cache, init_cache
from jaxllm.cache.operations import slot_order
from jaxllm.errors import SamplingError
from jaxllm.files import check_memory
from jaxllm.generation.loops.capacity import check_continuation
from jaxllm.generation.loops.finish import NO_TOKEN, Finish, check_positions, pad_eos_ids
from jaxllm.generation.sampling.sampler import (
    GREEDY,
    Context,
    Processor,
    Sampler,
    apply_processors,
    check_sampler,
)
from jaxllm.models.inputs import check_model, check_prompts
from jaxllm.ops.padding import bucket_size
from jaxllm.ops.row_sums import log_softmax
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int, is_number
from jaxllm.steps import prefill, run_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

EarlyStopping = bool | Literal["never"]
# Each beam's text before the search, [R, L], and length, [R].
BeamText = tuple[jax.Array, jax.Array]


class BeamResult(struct.PyTreeNode):
    """Each prompt's finished sequences, best first; N is `num_return_sequences`.

    A prompt with fewer than N continuations has sequences of length 0 with score -inf and finish
    RUNNING. A prompt whose logits are not finite keeps its finished sequences and has finish
    NON_FINITE.

    Attributes:
        token_BNT: int32 `[B, N, max_new_tokens]`, -1 after a sequence's end; includes end-of-text
            tokens.
        score_BN: float32, the sum of the log-probabilities after the processors, divided by
            `length ** length_penalty`.
        length_BN: Number of tokens.
        finish_BN: A `Finish`.
    """

    token_BNT: jax.Array
    score_BN: jax.Array
    length_BN: jax.Array
    finish_BN: jax.Array


class StopCriteria(struct.PyTreeNode):
    """Stopping criteria, constant over the search.

    budget, length_penalty: scalars. eos_E: end-of-text ids, padded with -1. stop_when_full,
    assume_max_length: bool scalars for `early_stopping` True and "never".
    """

    budget: jax.Array
    length_penalty: jax.Array
    eos_E: jax.Array
    stop_when_full: jax.Array
    assume_max_length: jax.Array


class SearchState(struct.PyTreeNode):
    """State of the search; R = B x N rows, with a prompt's beams adjacent.

    step: number of tokens of each running beam. token_BNT, score_BN: these tokens and the sums of
    their log-probabilities, best first; -inf is no beam. parent_R: the row that each beam extended
    in the last step. finished: the best finished sequences. done_B: whether a
    prompt's search has ended.
    """

    step: jax.Array
    token_BNT: jax.Array
    score_BN: jax.Array
    parent_R: jax.Array
    finished: BeamResult
    done_B: jax.Array
    sampler: Sampler


def beam_search(
    model: Model,
    params: Params,
    tokens_BT: Any,
    *,
    num_beams: int,
    max_new_tokens: int,
    num_return_sequences: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    eos_token_ids: Sequence[int] = (),
    lengths_B: Any = None,
    sampler: Sampler = GREEDY,
    cache: KVCache | None = None,
    chunk: int | None = None,
) -> BeamResult:
    """Return the best continuations of each prompt `[B, T]`, found with `num_beams` beams.

    The beams of a single prompt share its cache; with several prompts, each beam gets a copy. Only
    new shapes and values of num_beams compile; other options and lengths within a bucket do not.

    Args:
        length_penalty: A sequence's score is its log-probability / `length ** length_penalty`, so
            values above 0 favor long sequences.
        early_stopping: When to end a prompt's search after `num_beams` sequences have finished.
            True: at once. False: when the best beam, at its current length, does not beat the worst
            of them. "never": when it cannot beat it at any length. One beam is greedy decoding.
        lengths_B: Prompt lengths, if the prompts are padded on the right.
        sampler: Its processors change the log-probabilities; nothing is drawn.
        cache: A cache that the prompts continue, with room for them; it stays valid.
        chunk: As for `prefill`.

    Raises:
        SamplingError: For an option out of range.
        CapacityError: If prompt and new tokens exceed the model's positions.
        JaxllmError: Whatever else `prefill` raises.
    """
    check_model(model, params)
    check_sampler(sampler)
    if cache is not None:
        check_usable(cache)
    _check_options(num_beams, max_new_tokens, num_return_sequences, length_penalty, early_stopping)
    tokens_BT, lengths_B = check_prompts(model.config, tokens_BT, lengths_B)
    B, T = tokens_BT.shape
    start = 0 if cache is None else int(np.max(cache.next_position_B))
    needed = start + T + max_new_tokens - 1  # the last token never runs
    check_positions(needed, model.config)
    check_continuation(model, cache, lengths_B, max_new_tokens)
    R, width = B * num_beams, bucket_size(max_new_tokens)
    dtype = model.precision.cache if cache is None else cache.dtype
    check_memory(
        cache_nbytes(model.config, R, width, dtype) + 8 * R * model.config.vocab_size,
        f"{num_beams:,} beams of up to {max_new_tokens:,} tokens",
    )
    fresh = cache is None
    if cache is None:
        cache = init_cache(model, B, bucket_size(T))
    out = prefill(model, params, cache, tokens_BT, lengths_B=lengths_B, chunk=chunk, donate=fresh)
    values = (
        np.int32(max_new_tokens),
        np.float32(length_penalty),
        pad_eos_ids(eos_token_ids),
        np.bool_(early_stopping is True or num_beams == 1),
        np.bool_(early_stopping == "never"),
    )
    criteria = StopCriteria(*jax.device_put(values))
    result = _run_search(model, params, out.cache, criteria, sampler, out.logits, num_beams, width)
    # On the host: a JAX slice would compile.
    n, result = num_return_sequences, to_host(result)
    cut: BeamResult = jax.tree.map(lambda x: x[:, :n], result)
    return jax.device_put(cut.replace(token_BNT=cut.token_BNT[:, :, :max_new_tokens]))


@partial(jax.jit, static_argnums=(0, 6, 7))
def _run_search(
    model: Model,
    params: Params,
    cache: KVCache,
    criteria: StopCriteria,
    sampler: Sampler,
    logits_BV: jax.Array,
    num_beams: int,
    width: int,
) -> BeamResult:
    """Search from the prompts' caches and last logits; return all `num_beams` results, `[B, N]`."""
    B, N = cache.batch, num_beams
    text = _beam_text(cache, N, width)
    score_BN = jnp.full((B, N), -jnp.inf, jnp.float32)
    blank_BNT = jnp.full((B, N, width), NO_TOKEN, jnp.int32)
    zeros_BN = jnp.zeros((B, N), jnp.int32)
    search = SearchState(
        step=jnp.zeros((), jnp.int32),
        token_BNT=blank_BNT,
        score_BN=score_BN.at[:, 0].set(0.0),  # N equal beams would find each sequence N times
        parent_R=jnp.arange(B * N, dtype=jnp.int32),
        finished=BeamResult(blank_BNT, score_BN, zeros_BN, zeros_BN + Finish.RUNNING),
        done_B=jnp.zeros((B,), bool),
        sampler=_repeat_sampler(sampler, B, N),
    )
    search = _extend_beams(criteria, text, search, jnp.repeat(logits_BV, N, axis=0))
    frozen, tail = _make_beam_cache(model, cache, N, width)

    def is_unfinished(carry: tuple[KVCache, SearchState]) -> jax.Array:
        return (carry[1].step < criteria.budget) & ~carry[1].done_B.all()

    def body(carry: tuple[KVCache, SearchState]) -> tuple[KVCache, SearchState]:
        tail, search = carry
        tail = select(tail, search.parent_R)
        newest_BN = jax.lax.dynamic_index_in_dim(search.token_BNT, search.step - 1, 2, False)
        running_R = jnp.repeat(~search.done_B, N)
        position_RT = jnp.where(running_R, tail.next_position_B, -1)[:, None]
        segments, token_RT = (*frozen, tail.tail), newest_BN.reshape(-1, 1)
        trace, delta, _ = run_model(model, params, segments, token_RT, position_RT)
        return constrain_cache(apply_delta(tail, delta), model), _extend_beams(
            criteria, text, search, trace.logits[:, 0]
        )

    return jax.lax.while_loop(is_unfinished, body, (tail, search))[1].finished


def _extend_beams(
    criteria: StopCriteria, text: BeamText, search: SearchState, logits_RV: jax.Array
) -> SearchState:
    """Extend every beam by a token: record the best that end, continue the best that do not."""
    B, N = search.score_BN.shape
    V = logits_RV.shape[-1]
    length = search.step + 1
    exists_R = search.score_BN.reshape(-1) > -jnp.inf
    finite_R = jnp.isfinite(logits_RV).all(axis=1) | ~exists_R
    broken_B = ~finite_R.reshape(B, N).all(axis=1) & ~search.done_B
    scores_RV = log_softmax(logits_RV)
    if search.sampler.processors:
        scores_RV = apply_processors(scores_RV, search.sampler, _context(text, search))
    scores_RV = jnp.where((exists_R & finite_R)[:, None], scores_RV, -jnp.inf)
    total_BNV = scores_RV.reshape(B, N, V) + search.score_BN[:, :, None]
    ends_V = (jnp.arange(V, dtype=jnp.int32)[:, None] == criteria.eos_E[None]).any(axis=1)

    # Only the N best candidates may finish; finished ones are not extended.
    score_BN, beam_BN, token_BN = _top_candidates(total_BNV, N)
    eos_BN = ends_V[token_BN]
    ended_BN = (eos_BN | (length >= criteria.budget)) & ~(search.done_B | broken_B)[:, None]
    penalty = length.astype(jnp.float32) ** criteria.length_penalty
    new = BeamResult(
        _append_tokens(search, beam_BN, token_BN),
        jnp.where(ended_BN, score_BN / penalty, -jnp.inf),
        jnp.where(ended_BN, length, 0),
        jnp.where(eos_BN, jnp.int32(Finish.EOS), jnp.int32(Finish.LENGTH)),
    )
    both: BeamResult = jax.tree.map(
        lambda old, new: jnp.concatenate([old, new], axis=1), search.finished, new
    )
    _, at_BN = jax.lax.top_k(both.score_BN, N)  # old sequences come first, so they win ties
    finished: BeamResult = jax.tree.map(lambda x: _take_beams(x, at_BN), both)
    finished = finished.replace(
        finish_BN=jnp.where(broken_B[:, None], jnp.int32(Finish.NON_FINITE), finished.finish_BN)
    )

    score_BN, beam_BN, token_BN = _top_candidates(
        jnp.where(ends_V[None, None], -jnp.inf, total_BNV), N
    )
    parent_R = (beam_BN + N * jnp.arange(B, dtype=jnp.int32)[:, None]).reshape(-1)
    ahead = criteria.assume_max_length & (criteria.length_penalty > 0)
    reached = jnp.where(ahead, criteria.budget, length).astype(jnp.float32)
    hope_B = score_BN[:, 0] / reached**criteria.length_penalty
    worst_B = finished.score_BN[:, -1]  # -inf until N have finished
    done_B = (hope_B <= worst_B) | (criteria.stop_when_full & (worst_B > -jnp.inf))
    return SearchState(
        step=length,
        token_BNT=_append_tokens(search, beam_BN, token_BN),
        score_BN=score_BN,
        parent_R=parent_R,
        finished=finished,
        done_B=search.done_B | broken_B | done_B,
        sampler=_reorder_sampler(search.sampler, parent_R, scores_RV, token_BN.reshape(-1)),
    )


def _top_candidates(total_BNV: jax.Array, n: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return scores, beams and tokens of each prompt's n best candidates; ties go to the first."""
    B, N, V = total_BNV.shape
    score_Bn, at_Bn = jax.lax.top_k(total_BNV.reshape(B, N * V), n)
    return score_Bn, at_Bn // V, at_Bn % V


def _append_tokens(search: SearchState, beam_BN: jax.Array, token_BN: jax.Array) -> jax.Array:
    """Append a token to each selected beam."""
    is_new_T = jnp.arange(search.token_BNT.shape[-1], dtype=jnp.int32) == search.step
    return jnp.where(
        is_new_T[None, None], token_BN[:, :, None], _take_beams(search.token_BNT, beam_BN)
    )


def _take_beams(x_BMX: jax.Array, at_BN: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BMX, at_BN.reshape(*at_BN.shape, *[1] * (x_BMX.ndim - 2)), axis=1)


def _make_beam_cache(model: Model, cache: KVCache, N: int, width: int) -> tuple[Any, KVCache]:
    """Return the prompts' segments for B x N rows, and a cache with an empty tail per row.

    A segment has one row, shared by all rows, or a row for each. So the beams of a single prompt
    share it, while several prompts are copied once for each of their beams.
    """
    B = cache.batch
    rows = jnp.repeat(jnp.arange(B), N)
    frozen = cache.segments if B == 1 else select(cache, rows).segments
    tail = init_cache(model, B * N, width, dtype=cache.dtype)
    return frozen, tail.replace(next_position_B=cache.next_position_B[rows])


def _beam_text(cache: KVCache, N: int, room: int) -> BeamText:
    """Return each beam's text, padded with -1 and with `room` for more, int32 `[R, L]`; lengths."""
    token_BS = jnp.where(cache.position_BS >= 0, cache.token_BS, NO_TOKEN)
    text_BS = jnp.take_along_axis(token_BS, slot_order(cache), axis=1)
    text_BL = jnp.pad(text_BS, ((0, 0), (0, room)), constant_values=NO_TOKEN)
    return jnp.repeat(text_BL, N, axis=0), jnp.repeat(cache.length_B, N)


def _context(text: BeamText, search: SearchState) -> Context:
    """Return the processors' context: prompt and tokens of every beam."""
    text_RL, prompt_R = text
    token_RT = search.token_BNT.reshape(prompt_R.shape[0], -1)
    R, T = token_RT.shape
    at_RT = prompt_R[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    token_RL = text_RL.at[jnp.arange(R)[:, None], at_RT].set(token_RT, mode="drop")
    key_R = jax.random.split(jax.random.key(0), R)  # required by the context; nothing is drawn
    return Context(token_RL, prompt_R, prompt_R + search.step, key_R)


def _repeat_sampler(sampler: Sampler, B: int, N: int) -> Sampler:
    """Repeat the sampler's per-prompt values for each beam, B x N rows."""

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, N, axis=0) if x.ndim and x.shape[0] == B else x

    repeated: Sampler = jax.tree.map(repeat, sampler)
    return repeated


def _reorder_sampler(
    sampler: Sampler, parent_R: jax.Array, scores_RV: jax.Array, token_R: jax.Array
) -> Sampler:
    """Return the next step's sampler: each beam inherits its parent's processor state."""
    R = parent_R.shape[0]

    def follow_parent(processor: Processor) -> Processor:
        if type(processor).observe is Processor.observe:  # stateless
            return processor
        remembered: Processor = jax.tree.map(
            lambda x: x[parent_R] if x.ndim and x.shape[0] == R else x, processor
        )
        return remembered.observe(scores_RV[parent_R], token_R)

    return sampler.replace(processors=tuple(follow_parent(p) for p in sampler.processors))


def _check_options(
    num_beams: int,
    max_new_tokens: int,
    num_return_sequences: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> None:
    """Raise SamplingError for an option out of range."""
    check_int("num_beams", num_beams, 1)
    check_int("max_new_tokens", max_new_tokens, 1)
    check_int("num_return_sequences", num_return_sequences, 1)
    if num_return_sequences > num_beams:
        raise SamplingError(
            f"num_return_sequences is {num_return_sequences}, more than num_beams, {num_beams}"
        )
    if not is_number(length_penalty) or not math.isfinite(length_penalty):
        raise SamplingError(f"length_penalty must be a finite number, got {length_penalty!r}")
    if abs(length_penalty) * math.log(max_new_tokens) > 80:  # exp(80) is finite in float32
        raise SamplingError(
            f"length_penalty {length_penalty} is out of range: {max_new_tokens} to this power"
            " overflows float32"
        )
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise SamplingError(
            f"early_stopping must be False, True or 'never', got {early_stopping!r:.40}"
        )
