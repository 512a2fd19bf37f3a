"""Draws for rows whose samplers differ: each kind of sampler is stacked, a row each, and mapped."""

from collections.abc import Hashable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.decode.loops.text import put
from jaxllm.decode.sampling.sampler import Context, Sampler, row_keys, sample_next
from jaxllm.errors import SamplingError

Result = tuple[jax.Array, jax.Array, jax.Array]
Samplers = tuple[Sampler, ...]


def fitted(sampler: Sampler, vocabulary: int, places: int) -> tuple[Hashable, Sampler]:
    """A sampler in the shapes that it keeps from draw to draw, and its kind: what is compiled."""
    leaves, shape = jax.tree.flatten(jax.tree.map(jnp.asarray, sampler))
    kind = (shape, tuple((x.shape, x.dtype) for x in leaves))
    kept = [
        jnp.broadcast_to(x, like.shape).astype(like.dtype)
        for x, like in zip(leaves, _forms(kind, vocabulary, places), strict=True)
    ]
    return kind, jax.tree.unflatten(shape, kept)


@lru_cache(maxsize=256)
def _forms(kind: Any, vocabulary: int, places: int) -> list[jax.ShapeDtypeStruct]:
    """The form of each leaf of such a sampler after a draw from the logits of one row.

    Raises SamplingError for a sampler that is not one of a single row.
    """
    structure, forms = kind
    sampler = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*form) for form in forms])
    number = jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.ShapeDtypeStruct((places,), jnp.int32)
    key = jax.eval_shape(partial(row_keys, 0, 1))
    context = Context(text, number, number, jax.ShapeDtypeStruct((), key.dtype))  # type: ignore[arg-type]
    logits_V = jax.ShapeDtypeStruct((vocabulary,), jnp.float32)
    try:
        _, then = jax.eval_shape(_draw_one, sampler, logits_V, context)
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(then)]
    except (TypeError, ValueError) as error:
        raise SamplingError(f"a request needs a sampler of one row: {error}") from None


def _draw_one(sampler: Sampler, logits_V: jax.Array, context: Context) -> tuple[jax.Array, Sampler]:
    """A row's next token, and its sampler at the next step: as it would be alone."""
    key = jax.random.fold_in(context.key_B, context.length_B)
    alone: Context = jax.tree.map(lambda x: x[None], context.replace(key_B=key))
    token_B, sampler = sample_next(logits_V[None], sampler, alone)
    return token_B[0], sampler


def drawn_by_kind(
    context: Context, samplers: Samplers, kind_KB: jax.Array, logits_BV: jax.Array
) -> tuple[Result, Context, Samplers]:
    """Tokens, log-probabilities and whether logits were finite, `[B]`, drawn by each row's kind of
    sampler; rows of no kind stay as they are.
    """
    live_B = kind_KB.any(axis=0)
    token_B, then = jnp.zeros(live_B.shape, jnp.int32), []
    for sampler, mine_B in zip(samplers, kind_KB, strict=True):
        drawn_B, after = jax.lax.cond(
            mine_B.any(), partial(_draw_some, mine_B), _draw_none, sampler, logits_BV, context
        )
        token_B = jnp.where(mine_B, drawn_B, token_B)
        then.append(after)
    logprob_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    logprob_B = jnp.take_along_axis(logprob_BV, token_B[:, None], axis=1)[:, 0]
    context = context.replace(
        token_BL=put(context.token_BL, context.length_B, token_B, live_B),
        length_B=context.length_B + live_B.astype(jnp.int32),
    )
    return (token_B, logprob_B, jnp.isfinite(logits_BV).all(axis=1)), context, tuple(then)


def _draw_some(
    mine_B: jax.Array, sampler: Sampler, logits_BV: jax.Array, context: Context
) -> tuple[jax.Array, Sampler]:
    token_B, then = jax.vmap(_draw_one)(sampler, logits_BV, context)

    def of_mine(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(mine_B.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    return token_B, jax.tree.map(of_mine, then, sampler)


def _draw_none(
    sampler: Sampler, logits_BV: jax.Array, context: Context
) -> tuple[jax.Array, Sampler]:
    return jnp.zeros(logits_BV.shape[:1], jnp.int32), sampler


@partial(jax.jit, donate_argnums=(0, 1))
def draw(
    context: Context,
    samplers: Samplers,
    kind_KB: jax.Array,
    out_R1V: jax.Array,
    take_B: jax.Array,
) -> tuple[Result, Context, Samplers]:
    """`drawn_by_kind` from the logits that stand in row `take_B` of a microbatch's."""
    return drawn_by_kind(context, samplers, kind_KB, out_R1V[take_B, 0])
