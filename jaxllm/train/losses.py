"""Losses as pure functions of logits: a sum and its divisor, never a mean.

Sums of several batches add up; a mean of means would weight tokens by the size of their batch.
"""

import jax
import jax.numpy as jnp

from jaxllm.ops.token_logprobs import AxisNames, log_likelihood
from jaxllm.train.data.rows import IGNORED


def log_likelihoods(logits_BTV: jax.Array, label_BT: jax.Array, over: AxisNames = ()) -> jax.Array:
    """Return the log-probability of each label, float32 `[B, T]`; 0 where it is `IGNORED`.

    over: as in `ops.token_logprobs`.
    """
    counted_BT = label_BT != IGNORED
    safe_BT = jnp.where(counted_BT, label_BT, 0)
    found_BT = log_likelihood(logits_BTV.astype(jnp.float32), safe_BT, over)
    return jnp.where(counted_BT, found_BT, 0.0)


def cross_entropy(
    logits_BTV: jax.Array, label_BT: jax.Array, over: AxisNames = ()
) -> tuple[jax.Array, jax.Array]:
    """Return the summed negative log-likelihood in nats, and the number of labels, float32 each.

    A label is the token that follows the token of its column. `IGNORED` labels do not count; if
    there are no others, both results are 0. over: as in `ops.token_logprobs`.
    """
    counted = (label_BT != IGNORED).sum().astype(jnp.float32)
    return -log_likelihoods(logits_BTV, label_BT, over).sum(), counted
