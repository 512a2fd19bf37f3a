"""A different sampler in each row of a loop.

The options of a request are data. A sampler made of options gets every processor that options can
make, and those that it does not use have values that change nothing. So there are two kinds of such
samplers, with the rare options and without, and a program runs a processor only while a row uses
it. A sampler with functions, classes of users or automata has a kind of its own. Each set of kinds
compiles programs.
"""

import math
from collections.abc import Hashable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import SamplingError
from jaxllm.generation.sampling.constraints import LogitBias, MinLength, MissingIds
from jaxllm.generation.sampling.grammar_mask import TextMask
from jaxllm.generation.sampling.options import neutral_processors
from jaxllm.generation.sampling.penalties import FrequencyPenalty, RepetitionPenalty
from jaxllm.generation.sampling.sampler import Context, Processor, Sampler, row_keys, sample_next
from jaxllm.generation.sampling.truncation import MinP, Temperature, TopK, TopP

_USUAL = (
    LogitBias, RepetitionPenalty, FrequencyPenalty, MinLength, Temperature, TopK, TopP, MinP,
)  # fmt: skip
# Lists of tokens and of sequences, and the tokens of a sequence, up to which a request's are of the
# common kinds; larger ones have kinds of their own, of sizes that are powers of two.
_WIDTHS: dict[int, tuple[int, ...]] = {0: (), 1: (64,), 2: (64, 8)}


class _Layout(NamedTuple):
    """Where the arrays of processors are in `OptionSampler`'s two."""

    structure: Any
    arrays: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each


class OptionSampler(struct.PyTreeNode):
    """A row's sampling options; of several rows, each array has a leading axis of rows.

    Attributes:
        float_N, int_M: The processors' arrays. Two arrays are passed to programs sooner than sixty.
        greedy: Whether the row takes the best token, bool.
        on_P: Which processors the row uses, bool.
        layout: Of the processors.
    """

    float_N: Any
    int_M: Any
    greedy: Any
    on_P: Any
    layout: _Layout = struct.field(pytree_node=False)

    @classmethod
    def pack(
        cls, processors: Sequence[Processor], greedy: bool, on: Sequence[bool]
    ) -> "OptionSampler":
        """Return the sampler of a row with these processors."""
        leaves, structure = jax.tree.flatten(tuple(processors))
        layout = _Layout(structure, tuple((x.shape, x.dtype.name) for x in leaves))
        kinds = (
            [x.reshape(-1) for x in leaves if x.dtype == kind] for kind in ("float32", "int32")
        )
        float_N, int_M = map(np.concatenate, kinds)
        return cls(float_N, int_M, np.bool_(greedy), np.array(on), layout)

    def draw(
        self, uses_B: jax.Array, logits_BV: jax.Array, context: Context
    ) -> tuple[jax.Array, "OptionSampler"]:
        """Draw the next token of each row of `uses_B`, as in a batch of one.

        Returns:
            Tokens, int32 `[B]`, arbitrary in other rows, and the next samplers.
        """
        on_P, greedy_B = (self.on_P & uses_B[:, None]).any(axis=0), self.greedy | ~uses_B
        plain = greedy_B.all() & ~on_P.any()
        token_B, float_BN = jax.lax.cond(
            plain, _take_best, _draw, self, logits_BV, greedy_B, on_P, context
        )
        return token_B, self.replace(float_N=float_BN)

    def processors(self) -> tuple[Processor, ...]:
        """Return the processors."""
        leaves, begin = [], {"float32": 0, "int32": 0}
        for shape, dtype in self.layout.arrays:
            whole = self.float_N if dtype == "float32" else self.int_M
            end = begin[dtype] + math.prod(shape)
            part = whole[..., begin[dtype] : end]
            leaves.append(part.reshape(*whole.shape[:-1], *shape))
            begin[dtype] = end
        made: tuple[Processor, ...] = jax.tree.unflatten(self.layout.structure, leaves)
        return made


def _take_best(
    sampler: OptionSampler, logits_BV: jax.Array, *_: Any
) -> tuple[jax.Array, jax.Array]:
    return jnp.argmax(logits_BV.astype(jnp.float32), axis=1).astype(jnp.int32), sampler.float_N


