"""Samplers: a chain of processors, each a small frozen pytree with traced values, and one draw.

A processor maps scores to scores, float32 `[B, V]`, and removes a token by scoring it -inf. Its
values are a number or one a row, `[B]`; a new value never recompiles. A new processor is a new
class with `__call__`, and a row in its file's table if users set it by name. What it knows
beside the scores is the `Context`; what it remembers it keeps in its own fields, by `observe`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import NonFiniteError, SamplingError
from jaxllm.programs import Program
from jaxllm.whole import whole


class Context(struct.PyTreeNode):
    """What processors may look at beside the scores: each row's text so far, and its randomness.

    token_BL: int32, the prompt and what came after it, -1 past the row's end. prompt_B, length_B:
    int32, tokens of the prompt and of all. key_B: this step's random keys.
    """

    token_BL: jax.Array
    prompt_B: jax.Array
    length_B: jax.Array
    key_B: jax.Array

    @classmethod
    def empty(cls, key: jax.Array, rows: int) -> "Context":
        """No text at all. key: one for all rows, which is split, or one a row."""
        zeros_B = jnp.zeros((rows,), jnp.int32)
        key_B = key if key.ndim else jax.random.split(key, rows)
        return cls(jnp.full((rows, 1), -1, jnp.int32), zeros_B, zeros_B, key_B)


class Processor(struct.PyTreeNode):
    """What a sampler's chain is made of.

    kind: the class, as static data. Without it JAX takes two dataclasses with as many fields for
    one structure, and now and then runs the program of the one on the values of the other.
    """

    kind: str = struct.field(pytree_node=False, default="", kw_only=True, repr=False)

    def __init_subclass__(cls, **options: Any) -> None:
        cls.__annotations__ = {**inspect.get_annotations(cls), "kind": str}
        name = f"{cls.__module__}.{cls.__qualname__}"
        cls.kind = struct.field(pytree_node=False, default=name, kw_only=True, repr=False)
        super().__init_subclass__(**options)

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        """The scores, changed."""
        raise NotImplementedError

    def begin(self, rows: int) -> "Processor":
        """This processor before the first step of a batch: what it remembers, one a row."""
        return self

    def observe(self, scores_BV: jax.Array, token_B: jax.Array) -> "Processor":
        """This processor at the next step, after `token_B` was drawn from the chain's scores."""
        return self


class Sampler(struct.PyTreeNode):
    """Processors in order, then a draw from the softmax of what they leave.

    greedy: take the best-scored token instead of drawing (static: no random numbers are made).
    """

    processors: tuple[Processor, ...] = ()
    greedy: bool = struct.field(pytree_node=False, default=False)

    def begin(self, rows: int) -> "Sampler":
        """This sampler before a batch's first step; a loop that carries it starts with this."""
        return self.replace(processors=tuple(p.begin(rows) for p in self.processors))

    def observe(self, scores_BV: jax.Array, token_B: jax.Array) -> "Sampler":
        """This sampler at the next step."""
        return self.replace(
            processors=tuple(p.observe(scores_BV, token_B) for p in self.processors)
        )


def check_sampler(sampler: Any) -> None:
    """Raise SamplingError for what is no Sampler."""
    if not isinstance(sampler, Sampler):
        raise SamplingError(f"sampler must be a Sampler (make_sampler), got {sampler!r:.60}")


GREEDY = Sampler(greedy=True)


class Function(Processor):
    """A pure function of scores and context in JAX, as a processor; another function, another
    program: give the same one each time."""

    function: Callable[[jax.Array, Context], Any] = struct.field(pytree_node=False)

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        try:
            found_BV = jnp.asarray(self.function(scores_BV, context))
        except (TypeError, AttributeError) as error:  # as of the arguments in another order
            raise SamplingError(
                "a logits_processor must be a function of (scores [B, V], Context) in JAX that"
                f" returns scores; this one raised {type(error).__name__}: {error!s:.200}."
                " transformers' functions take (input_ids, scores): swap them, the ids so far are"
                " in Context.token_BL"
            ) from error
        if found_BV.shape != scores_BV.shape or not jnp.issubdtype(found_BV.dtype, jnp.floating):
            raise SamplingError(
                f"a logits_processor must give float scores {scores_BV.shape} back, got"
                f" {found_BV.dtype} {found_BV.shape}"
            )
        return found_BV.astype(jnp.float32)


