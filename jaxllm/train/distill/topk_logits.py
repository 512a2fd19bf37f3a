"""A compressed teacher distribution: its top-k tokens, and all others in one bucket.

The student's distribution is put into the same k + 1 buckets. Their divergence is a lower bound of
that over the whole vocabulary (data processing inequality), and equal to it at k = V.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.train.distill.divergences import MIN_LOGPROB, Compare, log_probs


class TopKLogprobs(struct.PyTreeNode):
    """Top-k next tokens and the rest.

    Attributes:
      token_BTk: ids, best first, uint16 if the vocabulary fits, else uint32.
      logprob_BTL: float16 `[B, T, k + 1]`, the log-probabilities of these tokens, then that of all
        others together; -inf if there are no others.
    """

    token_BTk: Any
    logprob_BTL: Any


def ids_dtype(size: int) -> Any:
    """Return the dtype in a file for ids of a vocabulary of `size` tokens."""
    return np.uint16 if size <= 1 << 16 else np.uint32


def topk_logprobs(logits_XV: jax.Array, size: int, temperature: float, k: int) -> TopKLogprobs:
    """Return the buckets of logits `[..., V]`, of which the first `size` are real tokens."""
    p_XV = log_probs(logits_XV, size, temperature)
    top_Xk, token_Xk = jax.lax.top_k(p_XV, k)
    rest_X = _rest_logprob(p_XV, token_Xk)
    # An empty bucket is -inf in a file.
    rest_X = jnp.where(rest_X < MIN_LOGPROB / 2, -jnp.inf, rest_X)
    logprob_XL = jnp.concatenate([top_Xk, rest_X[..., None]], axis=-1)
    return TopKLogprobs(token_Xk.astype(ids_dtype(size)), logprob_XL.astype(jnp.float16))


def compare_topk(size: int, temperature: float) -> Compare:
    """Return a function from student logits and a teacher's `TopKLogprobs` to log-probabilities of
    both.

    The teacher's are normalized again, since they were rounded to float16.
    """

    def compare(logits_NTV: jax.Array, told: TopKLogprobs) -> tuple[jax.Array, jax.Array]:
        token_NTk = told.token_BTk.astype(jnp.int32)
        p_NTL = jnp.maximum(told.logprob_BTL.astype(jnp.float32), MIN_LOGPROB)
        p_NTL = p_NTL - jax.nn.logsumexp(p_NTL, axis=-1, keepdims=True)
        q_NTV = log_probs(logits_NTV, size, temperature)
        top_NTk = jnp.take_along_axis(q_NTV, token_NTk, axis=-1)
        q_NTL = jnp.concatenate([top_NTk, _rest_logprob(q_NTV, token_NTk)[..., None]], axis=-1)
        return jax.lax.stop_gradient(p_NTL), q_NTL

    return compare


def _rest_logprob(p_XV: jax.Array, token_Xk: jax.Array) -> jax.Array:
    """Return the log-probability of all other tokens: a sum, as 1 - sum(top k) would cancel."""
    named_XV = jnp.zeros(p_XV.shape, bool)
    named_XV = jnp.put_along_axis(named_XV, token_Xk, True, axis=-1, inplace=False)
    return jax.nn.logsumexp(jnp.where(named_XV, MIN_LOGPROB, p_XV), axis=-1)
