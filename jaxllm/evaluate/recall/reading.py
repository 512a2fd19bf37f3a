"""A long text read into a cache of so many slots, piece by piece, and answers scored against it.

When a piece no longer fits, a policy (`decode.loops.overflow`) makes room, as in generation. The
angles of rotary settings that follow the text's length are those of the whole text from the first
piece on, where the cache holds all of it.
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

PIECE = 256  # tokens that are read at once, where so many fit


class Read(NamedTuple):
    """What is known after a text. logits_BV: of what comes next. length_B: of the texts."""

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
    """Read a text a row. policy: what makes room; without one the cache has a slot for each token.

    slots: of the cache, for a policy. room: so many tokens more are to be asked about later.

    Raises CapacityError for texts beyond the model's positions or its border, where nothing makes
    room, and for slots of which the policy leaves none.
    """
    length_B = np.array([len(row) for row in rows], np.int32)
    longest = int(length_B.max())
    if policy is None:
        _check_positions(model, longest + room)
        slots = bucket(longest)
        piece = min(PIECE, slots)
        slots += piece  # what is padded on the left takes slots too
    else:
        assert slots is not None
        _check_positions(model, slots + room)
        _check_angles(model, slots + room)
        piece = _power_below(min(PIECE, slots - taken(model, policy, slots)))
    # Padding stands on the left, so that all pieces are of one size and all rows end together.
    width = -(-longest // piece) * piece
    token_BT = pad_rows(rows, width=width, left=True)
    real_BT = np.arange(width)[None] >= width - length_B[:, None]
    mass: Any = policy is not None and policy.reads_mass
    cache = init_cache(model, len(rows), slots)
    total = jnp.zeros((len(rows), slots), jnp.float32) if mass else None
    logits_BV = jnp.zeros((len(rows), 0))
    # Whoever makes room decides about positions: then the text is as long as its positions are.
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
    """How many slots a policy leaves taken at most.

    Raises CapacityError where these are all, ConfigError for segments of a model without.
    """
    check_policy(model.config, slots, policy)
    length = model.config.segment_length
    if isinstance(policy, Segments) and length is not None:
        return int(length)
    return policy.room_for(slots)


class Answered(NamedTuple):
    """logprob_BC: the log-probability of each of C answers, natural logarithm. greedy_BC: whether
    greedy decoding would give it.
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
    """Score answers against a cache, which stays as it is. answers: token ids, by row and answer.

    policy, room: as `read` was given them.
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
    """One piece, of which every row's last token is the last of its own."""
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
    """Each token of an answer but the first: its log-probability, and whether it is likeliest."""
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
    """What a policy is told: what was read of each row, and the token that comes next."""
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
            f"{length} tokens with their answers, but {config.model_type} has positions for"
            f" {config.position_limit}: ask for shorter texts, or let a policy make room (slide)"
        )


def _check_angles(model: nn.Module, length: int) -> None:
    """Raise CapacityError where a cache under a policy would hold keys of two kinds of angles."""
    config = model.config
    if not config.angles_follow_length:
        return
    border = config.border or config.max_position_embeddings
    if length > border:
        raise CapacityError(
            f"rotary angles of this model change beyond {border} tokens, and its keys cannot be"
            f" turned: a policy can have fewer than {border} slots, here it would need {length}"
        )


def _power_below(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)
