"""Losses as pure functions of logits: a sum and what it is to be divided by, never a mean.

Sums of several batches add up; a mean of means would weigh tokens by the batch they came in.
"""

import jax
import jax.numpy as jnp

from jaxllm.train.data.rows import IGNORED


def log_likelihoods(logits_BTV: jax.Array, label_BT: jax.Array) -> jax.Array:
    """The log-probability of each label, float32 `[B, T]`; 0 where it is `IGNORED`."""
    counted_BT = label_BT != IGNORED
    safe_BT = jnp.where(counted_BT, label_BT, 0)
    logits_BTV = logits_BTV.astype(jnp.float32)
    chosen_BT = jnp.take_along_axis(logits_BTV, safe_BT[..., None], axis=-1)[..., 0]
    found_BT = chosen_BT - jax.nn.logsumexp(logits_BTV, axis=-1)
    return jnp.where(counted_BT, found_BT, 0.0)


def cross_entropy(logits_BTV: jax.Array, label_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The negative log-likelihood of all labels in nats, and how many count, float32 each.

    Labels are what follows the token of their column; `IGNORED` ones count nothing. Where none
    counts both are 0.
    """
    counted = (label_BT != IGNORED).sum().astype(jnp.float32)
    return -log_likelihoods(logits_BTV, label_BT).sum(), counted
