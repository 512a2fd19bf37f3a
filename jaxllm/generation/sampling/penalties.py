"""Repetition penalties: processors that lower the scores of tokens already in the text.

They read the text from the `Context` up to each row's length, so padding never counts, while a real
token with the padding id does.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import SamplingError
from jaxllm.generation.sampling.parsers import OptionProcessor
from jaxllm.generation.sampling.sampler import Context
from jaxllm.generation.sampling.truncation import as_column

_MAX_PENALTY = 1e30  # finite, so a row with all tokens penalized keeps its order

# Tokens compared, which still match, match lengths.
_MatchState = tuple[jax.Array, jax.Array, jax.Array]


class RepetitionPenalty(OptionProcessor):
    """Repetition penalty of CTRL: divide positive scores, multiply negative ones; 1 is off.

    Keskar et al. 2019, section 4.1. Applied once to each distinct token of the text, including the
    prompt, as in transformers.
    """

    repetition_penalty: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        penalty_B1 = as_column(self.repetition_penalty, scores_BV)
        seen_BV = _count_tokens(scores_BV, context, prompt=True) > 0
        less_BV = jnp.where(scores_BV < 0, scores_BV * penalty_B1, scores_BV / penalty_B1)
        return jnp.where(seen_BV, less_BV, scores_BV)


class FrequencyPenalty(OptionProcessor):
    """OpenAI's penalties: subtract one per occurrence of a token, the other once.

    Only generated tokens count, not the prompt (in llama.cpp it does). 0 is off; negative values
    encourage repetition.
    """

    presence_penalty: Any
    frequency_penalty: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        count_BV = _count_tokens(scores_BV, context, prompt=False)
        each_B1 = as_column(self.frequency_penalty, scores_BV)
        once_B1 = as_column(self.presence_penalty, scores_BV)
        penalty_BV = count_BV * each_B1 + jnp.where(count_BV > 0, once_B1, 0.0)
        return scores_BV - penalty_BV


class DryPenalty(OptionProcessor):
    """DRY ("don't repeat yourself"): penalize tokens that would extend a repetition.

    As in llama.cpp (p-e-w 2024): if the last n >= allowed_length tokens occurred earlier, subtract
    multiplier * base ** (n - allowed_length) from the token that followed them, for the longest
    such n. Matches do not extend across breaker tokens, `[S]` or `[B, S]`, which are never
    penalized.
    """

    dry_multiplier: Any
    dry_base: Any
    dry_allowed_length: Any
    dry_penalty_last_n: Any
    dry_sequence_breakers: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        multiplier_B1 = as_column(self.dry_multiplier, scores_BV)
        base_B1 = as_column(self.dry_base, scores_BV)
        allowed_B1 = as_column(self.dry_allowed_length, scores_BV)
        last_n_B1 = as_column(self.dry_penalty_last_n, scores_BV)
        B, L = context.token_BL.shape
        age_1L = jnp.arange(L, dtype=jnp.float32)[None]
        near_BL = (last_n_B1 < 0) | (age_1L < last_n_B1)
        recent_BL = jnp.where(near_BL, newest_first(context), -1)
        breaker_BS = broadcast_rows(self.dry_sequence_breakers, B, 1)
        breaks_BL = (recent_BL[:, :, None] == breaker_BS[:, None]).any(axis=2) & (recent_BL >= 0)
        since_B1 = jnp.where(breaks_BL, age_1L, jnp.inf).min(axis=1, keepdims=True)
        # llama.cpp's bound on the exponent: base ** exponent stays finite in float32.
        exponent_B1 = jnp.floor(88.7228391 / jnp.log(base_B1))
        limit_B1 = jnp.minimum(since_B1, allowed_B1 + exponent_B1)
        limit_B1 = jnp.where(multiplier_B1 > 0, limit_B1, 0.0)
        length_BL = match_lengths(recent_BL, limit_B1).astype(jnp.float32)
        prolongs_BL = (length_BL >= allowed_B1) & ~breaks_BL
        token_BL = jnp.where(prolongs_BL, recent_BL, -1)
        longest_BV = scatter(jnp.zeros_like(scores_BV), token_BL).max(length_BL, mode="drop")
        power_BV = base_B1 ** jnp.maximum(longest_BV - allowed_B1, 0.0)
        penalty_BV = jnp.minimum(multiplier_B1 * power_BV, _MAX_PENALTY)
        return jnp.where(longest_BV > 0, scores_BV - penalty_BV, scores_BV)


def newest_first(context: Context) -> jax.Array:
    """Return each row's text with the newest token first: int32 `[B, L]`, padded with -1."""
    L = context.token_BL.shape[1]
    from_BL = context.length_B[:, None] - 1 - jnp.arange(L)[None]
    token_BL = jnp.take_along_axis(context.token_BL, jnp.maximum(from_BL, 0), axis=1)
    return jnp.where(from_BL >= 0, token_BL, -1)


def match_lengths(recent_BL: jax.Array, limit_B1: jax.Array) -> jax.Array:
    """Return for each token how many of the row's last tokens also precede it: int32 `[B, L]`.

    recent_BL: from `newest_first`; the result has the same order. limit_B1: maximum count. Costs
    O(L) per token of the longest repetition within the limit.
    """
    B, L = recent_BL.shape
    padded_BM = jnp.concatenate([recent_BL, jnp.full((B, L + 1), -1, jnp.int32)], axis=1)

    def is_unfinished(state: _MatchState) -> jax.Array:
        return state[1].any()

    def extend_match(state: _MatchState) -> _MatchState:
        i, same_BL, count_BL = state
        last_B1 = jax.lax.dynamic_slice_in_dim(padded_BM, i, 1, axis=1)
        before_BL = jax.lax.dynamic_slice_in_dim(padded_BM, i + 1, L, axis=1)
        same_BL &= (before_BL == last_B1) & (last_B1 >= 0) & (i.astype(jnp.float32) < limit_B1)
        return i + 1, same_BL, count_BL + same_BL.astype(jnp.int32)

    start = (jnp.int32(0), recent_BL >= 0, jnp.zeros_like(recent_BL))
    return jax.lax.while_loop(is_unfinished, extend_match, start)[2]


def scatter(array_BV: jax.Array, token_BN: jax.Array) -> Any:
    """Return `.at` indexed by each row's tokens; -1 is out of range, for `mode="drop"`."""
    B, V = array_BV.shape
    return array_BV.at[jnp.arange(B)[:, None], jnp.where(token_BN < 0, V, token_BN)]


def broadcast_rows(value: Any, rows: int, ndim: int) -> jax.Array:
    """Broadcast an array of `ndim` axes over rows; one with a row axis is only checked."""
    value = jnp.asarray(value)
    if value.ndim == ndim:
        value = value[None]
    if value.shape[0] not in (1, rows):
        raise SamplingError(
            f"the sampler has values for {value.shape[0]} rows, the batch has {rows}"
        )
    return jnp.broadcast_to(value, (rows, *value.shape[1:]))


def _count_tokens(scores_BV: jax.Array, context: Context, *, prompt: bool) -> jax.Array:
    """Count each token in the text, with or without the prompt: float32 `[B, V]`."""
    at_1L = jnp.arange(context.token_BL.shape[1])[None]
    counts_BL = at_1L < context.length_B[:, None]
    if not prompt:
        counts_BL &= at_1L >= context.prompt_B[:, None]
    token_BL = jnp.where(counts_BL, context.token_BL, -1)
    return scatter(jnp.zeros_like(scores_BV), token_BL).add(1.0, mode="drop")
