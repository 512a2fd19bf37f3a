"""Divergences between the next-token distributions of teacher and student.

All are generalized Jensen-Shannon divergences (GKD, arXiv 2306.13649, eq. 1) between the teacher's
P and the student's Q, with the mixture M = beta P + (1 - beta) Q:

    beta = 0        KL(P || Q), forward: mode-covering
    0 < beta < 1    beta KL(P || M) + (1 - beta) KL(Q || M)
    beta = 1        KL(Q || P), reverse: mode-seeking

They take log-probabilities of the whole vocabulary or of a few buckets (`buckets`): a divergence of
coarser distributions is never larger (data processing inequality).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.evaluate.likelihood.divergence import kl_divergence
from jaxllm.ops.token_logprobs import map_rows
from jaxllm.train.data.rows import IGNORED
from jaxllm.train.losses import log_likelihoods

MIN_LOGPROB = -1e4  # the log-probability of an impossible token: finite, and its exponential is 0


class DistillLossConfig(NamedTuple):
    """The distillation loss `alpha T^2 D + (1 - alpha) CE`.

    D is the divergence `beta` of both distributions at temperature T, CE the cross-entropy with the
    labels at temperature 1. The T^2 makes the size of the gradient independent of T (Hinton et al.
    2015, arXiv 1503.02531, section 2).
    """

    beta: float = 0.0
    temperature: float = 1.0
    alpha: float = 1.0


def divergence(p_XV: jax.Array, q_XV: jax.Array, beta: float) -> jax.Array:
    """Return the generalized Jensen-Shannon divergence in nats, `[..., V]` to `[...]`.

    It is never negative; if both distributions are equal, it and its gradient are exactly 0.

    Args:
      p_XV, q_XV: finite log-probabilities of teacher and student.
    """
    if beta == 0:
        return kl_divergence(p_XV, q_XV)
    if beta == 1:
        return kl_divergence(q_XV, p_XV)
    m_XV = mixture(p_XV, q_XV, beta)
    return beta * kl_divergence(p_XV, m_XV) + (1 - beta) * kl_divergence(q_XV, m_XV)


def mixture(p_XV: jax.Array, q_XV: jax.Array, beta: float) -> jax.Array:
    """Return `log(beta exp(p) + (1 - beta) exp(q))`, which is exactly p where q equals p."""
    high_XV, low_XV = jnp.maximum(p_XV, q_XV), jnp.minimum(p_XV, q_XV)
    weight_XV = jnp.where(p_XV < q_XV, beta, 1 - beta)  # of the smaller one
    return high_XV + jnp.log1p(weight_XV * jnp.expm1(low_XV - high_XV))


def log_probs(logits_XV: jax.Array, size: int, temperature: float) -> jax.Array:
    """Return float32 log-probabilities `[..., size]` of the first `size` tokens.

    The padding of the vocabulary after them is excluded from the softmax.
    """
    x_XV = logits_XV[..., :size].astype(jnp.float32)
    return jax.nn.log_softmax(x_XV if temperature == 1 else x_XV / temperature, axis=-1)


class DistillLoss(NamedTuple):
    """Sums over the tokens with a label, float32. tokens: their number."""

    loss: jax.Array
    divergence: jax.Array
    cross_entropy: jax.Array
    tokens: jax.Array


# Maps the student's logits [N, T, V] and the teacher's output for the same tokens, [N, T, ...], to
# the log-probabilities of teacher and student.
Compare = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


def distill_loss(
    logits_BTV: jax.Array,
    label_BT: jax.Array,
    teacher: Any,
    compare: Compare,
    config: DistillLossConfig,
    data_shards: int = 1,
) -> DistillLoss:
    """Return the loss of `DistillLossConfig` summed over all tokens with a label.

    Each device runs one row at a time and recomputes it in the backward pass. So besides the logits
    and their gradient only one row of `[T, V]` is in memory.

    Args:
      teacher: arrays `[B, T, ...]` for `compare`.
      data_shards: as in `map_rows`.
    """

    @jax.checkpoint
    def row_losses(arrays: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
        logits_NTV, label_NT, told = arrays
        p_NTV, q_NTV = compare(logits_NTV, told)
        apart_NT = divergence(p_NTV, q_NTV, config.beta)
        entropy_NT = -log_likelihoods(logits_NTV, label_NT)
        return jnp.where(label_NT == IGNORED, 0.0, apart_NT), entropy_NT

    apart_BT, entropy_BT = map_rows(row_losses, (logits_BTV, label_BT, teacher), data_shards)
    apart, entropy = apart_BT.sum(), entropy_BT.sum()
    loss = config.alpha * config.temperature**2 * apart
    if config.alpha != 1:
        loss = loss + (1 - config.alpha) * entropy
    return DistillLoss(loss, apart, entropy, (label_BT != IGNORED).sum().astype(jnp.float32))


def compare_logits(size: int, temperature: float) -> Compare:
    """Return a function from student and teacher logits to log-probabilities of the first `size`
    tokens.
    """

    def compare(logits_NTV: jax.Array, teacher_NTV: jax.Array) -> tuple[jax.Array, jax.Array]:
        p_NTV = jax.lax.stop_gradient(log_probs(teacher_NTV, size, temperature))
        return p_NTV, log_probs(logits_NTV, size, temperature)

    return compare
