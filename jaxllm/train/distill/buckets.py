"""A teacher's distribution in few numbers: its k likeliest tokens, and all others in one bucket.

The divergence of k + 1 buckets is a lower bound of that of the whole vocabulary (data processing),
and equal to it at k = V. The student's distribution is put into the same buckets.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.train.distill.divergences import NOTHING, Compared, log_probs


class Buckets(struct.PyTreeNode):
    """Of each token's next one, the likeliest tokens and the rest.

    token_BTk: ids, best first, uint16 where the vocabulary allows it, else uint32. logprob_BTL:
    float16 `[B, T, k + 1]`, those tokens' log-probabilities, then that of all others together,
    -inf where there are no others.
    """

    token_BTk: Any
    logprob_BTL: Any


def ids_dtype(size: int) -> Any:
    """The smallest format of a file that holds ids of so many tokens."""
    return np.uint16 if size <= 1 << 16 else np.uint32


def buckets(logits_XV: jax.Array, size: int, temperature: float, k: int) -> Buckets:
    """The buckets of logits `[..., V]`, of which the first `size` are tokens."""
    p_XV = log_probs(logits_XV, size, temperature)
    top_Xk, token_Xk = jax.lax.top_k(p_XV, k)
    rest_X = _rest(p_XV, token_Xk)
    # A bucket of nothing is -inf in a file.
    rest_X = jnp.where(rest_X < NOTHING / 2, -jnp.inf, rest_X)
    logprob_XL = jnp.concatenate([top_Xk, rest_X[..., None]], axis=-1)
    return Buckets(token_Xk.astype(ids_dtype(size)), logprob_XL.astype(jnp.float16))


def of_buckets(size: int, temperature: float) -> Compared:
    """What a teacher's `Buckets` say, and the student's logits in the same buckets.

    Rounded to float16 they do not quite sum to 1: they are normalised again.
    """

    def compared(logits_NTV: jax.Array, told: Buckets) -> tuple[jax.Array, jax.Array]:
        token_NTk = told.token_BTk.astype(jnp.int32)
        p_NTL = jnp.maximum(told.logprob_BTL.astype(jnp.float32), NOTHING)
        p_NTL = p_NTL - jax.nn.logsumexp(p_NTL, axis=-1, keepdims=True)
        q_NTV = log_probs(logits_NTV, size, temperature)
        top_NTk = jnp.take_along_axis(q_NTV, token_NTk, axis=-1)
        q_NTL = jnp.concatenate([top_NTk, _rest(q_NTV, token_NTk)[..., None]], axis=-1)
        return jax.lax.stop_gradient(p_NTL), q_NTL

    return compared


def _rest(p_XV: jax.Array, token_Xk: jax.Array) -> jax.Array:
    """The log-probability of all but these tokens: summed, for 1 less their sum would cancel."""
    named_XV = jnp.zeros(p_XV.shape, bool)
    named_XV = jnp.put_along_axis(named_XV, token_Xk, True, axis=-1, inplace=False)
    return jax.nn.logsumexp(jnp.where(named_XV, NOTHING, p_XV), axis=-1)
