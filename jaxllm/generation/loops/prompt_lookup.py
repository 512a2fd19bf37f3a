"""Prompt lookup: draft tokens copied from an earlier match in the text, without a draft model."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.generation.loops.finish import NO_TOKEN, set_column
from jaxllm.generation.sampling.sampler import Context, Sampler
from jaxllm.runtime.validation import check_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """Draft the tokens that followed the latest earlier occurrence of the last tokens.

    ngram: maximum number of last tokens to match; shorter matches, down to one token, are used if
    there is no longer one. Raises SamplingError if below 1.
    """

    ngram: int = 3

    def __post_init__(self) -> None:
        check_int("ngram", self.ngram, 1)


class TextState(struct.PyTreeNode):
    """Each row's text `[B, L]`, -1 past its end, its length, finish reason and sampler state."""

    token_BL: jax.Array
    length_B: jax.Array
    finish_B: jax.Array
    sampler: Sampler

    def append(self, token_B: jax.Array, where_B: jax.Array) -> "TextState":
        """Append a token in the rows of `where_B`."""
        return self.replace(
            token_BL=set_column(self.token_BL, self.length_B, token_B, where_B),
            length_B=self.length_B + where_B.astype(jnp.int32),
        )


def last_tokens(text: TextState | Context, n: int) -> jax.Array:
    """Return the last n tokens of each text, `[B, n]`."""
    at_BN = text.length_B[:, None] + jnp.arange(-n, 0, dtype=jnp.int32)[None]
    return jnp.take_along_axis(text.token_BL, jnp.maximum(at_BN, 0), axis=1)


def look_up_draft(text: TextState | Context, ngram: int, width: int) -> jax.Array:
    """Return `width` tokens after the best earlier match of each text's end, or -1: `[B, width]`.

    The best match is the longest, up to `ngram` tokens; ties go to the latest. A continuation that
    reaches the end of the text repeats periodically.
    """
    token_BL, end_B1 = text.token_BL, text.length_B[:, None]
    at = jnp.arange(token_BL.shape[1], dtype=jnp.int32)[None]
    same_BL = jnp.broadcast_to(at < end_B1 - 1, token_BL.shape)
    matched_BL = jnp.zeros_like(token_BL)
    for back in range(ngram):  # compare the tokens `back` before here and `back` before the end
        before_BL = jnp.pad(token_BL, ((0, 0), (back, 0)), constant_values=NO_TOKEN)
        wanted_B1 = jnp.take_along_axis(token_BL, jnp.maximum(end_B1 - 1 - back, 0), axis=1)
        same_BL &= (before_BL[:, : token_BL.shape[1]] == wanted_B1) & (at >= back)
        matched_BL += same_BL.astype(jnp.int32)
    score_BL = jnp.where(matched_BL > 0, matched_BL * token_BL.shape[1] + at, NO_TOKEN)
    match_B1 = jnp.argmax(score_BL, axis=1, keepdims=True).astype(jnp.int32)
    period_B1 = jnp.maximum(end_B1 - 1 - match_B1, 1)
    ahead = jnp.arange(width, dtype=jnp.int32)[None]
    found_BK = jnp.take_along_axis(token_BL, match_B1 + 1 + ahead % period_B1, axis=1)
    return jnp.where((matched_BL > 0).any(axis=1, keepdims=True), found_BK, NO_TOKEN)
