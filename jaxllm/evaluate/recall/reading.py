"""Chunked prefill of long texts into a bounded cache, and scoring of answers against it.

If a chunk does not fit, a policy (`decode.loops.overflow`) makes room, as in generation. If the
cache holds the whole text, rotary angles that depend on the text length are those of the whole text
from the first chunk on.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache, init_cache
from jaxllm.decode.loops.overflow import Full, Overflow, Segments, check_policy, made_room
from jaxllm.decode.sampling.sampler import Context
from jaxllm.errors import CapacityError, NonFiniteError
from jaxllm.ops.likelihood import log_likelihood
from jaxllm.shapes import bucket, pad_rows
from jaxllm.steps import run, run_and_commit
from jaxllm.weights.paths import Params, for_sums

PIECE = 256  # tokens per chunk, if they fit


class Read(NamedTuple):
    """The state after prefill. logits_BV: of the next token. length_B: lengths of the texts."""

    logits_BV: jax.Array
    cache: KVCache
    length_B: np.ndarray


def read(
    model: nn.Module,
    params: Params,
    rows: Sequence[Sequence[int]],
    *,
    policy: Overflow | None = None,
    slots: int | None = None,
    room: int = 0,
) -> Read:
    """Prefill one text per row.

    Args:
        policy: Makes room in the cache; without one, the cache has a slot for each token.
        slots: Cache size with a policy.
        room: Number of tokens that answers will need later.

    Raises:
        CapacityError: If texts exceed the model's positions and no policy makes room, or if the
            policy leaves no free slots.
    """
    length_B = np.array([len(row) for row in rows], np.int32)
    longest = int(length_B.max())
    if policy is None:
        _check_positions(model, longest + room)
        slots = bucket(longest)
        piece = min(PIECE, slots)
        slots += piece  # left padding takes slots too
    else:
        assert slots is not None
        _check_positions(model, slots + room)
        _check_angles(model, slots + room)
        piece = _power_below(min(PIECE, slots - taken(model, policy, slots)))
    # Pad on the left, so that all chunks have the same size and all rows end together.
    width = -(-longest // piece) * piece
    token_BT = pad_rows(rows, width=width, left=True)
    real_BT = np.arange(width)[None] >= width - length_B[:, None]
    mass: Any = policy is not None and policy.reads_mass
    cache = init_cache(model, len(rows), slots)
    total = jnp.zeros((len(rows), slots), jnp.float32) if mass else None
    logits_BV = jnp.zeros((len(rows), 0))
    # A policy may change positions; then the text length follows from the positions.
    whole_B = jnp.asarray(length_B + room) if policy is None else None
    for start in range(0, width, piece):
        if policy is not None and int(cache.cursor) + piece > slots:
            context = _context(rows, real_BT[:, :start].sum(axis=1))
            cache, total = made_room(policy, Full(model, params, cache, context, total))
        here_BT = real_BT[:, start : start + piece]
        after_BT = np.cumsum(here_BT, axis=1) - 1
        position_BT = np.where(here_BT, np.asarray(cache.next_position_B)[:, None] + after_BT, -1)
        logits_BV, tail, received = _piece(
            model,
            params,
            cache,
            token_BT[:, start : start + piece],
            position_BT.astype(np.int32),
            whole_B,
            mass,
        )
        cache, total = tail, None if total is None else total + received
    if not np.isfinite(np.asarray(logits_BV)).all():
        raise NonFiniteError("the model returned NaN or infinite logits")
    return Read(logits_BV, cache, length_B)


def taken(model: nn.Module, policy: Overflow, slots: int) -> int:
    """Return the maximum number of slots that are still occupied after a policy made room.

    Raises CapacityError if these are all slots, ConfigError for segments with a model without them.
    """
    check_policy(model.config, slots, policy)
    length = model.config.segment_length
    if isinstance(policy, Segments) and length is not None:
        return int(length)
    return policy.room_for(slots)


class Answered(NamedTuple):
    """Scores of C answers. logprob_BC: log-probability, natural logarithm. greedy_BC: whether
    greedy decoding generates the answer.
    """

    logprob_BC: np.ndarray
    greedy_BC: np.ndarray


def answer(
    model: nn.Module,
    params: Params,
    found: Read,
    answers: Sequence[Sequence[Sequence[int]]],
    *,
    policy: Overflow | None,
    room: int,
) -> Answered:
    """Score answers against a cache, without changing it.

    answers: token ids, by row and answer. policy, room: as passed to `read`.
    """
    B, C = len(answers), len(answers[0])
    length_BC = np.array([[len(ids) for ids in row] for row in answers])
    width = int(length_BC.max())
    token_BCA = pad_rows([ids for row in answers for ids in row], width=width).reshape(B, C, width)
    logits_BV = np.asarray(found.logits_BV, np.float64)
    top_B1 = logits_BV.max(axis=1, keepdims=True)
    total_B1 = top_B1 + np.log(np.exp(logits_BV - top_B1).sum(axis=1, keepdims=True))
    logprob_BC = np.take_along_axis(logits_BV, token_BCA[:, :, 0], axis=1) - total_B1
    greedy_BC = token_BCA[:, :, 0] == logits_BV.argmax(axis=1)[:, None]
    if width == 1:
        return Answered(logprob_BC, greedy_BC)
    start_B1 = np.asarray(found.cache.next_position_B)[:, None]
    whole_B = jnp.asarray(found.length_B + room) if policy is None else None
    column = np.arange(width - 1)[None]
    for c in range(C):
        there_BA = column < length_BC[:, c, None] - 1
        position_BA = np.where(there_BA, start_B1 + column, -1).astype(np.int32)
        more, likeliest = _rest(model, params, found.cache, token_BCA[:, c], position_BA, whole_B)
        logprob_BC[:, c] += np.where(there_BA, np.asarray(more, np.float64), 0).sum(axis=1)
        greedy_BC[:, c] &= (np.asarray(likeliest) | ~there_BA).all(axis=1)
    return Answered(logprob_BC, greedy_BC)


@partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def _piece(
    model: nn.Module,
    params: Params,
    cache: KVCache,
    token_BT: jax.Array,
    position_BT: jax.Array,
    whole_B: jax.Array | None,
    mass: bool,
) -> tuple[jax.Array, KVCache, jax.Array | None]:
    """Run one chunk; the last token of every row is in the last column."""
    last_B = jnp.full((token_BT.shape[0],), token_BT.shape[1] - 1)
    logits_B1V, cache, received = run_and_commit(
        model,
        params,
        (),
        cache,
        token_BT,
        position_BT,
        length_B=whole_B,
        column_B=last_B,
        attention_mass=mass,
    )
    return logits_B1V[:, 0], cache, received


@partial(jax.jit, static_argnums=0)
def _rest(
    model: nn.Module,
    params: Params,
    cache: KVCache,
    token_BA: jax.Array,
    position_BA: jax.Array,
    whole_B: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Score an answer's tokens but the first: log-probability, and whether it is most likely."""
    trace, _, _ = run(
        for_sums(model),
        params,
        cache.segments,
        token_BA[:, :-1],
        position_BA,
        length_B=whole_B,
        memory=cache.memory,
    )
    target = token_BA[:, 1:]
    return log_likelihood(trace.logits, target), jnp.argmax(trace.logits, axis=-1) == target


