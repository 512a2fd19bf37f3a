"""A different sampler in each row of a loop.

The options of a request are data: a sampler whose processors all come from options gets those that
it lacks, with values that change nothing. So all of these are of one kind, whatever their options,
and a program runs a processor only while a row uses it. A sampler with other processors (functions,
classes of users, automata) has a kind of its own; each set of kinds compiles programs.
"""

from collections.abc import Hashable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import SamplingError
from jaxllm.generation.sampling.constraints import MissingIds
from jaxllm.generation.sampling.grammar_mask import TextMask
from jaxllm.generation.sampling.options import neutral_processors
from jaxllm.generation.sampling.sampler import Context, Processor, Sampler, row_keys, sample_next

# Lists of tokens and of sequences, and the tokens of a sequence, up to which a request's are of the
# common kind; larger ones have kinds of their own, of sizes that are powers of two.
_WIDTHS: dict[int, tuple[int, ...]] = {0: (), 1: (64,), 2: (64, 8)}


class RowSampler(struct.PyTreeNode):
    """A row's sampler; of several rows, each array has a leading axis of rows.

    Attributes:
        sampler: Its processors.
        greedy: Whether the row takes the best token, bool; None if `sampler` says it for all rows.
        on_P: Which processors the row uses, bool; None for all.
    """

    sampler: Sampler
    greedy: Any = None
    on_P: Any = None

    def stack(self, rows: int) -> "RowSampler":
        """Return the sampler of several rows that are all the same."""
        stacked: RowSampler = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x))), self
        )
        return stacked

    def draw(
        self, uses_B: jax.Array, logits_BV: jax.Array, context: Context
    ) -> tuple[jax.Array, "RowSampler"]:
        """Draw the next token of each row of `uses_B`, as in a batch of one.

        Returns:
            Tokens, int32 `[B]`, arbitrary in other rows, and the next samplers.
        """
        if self.on_P is None:
            token_B, sampler = jax.vmap(_draw_one)(self.sampler, logits_BV, context)
            return token_B, self.replace(sampler=sampler)
        on_P = (self.on_P & uses_B[:, None]).any(axis=0)
        scores_BV = jax.lax.cond(
            on_P.any(), _process, _keep, logits_BV.astype(jnp.float32), self.sampler, on_P, context
        )
        greedy_B = self.greedy | ~uses_B
        token_B = jax.lax.cond(greedy_B.all(), _best, _draw, scores_BV, greedy_B, context.key_B)
        processors = [
            jax.lax.cond(on, type(p).observe, _unobserved, p, scores_BV, token_B)
            if type(p).observe is not Processor.observe
            else p
            for p, on in zip(self.sampler.processors, on_P, strict=True)
        ]
        return token_B, self.replace(sampler=self.sampler.replace(processors=tuple(processors)))


def _process(
    scores_BV: jax.Array, sampler: Sampler, on_P: jax.Array, context: Context
) -> jax.Array:
    for i, processor in enumerate(sampler.processors):
        scores_BV = jax.lax.cond(
            on_P[i], lambda p, *x: p(*x), lambda p, x, _: x, processor, scores_BV, context
        )
    return scores_BV


def _keep(scores_BV: jax.Array, *_: Any) -> jax.Array:
    return scores_BV


def _unobserved(processor: Processor, *_: Any) -> Processor:
    return processor


def _best(scores_BV: jax.Array, *_: Any) -> jax.Array:
    return jnp.argmax(scores_BV, axis=1).astype(jnp.int32)


def _draw(scores_BV: jax.Array, greedy_B: jax.Array, key_B: jax.Array) -> jax.Array:
    drawn_B = jax.vmap(jax.random.categorical)(key_B, scores_BV).astype(jnp.int32)
    return jnp.where(greedy_B, _best(scores_BV), drawn_B)


def _draw_one(sampler: Sampler, logits_V: jax.Array, context: Context) -> tuple[jax.Array, Sampler]:
    """Return one row's next token and its next sampler."""
    alone: Context = jax.tree.map(lambda x: x[None], context)
    token_B, sampler = sample_next(logits_V[None], sampler, alone)
    return token_B[0], sampler


def fit_sampler(sampler: Sampler, vocab_size: int, text_width: int) -> tuple[Hashable, RowSampler]:
    """Return a request's sampler as a row has it, with shapes that stay fixed, and its kind.

    text_width: Of the token buffer.

    Raises:
        SamplingError: If the sampler is not one for a single row.
    """
    fitted = _widen(sampler, vocab_size)
    if fitted is None:
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, sampler))
        kind = (structure, tuple((x.shape, x.dtype) for x in leaves))
        shapes = _leaf_shapes(kind, vocab_size, text_width)
        leaves = [
            jnp.broadcast_to(x, like.shape).astype(like.dtype)
            for x, like in zip(leaves, shapes, strict=True)
        ]
        fitted = RowSampler(jax.tree.unflatten(structure, leaves))
    leaves, structure = jax.tree.flatten(fitted)
    return (structure, tuple((x.shape, x.dtype) for x in leaves)), fitted


def _widen(sampler: Sampler, vocab_size: int) -> RowSampler | None:
    """Return a sampler of options with all processors that there are; None for another sampler."""
    missing = [p for p in sampler.processors if isinstance(p, MissingIds)]
    whole: Sequence[Processor] = (*missing, *_all_processors(vocab_size))
    rest = list(sampler.processors)
    processors, on = list[Processor](), list[bool]()
    for neutral in whole:
        if not rest or type(rest[0]) is not type(neutral):
            processors.append(neutral)
            on.append(False)
            continue
        given = rest.pop(0)
        forms: list[Any] = [jax.tree.structure(p) for p in (given, neutral)]
        if forms[0] != forms[1]:
            return None
        fitted = jax.tree.map(_fit, given, neutral)
        processors.append(fitted)
        on.append(isinstance(given, MissingIds) or not _are_equal(fitted, neutral))
    if rest:  # processors of other kinds, or in another order
        return None
    widened = Sampler(tuple(processors))
    return RowSampler(widened, np.bool_(sampler.greedy), np.array(on))


@cache
def _all_processors(vocab_size: int) -> tuple[Processor, ...]:
    """Return all processors of options, in order, with arrays that are wide enough for most."""
    before, after = neutral_processors()
    chain = (*before, TextMask(np.int32(0), size=vocab_size), *after)
    return tuple(jax.tree.map(lambda x: _fit(x, np.zeros(_WIDTHS[np.ndim(x)], x.dtype)), chain))


def _fit(value: Any, like: np.ndarray) -> np.ndarray:
    """Return an array of a request, padded to at least a shape: ids with -1, biases with 0."""
    array = np.asarray(value)
    if array.ndim > like.ndim and array.shape[0] == 1:  # a list of one row
        array = array[0]
    if array.ndim != like.ndim:
        raise SamplingError(f"a request's sampler must be for one row, got {value!r:.60}")
    shape = tuple(map(max, array.shape, like.shape))
    fitted = np.full(shape, -1 if array.dtype == np.int32 else 0, like.dtype)
    fitted[tuple(map(slice, array.shape))] = array
    return fitted


def _are_equal(one: Processor, other: Processor) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


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
