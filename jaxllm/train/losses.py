"""Losses as pure functions of logits: a sum and what it is to be divided by, never a mean.

Sums of several batches add up; a mean of means would weigh tokens by the batch they came in.
"""

import jax
import jax.numpy as jnp

from jaxllm.ops.likelihood import Over, log_likelihood
from jaxllm.train.data.rows import IGNORED


def log_likelihoods(logits_BTV: jax.Array, label_BT: jax.Array, over: Over = ()) -> jax.Array:
    """The log-probability of each label, float32 `[B, T]`; 0 where it is `IGNORED`.

    over: as of `ops.likelihood`.
    """
    counted_BT = label_BT != IGNORED
    safe_BT = jnp.where(counted_BT, label_BT, 0)
    found_BT = log_likelihood(logits_BTV.astype(jnp.float32), safe_BT, over)
    return jnp.where(counted_BT, found_BT, 0.0)


def cross_entropy(
    logits_BTV: jax.Array, label_BT: jax.Array, over: Over = ()
) -> tuple[jax.Array, jax.Array]:
    """The negative log-likelihood of all labels in nats, and how many count, float32 each.

    Labels are what follows the token of their column; `IGNORED` ones count nothing. Where none
    counts both are 0. over: as of `ops.likelihood`.
    """
    counted = (label_BT != IGNORED).sum().astype(jnp.float32)
    return -log_likelihoods(logits_BTV, label_BT, over).sum(), counted
