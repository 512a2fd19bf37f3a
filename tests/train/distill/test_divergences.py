"""Divergences, buckets and vocabularies of distillation against torch and closed forms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jaxllm.train.data.rows import IGNORED
from jaxllm.train.distill.buckets import Buckets, buckets, of_buckets
from jaxllm.train.distill.divergences import (
    Mix,
    divergence,
    learned,
    log_probs,
    of_logits,
)

B, T, V = 2, 5, 23
BETAS = [0.0, 0.1, 0.5, 1.0]


def drawn(seed: int, size: int = V) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((B, T, size))).astype(np.float32)


TEACHER, STUDENT = drawn(0), drawn(1)
LABEL = np.random.default_rng(2).integers(0, V, (B, T)).astype(np.int32)
LABEL[0, :2] = LABEL[1, 4] = IGNORED


def gkd(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """The loss of each token as GKD's trainer in TRL computes it, written out."""
    s, t = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    if beta in (0, 1):
        first, second = (s, t) if beta == 0 else (t, s)
        return F.kl_div(first, second, reduction="none", log_target=True).sum(-1)
    log_beta = torch.log(torch.tensor(beta))
    rest = torch.log1p(torch.tensor(-beta))
    m = torch.logsumexp(torch.stack([s + rest, t + log_beta]), dim=0)
    of_teacher = F.kl_div(m, t, reduction="none", log_target=True)
    of_student = F.kl_div(m, s, reduction="none", log_target=True)
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1)


@pytest.mark.parametrize("beta", BETAS)
def test_loss_and_gradient_are_those_of_torch(beta: float) -> None:
    """Of the whole loss: temperature, its square, the cross-entropy, the labels that count."""
    alpha, temperature = 0.7, 2.0
    student = torch.tensor(STUDENT, requires_grad=True)
    each = gkd(student / temperature, torch.tensor(TEACHER) / temperature, beta)
    label = torch.tensor(LABEL).long()
    counted = label != IGNORED
    entropy = F.cross_entropy(student.reshape(-1, V), label.reshape(-1), reduction="sum")
    wanted = alpha * temperature**2 * each[counted].sum() + (1 - alpha) * entropy
    wanted.backward()

    def loss(logits: jax.Array) -> tuple[jax.Array, Any]:
        compared = of_logits(V, temperature)
        found = learned(
            logits,
            jnp.asarray(LABEL),
            jnp.asarray(TEACHER),
            compared,
            Mix(beta, temperature, alpha),
        )
        return found.loss, found

    (ours, found), slope = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(STUDENT))
    np.testing.assert_allclose(ours, wanted.item(), rtol=1e-5)
    np.testing.assert_allclose(found.cross_entropy, entropy.item(), rtol=1e-5)
    np.testing.assert_allclose(found.divergence, each[counted].sum().item(), rtol=1e-5)
    assert found.tokens == counted.sum().item()
    assert student.grad is not None
    np.testing.assert_allclose(slope, student.grad.numpy(), atol=2e-5)
    assert not np.asarray(slope)[LABEL == IGNORED].any()


@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_that_is_the_student_teaches_nothing(beta: float) -> None:
    def loss(logits: jax.Array) -> jax.Array:
        said = jnp.asarray(TEACHER)
        return learned(logits, jnp.asarray(LABEL), said, of_logits(V, 2.0), Mix(beta, 2.0, 1)).loss

    value, slope = jax.value_and_grad(loss)(jnp.asarray(TEACHER))
    assert value == 0
    assert not np.asarray(slope).any()


def test_a_row_in_which_nothing_counts_is_zero() -> None:
    def loss(logits: jax.Array) -> jax.Array:
        label = jnp.full((B, T), IGNORED)
        return learned(
            logits, label, jnp.asarray(TEACHER), of_logits(V, 1.0), Mix(0.5, 1, 0.5)
        ).loss

    value, slope = jax.value_and_grad(loss)(jnp.asarray(STUDENT))
    assert value == 0
    assert not np.asarray(slope).any()


