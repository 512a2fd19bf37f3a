"""How far a student's next-token distribution is from its teacher's, as functions of arrays.

One family has them all, the generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649, eq. 1)
between the teacher's P and the student's Q, with the mixture M = beta P + (1 - beta) Q:

    beta = 0        KL(P || Q), forward: the student covers all that the teacher finds likely
    0 < beta < 1    beta KL(P || M) + (1 - beta) KL(Q || M)
    beta = 1        KL(Q || P), reverse: the student stays where the teacher finds it likely

All take log-probabilities, so a distribution may be the whole vocabulary's or that of a few buckets
(`buckets`): a divergence of coarser distributions is never larger (data processing).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.evaluate.likelihood.divergence import kl_divergence
from jaxllm.ops.likelihood import map_rows
from jaxllm.train.data.rows import IGNORED
from jaxllm.train.losses import log_likelihoods

NOTHING = -1e4  # the log-probability of what cannot be: its exponential is 0, and it is no NaN


class Mix(NamedTuple):
    """What is learned of a teacher: `alpha T^2 D + (1 - alpha) CE`.

    D is the divergence `beta` of both distributions at the temperature T, CE the cross-entropy with
    the text's own next token at temperature 1 (Hinton et al. 2015, arXiv 1503.02531, section 2: the
    T^2 keeps the size of the gradient whatever T is).
    """

    beta: float = 0.0
    temperature: float = 1.0
    alpha: float = 1.0


def divergence(p_XV: jax.Array, q_XV: jax.Array, beta: float) -> jax.Array:
    """The generalised Jensen-Shannon divergence in nats, `[..., V]` to `[...]`.

    p_XV, q_XV: finite log-probabilities of teacher and student. Never negative; where both are
    equal the value and its gradient are exactly 0.
    """
    if beta == 0:
        return kl_divergence(p_XV, q_XV)
    if beta == 1:
        return kl_divergence(q_XV, p_XV)
    m_XV = mixture(p_XV, q_XV, beta)
    return beta * kl_divergence(p_XV, m_XV) + (1 - beta) * kl_divergence(q_XV, m_XV)


def mixture(p_XV: jax.Array, q_XV: jax.Array, beta: float) -> jax.Array:
    """`log(beta exp(p) + (1 - beta) exp(q))`; p itself, to the bit, where q is p."""
    high_XV, low_XV = jnp.maximum(p_XV, q_XV), jnp.minimum(p_XV, q_XV)
    weight_XV = jnp.where(p_XV < q_XV, beta, 1 - beta)  # of the smaller one
    return high_XV + jnp.log1p(weight_XV * jnp.expm1(low_XV - high_XV))


def log_probs(logits_XV: jax.Array, size: int, temperature: float) -> jax.Array:
    """Float32 log-probabilities `[..., size]` of the first `size` tokens, at a temperature.

    What a vocabulary is padded with beyond them loses its share.
    """
    x_XV = logits_XV[..., :size].astype(jnp.float32)
    return jax.nn.log_softmax(x_XV if temperature == 1 else x_XV / temperature, axis=-1)


class Learned(NamedTuple):
    """Sums over the tokens that count, float32. tokens: how many these are."""

    loss: jax.Array
    divergence: jax.Array
    cross_entropy: jax.Array
    tokens: jax.Array


# Of the student's logits [N, T, V] and whatever the teacher says of the same tokens, [N, T, ...]:
# both log-probabilities.
Compared = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


def learned(
    logits_BTV: jax.Array,
    label_BT: jax.Array,
    teacher: Any,
    compared: Compared,
    mix: Mix,
    among: int = 1,
) -> Learned:
    """The loss of `Mix` summed over all tokens with a label.

    teacher: arrays `[B, T, ...]`. among: as of `map_rows`. A row of each device at a time, computed
    again in the backward pass: beside the logits and their gradient only one row takes `[T, V]`.
    """

    @jax.checkpoint
    def some(arrays: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
        logits_NTV, label_NT, told = arrays
        p_NTV, q_NTV = compared(logits_NTV, told)
        apart_NT = divergence(p_NTV, q_NTV, mix.beta)
        entropy_NT = -log_likelihoods(logits_NTV, label_NT)
        return jnp.where(label_NT == IGNORED, 0.0, apart_NT), entropy_NT

    apart_BT, entropy_BT = map_rows(some, (logits_BTV, label_BT, teacher), among)
    apart, entropy = apart_BT.sum(), entropy_BT.sum()
    loss = mix.alpha * mix.temperature**2 * apart
    if mix.alpha != 1:
        loss = loss + (1 - mix.alpha) * entropy
    return Learned(loss, apart, entropy, (label_BT != IGNORED).sum().astype(jnp.float32))


def of_logits(size: int, temperature: float) -> Compared:
    """What a teacher that runs says: its logits, on the first `size` tokens."""

    def compared(logits_NTV: jax.Array, teacher_NTV: jax.Array) -> tuple[jax.Array, jax.Array]:
        p_NTV = jax.lax.stop_gradient(log_probs(teacher_NTV, size, temperature))
        return p_NTV, log_probs(logits_NTV, size, temperature)

    return compared
