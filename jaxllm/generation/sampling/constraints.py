"""Processors that ban, bias or force tokens by id and by the preceding text.

Token ids are traced arrays, padded with -1 to a static shape, shared by all rows or with a leading
axis `[B]`. A ban that would leave a row without any token is not applied to that row.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.generation.sampling.parsers import OptionProcessor, Values
from jaxllm.generation.sampling.penalties import (
    broadcast_rows,
    match_lengths,
    newest_first,
    scatter,
)
from jaxllm.generation.sampling.sampler import Context, Processor
from jaxllm.generation.sampling.truncation import as_column


class MissingIds(Processor):
    """Remove ids that have no token: an embedding may have more rows than the tokenizer has tokens.

    ids: these ids, as ranges; static, since they are those of the model.
    """

    ids: tuple[range, ...] = struct.field(pytree_node=False)

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        missing_V = np.zeros(scores_BV.shape[1], bool)
        for some in self.ids:
            missing_V[some.start : some.stop] = True
        return jnp.where(missing_V[None], -jnp.inf, scores_BV)


class SequenceBias(OptionProcessor):
    """Add a bias to each sequence's last token if the text ends with the tokens before it.

    As in transformers, biases on the same token add up. token_NS: int32, each sequence *last token
    first*, `[N, S]` or `[B, N, S]`. bias_N: `[N]` or `[B, N]`; 0 is off.
    """

    token_NS: Any
    bias_N: Any

    names = ("sequence_bias",)

    @classmethod
    def from_options(cls, values: Values) -> "SequenceBias":
        return cls(*values(cls.names[0]))

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        token_BN = _completing_tokens(self.token_NS, context)
        bias_BN = broadcast_rows(self.bias_N, scores_BV.shape[0], 1)
        bias_BV = scatter(jnp.zeros_like(scores_BV), token_BN).add(bias_BN, mode="drop")
        return jnp.where(bias_BV == 0, scores_BV, scores_BV + bias_BV)


class LogitBias(SequenceBias):
    """Add a bias to single tokens, as in OpenAI's `logit_bias`."""

    names = ("logit_bias",)


class NoRepeatNGram(OptionProcessor):
    """Ban repeated n-grams of this many tokens, prompt included (Paulus et al. 2018); 0 is off."""

    no_repeat_ngram_size: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        size_B1 = as_column(self.no_repeat_ngram_size, scores_BV)
        recent_BL = newest_first(context)
        length_BL = match_lengths(recent_BL, size_B1 - 1).astype(jnp.float32)
        ends_BL = (size_B1 > 0) & (length_BL >= size_B1 - 1)
        return _ban(scores_BV, _token_mask(scores_BV, jnp.where(ends_BL, recent_BL, -1)))


class BadWords(OptionProcessor):
    """Ban each sequence's last token if the text ends with the tokens before it.

    bad_words_ids: as `token_NS` of `SequenceBias`.
    """

    bad_words_ids: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        return _ban(
            scores_BV, _token_mask(scores_BV, _completing_tokens(self.bad_words_ids, context))
        )


class SuppressTokens(OptionProcessor):
    """Ban tokens, `[N]` or `[B, N]`."""

    suppress_tokens: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        return _ban(scores_BV, _token_mask(scores_BV, self.suppress_tokens))


class BeginSuppressTokens(OptionProcessor):
    """Ban tokens at the first step.

    As in transformers, if the first token is forced (`ForcedBos`), the ban applies to the second.
    """

    begin_suppress_tokens: Any
    forced_bos_token_id: Any

    names = ("begin_suppress_tokens",)

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        forced_B = (as_column(self.forced_bos_token_id, scores_BV)[:, 0] >= 0) & (
            context.prompt_B == 1
        )
        first_B = context.length_B == context.prompt_B + forced_B.astype(jnp.int32)
        return _ban(
            scores_BV, _token_mask(scores_BV, self.begin_suppress_tokens) & first_B[:, None]
        )


class MinLength(OptionProcessor):
    """Ban end-of-text ids until a row has enough tokens, and enough generated ones; 0 is off.

    eos_token_id: `[E]` or `[B, E]`.
    """

    min_length: Any
    min_new_tokens: Any
    eos_token_id: Any

    names = ("min_length", "min_new_tokens")

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        length_B1, new_B1 = context.length_B[:, None], _num_generated(context)
        short_B1 = length_B1.astype(jnp.float32) < as_column(self.min_length, scores_BV)
        short_B1 |= new_B1 < as_column(self.min_new_tokens, scores_BV)
        return _ban(scores_BV, _token_mask(scores_BV, self.eos_token_id) & short_B1)


class ForcedBos(OptionProcessor):
    """Force the second token of a text whose prompt is one token; -1 is off.

    As in transformers, all other tokens are removed, and this one gets score 0.
    """

    forced_bos_token_id: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        now_B1 = context.length_B[:, None] == 1
        token_B1 = as_column(self.forced_bos_token_id, scores_BV).astype(jnp.int32)
        return _force(scores_BV, _token_mask(scores_BV, token_B1) & now_B1)


class ForcedEos(OptionProcessor):
    """Force the last token allowed by `max_new_tokens` to be one of these, `[E]` or `[B, E]`.

    As in transformers, all other tokens are removed, and these get score 0.
    """

    forced_eos_token_id: Any
    max_new_tokens: Any

    names = ("forced_eos_token_id",)

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        now_B1 = _num_generated(context) == as_column(self.max_new_tokens, scores_BV) - 1
        return _force(scores_BV, _token_mask(scores_BV, self.forced_eos_token_id) & now_B1)


def _num_generated(context: Context) -> jax.Array:
    """Return the number of generated tokens, float32 `[B, 1]`."""
    return (context.length_B - context.prompt_B).astype(jnp.float32)[:, None]


def _completing_tokens(sequences: Any, context: Context) -> jax.Array:
    """Return the token that would complete each sequence, int32 `[B, N]`, -1 for no match.

    sequences: `[N, S]` or `[B, N, S]`.
    """
    B, L = context.token_BL.shape
    token_BNS = broadcast_rows(sequences, B, 2)
    earlier_BNR = token_BNS[:, :, 1:]
    R = earlier_BNR.shape[2]
    recent_BR = jnp.pad(newest_first(context), ((0, 0), (0, max(R - L, 0))), constant_values=-1)[
        :, :R
    ]
    matches_BN = ((earlier_BNR == recent_BR[:, None]) | (earlier_BNR < 0)).all(axis=2)
    return jnp.where(matches_BN, token_BNS[:, :, 0], -1)


def _token_mask(scores_BV: jax.Array, tokens: Any) -> jax.Array:
    """Return a mask over the vocabulary of these tokens, `[N]` or `[B, N]`: bool `[B, V]`."""
    token_BN = broadcast_rows(tokens, scores_BV.shape[0], 1)
    return scatter(jnp.zeros(scores_BV.shape, bool), token_BN).set(True, mode="drop")


def _ban(scores_BV: jax.Array, banned_BV: jax.Array) -> jax.Array:
    left_BV = jnp.where(banned_BV, -jnp.inf, scores_BV)
    some_B1 = (left_BV > -jnp.inf).any(axis=1, keepdims=True)
    return jnp.where(some_B1, left_BV, scores_BV)


def _force(scores_BV: jax.Array, wanted_BV: jax.Array) -> jax.Array:
    some_B1 = wanted_BV.any(axis=1, keepdims=True)
    return jnp.where(some_B1, jnp.where(wanted_BV, 0.0, -jnp.inf), scores_BV)
