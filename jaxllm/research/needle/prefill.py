"""Chunked prefill of long texts into a bounded cache, and scoring of answers against it.

If a chunk does not fit, a policy (`generation.loops.overflow`) makes room, as in generation. If the
cache holds the whole text, rotary angles that depend on the text length are those of the whole text
from the first chunk on.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache, init_cache
from jaxllm.errors import CapacityError, NonFiniteError
from jaxllm.generation.loops.overflow import OverflowPolicy, OverflowState, make_room
from jaxllm.generation.sampling.sampler import Context
from jaxllm.ops.padding import bucket_size, pad_rows
from jaxllm.ops.token_logprobs import log_likelihood
from jaxllm.research.long_attention.segments import DropSegments
from jaxllm.steps import StepOutput, run_and_commit, run_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

PREFILL_CHUNK = 256  # tokens per chunk, if they fit


class PrefillState(NamedTuple):
    """The state after prefill. logits_BV: of the next token. length_B: lengths of the texts."""

    logits_BV: jax.Array
    cache: KVCache
    length_B: np.ndarray


def prefill_texts(
    model: Model,
    params: Params,
    rows: Sequence[Sequence[int]],
    *,
    policy: OverflowPolicy | None = None,
    slots: int | None = None,
    answer_tokens: int = 0,
) -> PrefillState:
    """Prefill one text per row.

    Args:
        policy: Makes room in the cache; without one, the cache has a slot for each token.
        slots: Cache size with a policy.
        answer_tokens: Number of tokens that answers will need later.

    Raises:
        CapacityError: If texts exceed the model's positions and no policy makes room, or if the
            policy leaves no free slots.
    """
    length_B = np.array([len(row) for row in rows], np.int32)
    longest = int(length_B.max())
    if policy is None:
        _check_positions(model, longest + answer_tokens)
        slots = bucket_size(longest)
        piece = min(PREFILL_CHUNK, slots)
        slots += piece  # left padding takes slots too
    else:
        assert slots is not None
        _check_positions(model, slots + answer_tokens)
        free = slots - occupied_slots(model, policy, slots)
        border = model.config.original_context or model.config.max_position_embeddings
        if model.config.rope_depends_on_length and slots + answer_tokens > border:
            raise CapacityError(
                f"cache too large: got {slots + answer_tokens} slots with answers, expected at most"
                f" {border}: beyond that this model changes its rotary frequencies, and cached keys"
                " cannot be re-rotated"
            )
        piece = 1 << (min(PREFILL_CHUNK, free).bit_length() - 1)
    # Pad on the left, so that all chunks have the same size and all rows end together.
    width = -(-longest // piece) * piece
    token_BT = pad_rows(rows, width=width, left=True)
    real_BT = np.arange(width)[None] >= width - length_B[:, None]
    mass: Any = policy is not None and policy.reads_mass
    cache = init_cache(model, len(rows), slots)
    total = jnp.zeros((len(rows), slots), jnp.float32) if mass else None
    # A policy may change positions; then the text length follows from the positions.
    whole_B = jnp.asarray(length_B + answer_tokens) if policy is None else None
    for start in range(0, width, piece):
        if policy is not None and int(cache.cursor) + piece > slots:
            context = _sampler_context(rows, real_BT[:, :start].sum(axis=1))
            cache, total = make_room(policy, OverflowState(model, params, cache, context, total))
        chunk_BT = real_BT[:, start : start + piece]
        after_BT = np.cumsum(chunk_BT, axis=1) - 1
        position_BT = np.where(chunk_BT, np.asarray(cache.next_position_B)[:, None] + after_BT, -1)
        out = _prefill_chunk(
            model,
            params,
            cache,
            token_BT[:, start : start + piece],
            position_BT.astype(np.int32),
            whole_B,
            mass,
        )
        cache, total = out.cache, None if total is None else total + out.attention_mass
    if not np.isfinite(np.asarray(out.logits)).all():
        raise NonFiniteError("the model returned NaN or infinite logits")
    return PrefillState(out.logits, cache, length_B)


def occupied_slots(model: Model, policy: OverflowPolicy, slots: int) -> int:
    """Return the maximum number of slots that are still occupied after a policy made room.

    Raises CapacityError if these are all slots, ConfigError for segments with a model without them.
    """
    policy.check(model.config, slots)
    length = model.config.segment_length
    if isinstance(policy, DropSegments) and length is not None:
        return int(length)
    return policy.max_kept(slots)


class AnswerScores(NamedTuple):
    """Scores of C answers. logprob_BC: log-probability, natural logarithm. greedy_BC: whether
    greedy decoding generates the answer.
    """

    logprob_BC: np.ndarray
    greedy_BC: np.ndarray


def score_answers(
    model: Model,
    params: Params,
    prefilled: PrefillState,
    answers: Sequence[Sequence[Sequence[int]]],
    *,
    policy: OverflowPolicy | None,
    answer_tokens: int,
) -> AnswerScores:
    """Score answers against a cache, without changing it.

    answers: token ids, by row and answer. policy, answer_tokens: as passed to `prefill_texts`.
    """
    B, C = len(answers), len(answers[0])
    length_BC = np.array([[len(ids) for ids in row] for row in answers])
    width = int(length_BC.max())
    token_BCA = pad_rows([ids for row in answers for ids in row], width=width).reshape(B, C, width)
    logits_BV = np.asarray(prefilled.logits_BV, np.float64)
    top_B1 = logits_BV.max(axis=1, keepdims=True)
    total_B1 = top_B1 + np.log(np.exp(logits_BV - top_B1).sum(axis=1, keepdims=True))
    logprob_BC = np.take_along_axis(logits_BV, token_BCA[:, :, 0], axis=1) - total_B1
    greedy_BC = token_BCA[:, :, 0] == logits_BV.argmax(axis=1)[:, None]
    if width == 1:
        return AnswerScores(logprob_BC, greedy_BC)
    start_B1 = np.asarray(prefilled.cache.next_position_B)[:, None]
    whole_B = jnp.asarray(prefilled.length_B + answer_tokens) if policy is None else None
    column = np.arange(width - 1)[None]
    for c in range(C):
        is_real_BA = column < length_BC[:, c, None] - 1
        position_BA = np.where(is_real_BA, start_B1 + column, -1).astype(np.int32)
        more, likeliest = _score_rest(
            model, params, prefilled.cache, token_BCA[:, c], position_BA, whole_B
        )
        logprob_BC[:, c] += np.where(is_real_BA, np.asarray(more, np.float64), 0).sum(axis=1)
        greedy_BC[:, c] &= (np.asarray(likeliest) | ~is_real_BA).all(axis=1)
    return AnswerScores(logprob_BC, greedy_BC)


@partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def _prefill_chunk(
    model: Model,
    params: Params,
    cache: KVCache,
    token_BT: jax.Array,
    position_BT: jax.Array,
    total_B: jax.Array | None,
    mass: bool,
) -> StepOutput:
    """Run one chunk; the last token of every row is in the last column."""
    last_B = jnp.full((token_BT.shape[0],), token_BT.shape[1] - 1)
    out = run_and_commit(
        model,
        params,
        (),
        cache,
        token_BT,
        position_BT,
        length_B=total_B,
        column_B=last_B,
        attention_mass=mass,
    )
    return out.replace(logits=out.logits[:, 0])


@partial(jax.jit, static_argnums=0)
def _score_rest(
    model: Model,
    params: Params,
    cache: KVCache,
    token_BA: jax.Array,
    position_BA: jax.Array,
    total_B: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Score an answer's tokens but the first: log-probability, and whether it is most likely."""
    trace, _, _ = run_model(
        model.with_sharded_logits(),
        params,
        cache.segments,
        token_BA[:, :-1],
        position_BA,
        length_B=total_B,
        state=cache.state,
    )
    target = token_BA[:, 1:]
    return log_likelihood(trace.logits, target), jnp.argmax(trace.logits, axis=-1) == target


def _sampler_context(rows: Sequence[Sequence[int]], read_B: np.ndarray) -> Context:
    """Return the context for a policy: the tokens read so far of each row, and the next one."""
    texts = [row[: n + 1] for row, n in zip(rows, read_B, strict=True)]
    context = Context.empty(jax.random.key(0), len(rows))
    width = bucket_size(max(map(len, texts)))
    return context.replace(
        token_BL=jnp.asarray(pad_rows(texts, width=width, fill=-1)),
        length_B=jnp.asarray(read_B + 1, jnp.int32),
    )


def _check_positions(model: Model, length: int) -> None:
    config = model.config
    if length > config.position_limit:
        raise CapacityError(
            f"text is too long: got {length} tokens with answers, {config.model_type} has"
            f" {config.position_limit} positions. Use shorter texts, or a policy such as slide"
        )