def _context(rows: Sequence[Sequence[int]], read_B: np.ndarray) -> Context:
    """Return the context for a policy: the tokens read so far of each row, and the next one."""
    told = [row[: n + 1] for row, n in zip(rows, read_B, strict=True)]
    context = Context.empty(jax.random.key(0), len(rows))
    width = bucket(max(map(len, told)))
    return context.replace(
        token_BL=jnp.asarray(pad_rows(told, width=width, fill=-1)),
        length_B=jnp.asarray(read_B + 1, jnp.int32),
    )


def _check_positions(model: nn.Module, length: int) -> None:
    config = model.config
    if length > config.position_limit:
        raise CapacityError(
            f"text is too long: got {length} tokens with answers, {config.model_type} has"
            f" {config.position_limit} positions. Use shorter texts, or a policy such as slide"
        )


def _check_angles(model: nn.Module, length: int) -> None:
    """Raise CapacityError if a cache under a policy would mix keys with different frequencies."""
    config = model.config
    if not config.angles_follow_length:
        return
    border = config.border or config.max_position_embeddings
    if length > border:
        raise CapacityError(
            f"cache too large: got {length} slots with answers, expected at most {border}: beyond"
            " that this model changes its rotary frequencies, and cached keys cannot be re-rotated"
        )


def _power_below(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)