def _draw(
    sampler: OptionSampler,
    logits_BV: jax.Array,
    greedy_B: jax.Array,
    on_P: jax.Array,
    context: Context,
) -> tuple[jax.Array, jax.Array]:
    """Return tokens and the samplers' next numbers. on_P: Which processors run."""
    scores_BV, processors = logits_BV.astype(jnp.float32), sampler.processors()
    for i, processor in enumerate(processors):
        scores_BV = jax.lax.cond(
            on_P[i], lambda p, *x: p(*x), lambda p, x, _: x, processor, scores_BV, context
        )
    best_B = jnp.argmax(scores_BV, axis=1)
    drawn_B = jax.lax.cond(
        greedy_B.all(),
        lambda *_: best_B,
        lambda *given: jax.vmap(jax.random.categorical)(*given).astype(best_B.dtype),
        context.key_B, scores_BV,
    )  # fmt: skip
    token_B = jnp.where(greedy_B, best_B, drawn_B).astype(jnp.int32)
    after = [
        p
        if type(p).observe is Processor.observe
        else jax.lax.cond(on, lambda p, *x: p.observe(*x), lambda p, *_: p, p, scores_BV, token_B)
        for p, on in zip(processors, on_P, strict=True)
    ]
    numbers = [x.reshape(len(x), -1) for x in jax.tree.leaves(after) if x.dtype == jnp.float32]
    return token_B, jnp.concatenate(numbers, axis=1)


class CustomSampler(struct.PyTreeNode):
    """A row's sampler of any processors; of several rows, each array has a leading axis of rows."""

    sampler: Sampler

    def draw(
        self, uses_B: jax.Array, logits_BV: jax.Array, context: Context
    ) -> tuple[jax.Array, "CustomSampler"]:
        """Draw as `OptionSampler` does."""
        token_B, sampler = jax.vmap(_draw_one)(self.sampler, logits_BV, context)
        return token_B, CustomSampler(sampler)


RowSampler: TypeAlias = OptionSampler | CustomSampler


def stack_sampler(sampler: RowSampler, rows: int) -> RowSampler:
    """Return the sampler of several rows that are all the same."""

    def repeat(x: Any) -> np.ndarray:  # a copy, since loops write in place
        return np.array(np.broadcast_to(x, (rows, *np.shape(x))))

    stacked: RowSampler = jax.device_put(jax.tree.map(repeat, sampler))
    return stacked


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
    missing = [p for p in sampler.processors if isinstance(p, MissingIds)]
    usual, all_of_them = _option_processors(vocab_size)
    fitted: RowSampler | None = _widen(sampler, (*missing, *usual))
    fitted = fitted or _widen(sampler, (*missing, *all_of_them))
    if fitted is None:
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, sampler))
        kind = (structure, tuple((x.shape, x.dtype) for x in leaves))
        shapes = _leaf_shapes(kind, vocab_size, text_width)
        leaves = [
            jnp.broadcast_to(x, like.shape).astype(like.dtype)
            for x, like in zip(leaves, shapes, strict=True)
        ]
        fitted = CustomSampler(jax.tree.unflatten(structure, leaves))
    leaves, structure = jax.tree.flatten(fitted)
    return (structure, tuple((x.shape, x.dtype) for x in leaves)), fitted


def rare_sampler(vocab_size: int) -> Sampler:
    """Return a sampler of the kind that has all options."""
    return Sampler(_option_processors(vocab_size)[1])


def _widen(sampler: Sampler, whole: Sequence[Processor]) -> OptionSampler | None:
    """Return a sampler that has all of these processors, with its own values. None if it has
    others, or another order.

    whole: Processors with values that change nothing.
    """
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
    return OptionSampler.pack(processors, sampler.greedy, on)


@cache
def _option_processors(vocab_size: int) -> tuple[tuple[Processor, ...], tuple[Processor, ...]]:
    """Return the usual processors of options, and all of them, in order, with values that change
    nothing, in arrays that are wide enough for most.
    """
    before, after = neutral_processors()
    chain = (*before, TextMask(np.int32(0), size=vocab_size), *after)
    wide = jax.tree.map(lambda x: _fit(x, np.zeros(_WIDTHS[np.ndim(x)], x.dtype)), chain)
    return tuple(p for p in wide if isinstance(p, _USUAL)), wide


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