def sample(key: jax.Array, logits_BV: jax.Array, sampler: Sampler) -> jax.Array:
    """Draw one token a row, without a text before it: int32 `[B]`.

    key: a `jax.random.key`, or one for each row `[B]`; a single key is split over the rows. Each
    row is drawn in float32 with its own key, so it does not depend on its neighbours.

    Raises NonFiniteError for a row with NaN, with +inf, or of nothing but -inf. Inside `jit`, where
    nothing can be raised, such a row gives some token: look at its logits there.
    """
    check_sampler(sampler)
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise SamplingError(f"key must be a jax.random.key, or one for each row; got {key!r:.60}")
    if not (hasattr(logits_BV, "dtype") and jnp.issubdtype(logits_BV.dtype, jnp.floating)):
        raise SamplingError(f"logits must be an array of floats [B, V], got {logits_BV!r:.60}")
    if logits_BV.ndim != 2 or key.shape not in ((), logits_BV.shape[:1]):
        raise SamplingError(
            f"logits must be [B, V] and there is one key or one for each row; got logits"
            f" {logits_BV.shape}, keys {key.shape}"
        )
    token_B, sound_B = _sample(key, logits_BV, sampler)
    if not isinstance(sound_B, jax.core.Tracer) and not (sound_B := np.asarray(sound_B)).all():
        row = int(np.argmin(sound_B))
        raise NonFiniteError(
            f"row {row} has NaN, +inf, or no token that is not -inf: nothing to draw"
        )
    return token_B


@jax.jit
def _sample(key: jax.Array, logits_BV: jax.Array, sampler: Sampler) -> tuple[jax.Array, jax.Array]:
    """A token a row, and whether the row was one to draw from, `[B]` each."""
    token_B, _ = sample_next(logits_BV, sampler, Context.empty(key, logits_BV.shape[0]))
    return token_B, jnp.isfinite(logits_BV.max(axis=1))  # NaN is the largest of all


def sample_next(
    logits_BV: jax.Array, sampler: Sampler, context: Context
) -> tuple[jax.Array, Sampler]:
    """Draw one token a row, int32 `[B]`, given the text so far; and the next step's sampler."""
    scores_BV = process(logits_BV, sampler, context)
    if sampler.greedy:
        token_B = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    else:
        drawn_B = jax.vmap(jax.random.categorical)(context.key_B, scores_BV)
        token_B = drawn_B.astype(jnp.int32)
    return token_B, sampler.observe(scores_BV, token_B)


def process(logits_BV: jax.Array, sampler: Sampler, context: Context) -> jax.Array:
    """The scores that are drawn from: float32 `[B, V]`, -inf for what was removed."""
    scores_BV = logits_BV.astype(jnp.float32)
    for processor in sampler.processors:
        scores_BV = processor(scores_BV, context)
    return scores_BV


def row_keys(seed: int, rows: int) -> jax.Array:
    """One random key a row, `[rows]`: row 0 of a batch draws as a batch of one would.

    All 64 bits of the seed count: in 32-bit mode `jax.random.key` would drop the upper half.

    Raises SamplingError for a seed outside 0 ... 2**64 - 1.
    """
    seed = whole("seed", seed, 0, (1 << 64) - 1)
    rows = whole("rows", rows, 0, (1 << 31) - 1)
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    keys: jax.Array = _ROW_KEYS(words, rows)
    return keys


def _row_keys(words: jax.Array, rows: int) -> jax.Array:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


_ROW_KEYS = Program(_row_keys, static=(1,))


def keys_of(seed: Any, rows: int) -> jax.Array:
    """One random key a row: from a seed, or the keys `[rows]` themselves.

    Raises SamplingError as `row_keys`, and for another number of keys.
    """
    if not (isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)):
        return row_keys(seed, rows)
    if seed.shape != (rows,):
        raise SamplingError(f"seed must be a number or {rows} keys, got keys {seed.shape}")
    return seed
