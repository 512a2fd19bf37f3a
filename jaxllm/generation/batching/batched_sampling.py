"""Sampling with a different sampler in each row: samplers of one kind are stacked and vmapped."""

from collections.abc import Hashable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import EMPTY
from jaxllm.errors import SamplingError
from jaxllm.generation.loops.finish import (
    NO_TOKEN,
    put_rows,
    select_rows,
    set_column,
    take_rows,
)
from jaxllm.generation.sampling.sampler import Context, Sampler, row_keys, sample_next
from jaxllm.ops.row_sums import log_softmax

Samplers = tuple[Sampler, ...]


class Drawn(NamedTuple):
    """The tokens drawn in one step; with a leading axis of steps, those of a burst.

    finite_B: whether the row's logits are finite. top_token_BN, top_logprob_BN: the N likeliest
    tokens, if requested. In a burst: draft_B, the draft's token or -1; valid_B, whether the token
    belongs to the text.
    """

    token_B: Any
    logprob_B: Any
    finite_B: Any
    top_token_BN: Any = None
    top_logprob_BN: Any = None
    draft_B: Any = None
    valid_B: Any = None


def fit_sampler(sampler: Sampler, vocab_size: int, text_width: int) -> tuple[Hashable, Sampler]:
    """Return a sampler's kind and the sampler with leaf shapes that stay fixed between draws.

    The kind is the tree structure with the original shapes and dtypes; each set of kinds compiles
    once. text_width: width of the token buffer.
    """
    leaves, shape = jax.tree.flatten(jax.tree.map(jnp.asarray, sampler))
    kind = (shape, tuple((x.shape, x.dtype) for x in leaves))
    fitted = [
        jnp.broadcast_to(x, like.shape).astype(like.dtype)
        for x, like in zip(leaves, _leaf_shapes(kind, vocab_size, text_width), strict=True)
    ]
    return kind, jax.tree.unflatten(shape, fitted)


@lru_cache(maxsize=256)
def _leaf_shapes(kind: Any, vocab_size: int, text_width: int) -> list[jax.ShapeDtypeStruct]:
    """Return the shape and dtype of each sampler leaf after a draw from one row's logits.

    Raises:
        SamplingError: If the sampler is not one for a single row.
    """
    structure, forms = kind
    sampler = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*form) for form in forms])
    number = jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.ShapeDtypeStruct((text_width,), jnp.int32)
    key = jax.eval_shape(partial(row_keys, 0, 1))
    context = Context(text, number, number, jax.ShapeDtypeStruct((), key.dtype))  # type: ignore[arg-type]
    logits_V = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
    try:
        _, then = jax.eval_shape(_draw_one, sampler, logits_V, context)
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(then)]
    except (TypeError, ValueError) as error:
        raise SamplingError(f"a request's sampler must be for one row: {error}") from None


def _draw_one(sampler: Sampler, logits_V: jax.Array, context: Context) -> tuple[jax.Array, Sampler]:
    """Return one row's next token and its next sampler, as in a batch of one."""
    key = jax.random.fold_in(context.key_B, context.length_B)
    alone: Context = jax.tree.map(lambda x: x[None], context.replace(key_B=key))
    token_B, sampler = sample_next(logits_V[None], sampler, alone)
    return token_B[0], sampler


def draw_by_kind(
    context: Context, samplers: Samplers, kind_KB: jax.Array, logits_BV: jax.Array, top: int = 0
) -> tuple[Drawn, Context, Samplers]:
    """Draw a token for each row with its own kind of sampler; rows without a kind do not change.

    kind_KB: bool, which rows use which sampler kind. top: static, number of likeliest tokens to
    return. Returns the tokens, then the next context and samplers.
    """
    live_B = kind_KB.any(axis=0)
    token_B, then = jnp.zeros(live_B.shape, jnp.int32), []
    for sampler, mine_B in zip(samplers, kind_KB, strict=True):
        drawn_B, after = jax.lax.cond(
            mine_B.any(), partial(_draw_some, mine_B), _draw_none, sampler, logits_BV, context
        )
        token_B = jnp.where(mine_B, drawn_B, token_B)
        then.append(after)
    # Without kernels XLA fuses log_softmax with some models' heads, which changes its bits; it does
    # not fuse across a conditional.
    logprob_BV = jax.lax.cond(live_B.any(), log_softmax, jnp.zeros_like, logits_BV)
    logprob_B = jnp.take_along_axis(logprob_BV, token_B[:, None], axis=1)[:, 0]
    context = context.replace(
        token_BL=set_column(context.token_BL, context.length_B, token_B, live_B),
        length_B=context.length_B + live_B.astype(jnp.int32),
    )
    drawn = Drawn(token_B, logprob_B, jnp.isfinite(logits_BV).all(axis=1))
    if top:
        top_logprob_BN, top_token_BN = jax.lax.top_k(logprob_BV, top)
        drawn = drawn._replace(top_token_BN=top_token_BN, top_logprob_BN=top_logprob_BN)
    return drawn, context, tuple(then)


def _draw_some(
    mine_B: jax.Array, sampler: Sampler, logits_BV: jax.Array, context: Context
) -> tuple[jax.Array, Sampler]:
    token_B, after = jax.vmap(_draw_one)(sampler, logits_BV, context)
    selected: Sampler = select_rows(mine_B, after, sampler)
    return token_B, selected


def _draw_none(
    sampler: Sampler, logits_BV: jax.Array, context: Context
) -> tuple[jax.Array, Sampler]:
    return jnp.zeros(logits_BV.shape[:1], jnp.int32), sampler


@partial(jax.jit, static_argnums=5, donate_argnums=(0, 1))
def draw(
    context: Context,
    samplers: Samplers,
    kind_KR: jax.Array,
    out_R1V: jax.Array,
    row_R: jax.Array | None,
    top: int = 0,
) -> tuple[Drawn, Context, Samplers]:
    """Apply `draw_by_kind` to a microbatch's logits `[R, 1, V]`, for rows `row_R`."""
    state = (context, samplers)
    some_context, some_samplers = take_rows(state, row_R)
    drawn, *then = draw_by_kind(some_context, some_samplers, kind_KR, out_R1V[:, 0], top)
    context, samplers = put_rows(state, row_R, tuple(then))
    return drawn, context, samplers


def empty_context(rows: int, capacity: int) -> Context:
    """Return the context of empty rows; a text may have one token more than its cache."""
    zeros_B = np.zeros(rows, np.int32)
    token_BL = np.full((rows, capacity + 1), NO_TOKEN, np.int32)
    token_BL, prompt_B, length_B = jax.device_put((token_BL, zeros_B, zeros_B.copy()))
    return Context(token_BL, prompt_B, length_B, row_keys(0, rows))


def stack_sampler(sampler: Sampler, rows: int) -> Sampler:
    """Return the samplers of a kind, the same in all rows."""
    stacked: Sampler = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), sampler)
    return stacked


@partial(jax.jit, donate_argnums=(0, 1, 2))
def fill_row(
    position_BS: jax.Array,
    context: Context,
    stacked: Sampler,
    row: jax.Array,
    text: tuple[jax.Array, jax.Array, jax.Array],
    sampler: Sampler,
) -> tuple[jax.Array, Context, Sampler]:
    """Clear a row of the cache and give it a new text and sampler."""
    token_L, length, key = text
    filled = Context(token_L, length, length, key)
    context, stacked = jax.tree.map(
        lambda old, new: old.at[row].set(new), (context, stacked), (filled, sampler)
    )
    return position_BS.at[row].set(EMPTY), context, stacked