def test_at_a_high_temperature_the_gradient_is_the_difference_of_centred_logits() -> None:
    """Hinton et al. 2015, eq. 4: T^2 dKL/dz = (z_s - z_t) / V, where both have mean 0."""

    def loss(logits: jax.Array) -> jax.Array:
        label, said = jnp.zeros((B, T), jnp.int32), jnp.asarray(TEACHER)
        return learned(logits, label, said, of_logits(V, 1e3), Mix(0, 1e3, 1)).loss

    slope = jax.grad(loss)(jnp.asarray(STUDENT))
    centred = [x - x.mean(-1, keepdims=True) for x in (STUDENT, TEACHER)]
    np.testing.assert_allclose(slope, (centred[0] - centred[1]) / V, atol=3e-3)


def test_what_cannot_be_is_no_nan() -> None:
    """A teacher that is sure of a token, and a student that is sure of another."""
    sure = np.full((1, 1, V), -1e4, np.float32)
    teacher, student = sure.copy(), sure.copy()
    teacher[..., 3], student[..., 5] = 0, 0
    for beta in BETAS:
        value, slope = jax.value_and_grad(
            lambda x, beta=beta: divergence(jnp.asarray(teacher), x, beta).sum()
        )(jnp.asarray(student))
        assert np.isfinite(value)
        assert np.isfinite(np.asarray(slope)).all()
    half = divergence(jnp.asarray(teacher), jnp.asarray(student), 0.5)
    np.testing.assert_allclose(half, np.log(2), rtol=1e-6)  # the largest that it can be


def test_padding_of_the_vocabulary_changes_nothing() -> None:
    """Qwen's case: 23 tokens, padded to 31 rows in one model and 26 in the other."""
    wide = [np.concatenate([x, drawn(9, n)], -1) for x, n in ((STUDENT, 8), (TEACHER, 3))]
    for temperature in (1.0, 2.0):
        plain = [log_probs(jnp.asarray(x), V, temperature) for x in (STUDENT, TEACHER)]
        cut = [log_probs(jnp.asarray(x), V, temperature) for x in wide]
        np.testing.assert_array_equal(plain, cut)


def kl_of(k: int, beta: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Divergences by buckets and in full, `[B, T]`."""
    told = buckets(jnp.asarray(TEACHER), V, 1.0, k)
    p, q = of_buckets(V, 1.0)(jnp.asarray(STUDENT), told)
    full = [log_probs(jnp.asarray(x), V, 1.0) for x in (TEACHER, STUDENT)]
    return np.asarray(divergence(p, q, beta)), np.asarray(divergence(*full, beta))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_buckets_are_a_lower_bound(beta: float) -> None:
    before = np.zeros((B, T))
    for k in (1, 4, 16):
        some, full = kl_of(k, beta)
        assert (some <= full + 1e-2).all()  # float16 log-probabilities
        assert (some >= before - 1e-2).all()  # the more buckets, the nearer
        before = some


def test_buckets_of_all_tokens_are_the_whole_distribution() -> None:
    told = buckets(jnp.asarray(TEACHER), V, 1.0, V)
    assert np.isneginf(np.asarray(told.logprob_BTL)[..., -1]).all()
    np.testing.assert_allclose(*kl_of(V), rtol=2e-3, atol=1e-3)
    slope = jax.grad(lambda x: divergence(*of_buckets(V, 1.0)(x, told), 0.0).sum())(
        jnp.asarray(STUDENT)
    )
    s, t = (jax.nn.softmax(x) for x in (STUDENT, TEACHER))
    np.testing.assert_allclose(slope, s - t, atol=2e-3)  # dKL/dz, in closed form


def test_buckets_hold_the_likeliest_tokens_and_the_rest() -> None:
    found: Buckets = buckets(jnp.asarray(TEACHER), V, 2.0, 4)
    p = torch.log_softmax(torch.tensor(TEACHER) / 2, -1)
    top, token = p.topk(4, -1)
    np.testing.assert_array_equal(found.token_BTk, token.numpy())
    assert (found.token_BTk.dtype, found.logprob_BTL.dtype) == (jnp.uint16, jnp.float16)
    np.testing.assert_allclose(found.logprob_BTL[..., :4], top.numpy(), rtol=1e-3)
    rest = torch.log(1 - top.exp().sum(-1))
    np.testing.assert_allclose(found.logprob_BTL[..., 4], rest.numpy(), rtol=2e-3)
