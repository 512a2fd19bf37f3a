"""Samplers: a chain of processors, each a small frozen pytree with traced values, and one draw.

A processor maps scores to scores, float32 `[B, V]`, and removes a token by setting its score to
-inf. Its values are scalars or one per row, `[B]`; new values never recompile. To add a processor,
write a class with `__call__`; an `OptionProcessor` if users set it by name. Besides the
scores it receives the `Context`; state lives in its own fields and is updated by `observe`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import NonFiniteError, SamplingError
from jaxllm.ops.compile_cache import CachedJit
from jaxllm.runtime.validation import check_int


class Context(struct.PyTreeNode):
    """Input of processors besides the scores: each row's text so far, and its random key.

    token_BL: int32, prompt and generated tokens, -1 after the row's end. prompt_B, length_B: int32,
    lengths of the prompt and of the whole text. key_B: random keys of this step.
    """

    token_BL: jax.Array
    prompt_B: jax.Array
    length_B: jax.Array
    key_B: jax.Array

    @classmethod
    def empty(cls, key: jax.Array, rows: int) -> "Context":
        """Return a context without text. key: one key, which is split, or one per row."""
        zeros_B = jnp.zeros((rows,), jnp.int32)
        key_B = key if key.ndim else jax.random.split(key, rows)
        return cls(jnp.full((rows, 1), -1, jnp.int32), zeros_B, zeros_B, key_B)


ScoreFunction = Callable[[Any, Context], Any]  # (float32 [B, V], the text so far) -> float32 [B, V]


class Processor(struct.PyTreeNode):
    """Base class of the processors in a sampler's chain.

    Attributes:
        kind: the class name, as static data. Without it, JAX may treat two dataclasses with equally
            many fields as one tree structure, and run the compiled program of one on values of the
            other.
    """

    kind: str = struct.field(pytree_node=False, default="", kw_only=True, repr=False)

    def __init_subclass__(cls, **options: Any) -> None:
        cls.__annotations__ = {**inspect.get_annotations(cls), "kind": str}
        name = f"{cls.__module__}.{cls.__qualname__}"
        cls.kind = struct.field(pytree_node=False, default=name, kw_only=True, repr=False)
        super().__init_subclass__(**options)

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        """Return the processed scores."""
        raise NotImplementedError

    def begin(self, rows: int) -> "Processor":
        """Return the processor with initial state for a batch, one per row."""
        return self

    def observe(self, scores_BV: jax.Array, token_B: jax.Array) -> "Processor":
        """Return the next step's processor, after `token_B` was drawn from the chain's scores."""
        return self


class Sampler(struct.PyTreeNode):
    """Processors in order, then a draw from the softmax of their scores.

    Attributes:
        greedy: take the token with the best score; static, so no random numbers are generated.
    """

    processors: tuple[Processor, ...] = ()
    greedy: bool = struct.field(pytree_node=False, default=False)

    def begin(self, rows: int) -> "Sampler":
        """Return the sampler with initial state for a batch; loops carry this one."""
        return self.replace(processors=tuple(p.begin(rows) for p in self.processors))

    def observe(self, scores_BV: jax.Array, token_B: jax.Array) -> "Sampler":
        """Return the next step's sampler."""
        return self.replace(
            processors=tuple(p.observe(scores_BV, token_B) for p in self.processors)
        )


def check_sampler(sampler: Any) -> None:
    """Raise SamplingError for anything but a Sampler."""
    if not isinstance(sampler, Sampler):
        raise SamplingError(f"sampler must be a Sampler (make_sampler), got {sampler!r:.60}")
    for processor in sampler.processors:
        if type(processor).__call__ is Processor.__call__ or not isinstance(processor, Processor):
            raise SamplingError(
                f"processors of a sampler must be subclasses of jaxllm.Processor with __call__, got"
                f" {processor!r:.60}. Pass a function as logits_processor=[f]"
            )


GREEDY = Sampler(greedy=True)


class FunctionProcessor(Processor):
    """A pure JAX function of (scores, context) as a processor.

    Pass the same function object each time: a new one recompiles.
    """

    function: Callable[[jax.Array, Context], Any] = struct.field(pytree_node=False)

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        try:
            new_BV = jnp.asarray(self.function(scores_BV, context))
        except (TypeError, AttributeError) as error:  # for example, swapped arguments
            raise SamplingError(
                "a logits_processor must be a JAX function of (scores [B, V], Context) that"
                f" returns scores; this one raised {type(error).__name__}: {error!s:.200}."
                " Functions for transformers take (input_ids, scores): swap the arguments and read"
                " the ids from Context.token_BL"
            ) from error
        if new_BV.shape != scores_BV.shape or not jnp.issubdtype(new_BV.dtype, jnp.floating):
            raise SamplingError(
                f"a logits_processor must return float scores {scores_BV.shape}, got"
                f" {new_BV.dtype} {new_BV.shape}"
            )
        return new_BV.astype(jnp.float32)


