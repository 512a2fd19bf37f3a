"""Drafts without a model: a text that repeats itself says what comes next."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.decode.loops.text import NO_TOKEN, put
from jaxllm.decode.sampling.sampler import Sampler
from jaxllm.whole import whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """A draft without a model: what followed the latest earlier occurrence of the last tokens.

    ngram: how many last tokens are looked for; where they do not occur, fewer, down to one. Raises
    SamplingError for less than one.
    """

    ngram: int = 3

    def __post_init__(self) -> None:
        whole("ngram", self.ngram, 1)


class Text(struct.PyTreeNode):
    """Each row's text `[B, L]`, -1 past its end; its end; and the sampler that goes on from it."""

    token_BL: jax.Array
    length_B: jax.Array
    finish_B: jax.Array
    sampler: Sampler

    def add(self, token_B: jax.Array, where_B: jax.Array) -> "Text":
        """The text with one more token in these rows."""
        return self.replace(
            token_BL=put(self.token_BL, self.length_B, token_B, where_B),
            length_B=self.length_B + where_B.astype(jnp.int32),
        )

    def last(self, n: int) -> jax.Array:
        """The last n tokens, `[B, n]`."""
        at_BN = self.length_B[:, None] + jnp.arange(-n, 0, dtype=jnp.int32)[None]
        return jnp.take_along_axis(self.token_BL, jnp.maximum(at_BN, 0), axis=1)


def look_up(text: Text, ngram: int, width: int) -> jax.Array:
    """The `width` tokens after the best earlier match of each text's end, `[B, width]`; or all -1.

    The best match is the longest, up to `ngram` tokens, and among these the latest. A continuation
    that reaches the end of the text goes on with itself.
    """
    token_BL, end_B1 = text.token_BL, text.length_B[:, None]
    at = jnp.arange(token_BL.shape[1], dtype=jnp.int32)[None]
    same_BL = jnp.broadcast_to(at < end_B1 - 1, token_BL.shape)
    matched_BL = jnp.zeros_like(token_BL)
    for back in range(ngram):  # does the token `back` before this one equal that before the end?
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
