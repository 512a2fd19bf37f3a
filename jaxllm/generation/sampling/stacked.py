"""A different sampler in each row: samplers of one kind are stacked along a row axis."""

from collections.abc import Hashable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.errors import SamplingError
from jaxllm.generation.sampling.sampler import Context, Sampler, row_keys, sample_next


class StackedSampler(struct.PyTreeNode):
    """A sampler whose leaves have a leading axis of rows."""

    rows: Sampler

    def draw(self, logits_BV: jax.Array, context: Context) -> tuple[jax.Array, "StackedSampler"]:
        """Draw each row's next token, as in a batch of one; return the next samplers too."""
        token_B, rows = jax.vmap(_draw_one)(self.rows, logits_BV, context)
        return token_B, StackedSampler(rows)


def stack_sampler(sampler: Sampler, rows: int) -> StackedSampler:
    """Return the samplers of a kind, the same in all rows."""
    return StackedSampler(jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), sampler))


def _draw_one(sampler: Sampler, logits_V: jax.Array, context: Context) -> tuple[jax.Array, Sampler]:
    """Return one row's next token and its next sampler."""
    alone: Context = jax.tree.map(lambda x: x[None], context)
    token_B, sampler = sample_next(logits_V[None], sampler, alone)
    return token_B[0], sampler


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
    shape: Any = jax.ShapeDtypeStruct  # in the place of arrays
    number, text = shape((), jnp.int32), shape((text_width,), jnp.int32)
    key = jax.eval_shape(partial(row_keys, 0, 1))
    context = Context(text, number, number, shape((), key.dtype))
    logits_V = shape((vocab_size,), jnp.float32)
    try:
        _, then = jax.eval_shape(_draw_one, sampler, logits_V, context)
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(then)]
    except (TypeError, ValueError) as error:
        raise SamplingError(f"a request's sampler must be for one row: {error}") from None