def sample(key: jax.Array, logits_BV: jax.Array, sampler: Sampler) -> jax.Array:
    """Draw one token per row, without a preceding text: int32 `[B]`.

    Args:
        key: a `jax.random.key`, which is split over the rows, or one key per row, `[B]`. Each row
            is drawn in float32 with its own key, so it does not depend on the other rows.

    Raises:
        NonFiniteError: For a row with NaN or +inf, or with -inf only. Inside `jit`, which cannot
            raise, such a row yields an arbitrary token; check its logits there.
    """
    check_sampler(sampler)
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise SamplingError(f"key must be a jax.random.key, or one per row; got {key!r:.60}")
    if not (hasattr(logits_BV, "dtype") and jnp.issubdtype(logits_BV.dtype, jnp.floating)):
        raise SamplingError(f"logits must be an array of floats [B, V], got {logits_BV!r:.60}")
    if logits_BV.ndim != 2 or key.shape not in ((), logits_BV.shape[:1]):
        raise SamplingError(
            f"logits must be [B, V] and key must be one key or [B] keys; got logits"
            f" {logits_BV.shape}, keys {key.shape}"
        )
    token_B, sound_B = _sample(key, logits_BV, sampler)
    if not isinstance(sound_B, jax.core.Tracer) and not (sound_B := np.asarray(sound_B)).all():
        row = int(np.argmin(sound_B))
        raise NonFiniteError(
            f"row {row} of the logits has NaN, +inf, or only -inf; expected a score to draw from"
        )
    return token_B


@jax.jit
def _sample(key: jax.Array, logits_BV: jax.Array, sampler: Sampler) -> tuple[jax.Array, jax.Array]:
    """Return a token per row, and whether the row's logits were valid, `[B]` each."""
    token_B, _ = sample_next(logits_BV, sampler, Context.empty(key, logits_BV.shape[0]))
    return token_B, jnp.isfinite(logits_BV.max(axis=1))  # max propagates NaN


def sample_next(
    logits_BV: jax.Array, sampler: Sampler, context: Context
) -> tuple[jax.Array, Sampler]:
    """Draw one token per row, int32 `[B]`; also return the next step's sampler."""
    return draw_next(apply_processors(logits_BV, sampler, context), sampler, context)


def draw_next(
    scores_BV: jax.Array, sampler: Sampler, context: Context
) -> tuple[jax.Array, Sampler]:
    """Draw one token per row from the processed scores; return what `sample_next` returns."""
    if sampler.greedy:
        token_B = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    else:
        drawn_B = jax.vmap(jax.random.categorical)(context.key_B, scores_BV)
        token_B = drawn_B.astype(jnp.int32)
    return token_B, sampler.observe(scores_BV, token_B)


def apply_processors(logits_BV: jax.Array, sampler: Sampler, context: Context) -> jax.Array:
    """Apply all processors; return float32 scores `[B, V]`, -inf for removed tokens."""
    scores_BV = logits_BV.astype(jnp.float32)
    for processor in sampler.processors:
        scores_BV = processor(scores_BV, context)
    return scores_BV


def row_keys(seed: int, rows: int) -> jax.Array:
    """Return one random key per row, `[rows]`; row 0's does not depend on the number of rows.

    Uses all 64 bits of the seed; in 32-bit mode `jax.random.key` would drop the upper half.

    Raises:
        SamplingError: For a seed outside 0 ... 2**64 - 1.
    """
    seed = check_int("seed", seed, 0, (1 << 64) - 1)
    rows = check_int("rows", rows, 0, (1 << 31) - 1)
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    keys: jax.Array = _ROW_KEYS(words, rows)
    return keys


def _row_keys(words: jax.Array, rows: int) -> jax.Array:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


_ROW_KEYS = CachedJit(_row_keys, static_argnums=(1,))


def as_row_keys(seed: Any, rows: int) -> jax.Array:
    """Return one random key per row from a seed, or pass keys `[rows]` through.

    Raises SamplingError as `row_keys` does, and for another number of keys.
    """
    if not (isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)):
        return row_keys(seed, rows)
    if seed.shape != (rows,):
        raise SamplingError(f"seed must be an integer or {rows} keys, got keys {seed.shape}")
    return seed
