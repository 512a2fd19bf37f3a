"""Distillation losses against torch and closed forms: divergences, top-k logits, hidden states."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jaxllm.errors import ConfigError
from jaxllm.research.distill.losses import (
    PARAMS_KEY,
    DistillLossConfig,
    DistillRows,
    HiddenLossConfig,
    OnlineTeacherLoss,
    RecordedTeacherLoss,
    TopKLogprobs,
    check_pairs,
    compare_logits,
    compare_topk,
    distill_loss,
    divergence,
    even_pairs,
    hidden_loss,
    log_probs,
    remove_projections,
    topk_logprobs,
    with_projections,
)
from jaxllm.train.data.rows import IGNORED
from tests.research.distill.bigram_model import compute_logits, pairs, rows_of
from tests.tiny_models import VOCAB

B, T, V = 2, 5, 23
BETAS = [0.0, 0.3, 1.0]


def random_logits(seed: int, size: int = V) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((B, T, size))).astype(np.float32)


TEACHER, STUDENT = random_logits(0), random_logits(1)
LABEL = np.random.default_rng(2).integers(0, V, (B, T)).astype(np.int32)
LABEL[0, :2] = LABEL[1, 4] = IGNORED


def gkd(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the loss per token, as the GKD trainer of TRL computes it."""
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


# (beta, temperature, alpha): every kind of divergence, and a high temperature.
MIXES = [DistillLossConfig(beta, 2.0, 0.7) for beta in BETAS] + [DistillLossConfig(0.0, 1e3, 1.0)]


@jax.jit
def losses(student: jax.Array, teacher: jax.Array, label: jax.Array) -> Any:
    """Return the gradient of the loss and the loss sums for each of MIXES."""

    def loss(student: jax.Array, mix: DistillLossConfig) -> tuple[jax.Array, Any]:
        found = distill_loss(student, label, teacher, compare_logits(V, mix.temperature), mix)
        return found.total, found

    return [jax.grad(loss, has_aux=True)(student, mix) for mix in MIXES]


def test_distill_loss_and_gradient_equal_torch() -> None:
    """The whole loss: temperature and its square, the cross-entropy share and ignored labels."""
    label = torch.tensor(LABEL).long()
    counted = label != IGNORED
    for mix, (gradient, found) in zip(BETAS, losses(STUDENT, TEACHER, LABEL)[:-1], strict=True):
        student = torch.tensor(STUDENT, requires_grad=True)
        each = gkd(student / 2, torch.tensor(TEACHER) / 2, mix)
        entropy = F.cross_entropy(student.reshape(-1, V), label.reshape(-1), reduction="sum")
        expected = 0.7 * 4 * each[counted].sum() + 0.3 * entropy
        expected.backward()
        np.testing.assert_allclose(found.total, expected.item(), rtol=1e-5)
        np.testing.assert_allclose(found.extras["cross_entropy"], entropy.item(), rtol=1e-5)
        np.testing.assert_allclose(
            found.extras["divergence"], each[counted].sum().item(), rtol=1e-5
        )
        assert found.weight == counted.sum().item()
        assert student.grad is not None
        np.testing.assert_allclose(gradient, student.grad.numpy(), atol=2e-5)
        assert not np.asarray(gradient)[LABEL == IGNORED].any()


def test_distill_loss_without_labels_is_zero() -> None:
    for gradient, found in losses(STUDENT, TEACHER, np.full_like(LABEL, IGNORED)):
        assert (float(found.total), float(found.weight)) == (0, 0)
        assert not np.asarray(gradient).any()


def test_distill_gradient_at_high_temperature_equals_closed_form() -> None:
    """Hinton et al. 2015, eq. 4: T^2 dKL/dz = (z_s - z_t) / V, where both have mean 0."""
    gradient, _ = losses(STUDENT, TEACHER, np.zeros_like(LABEL))[-1]
    centred = [x - x.mean(-1, keepdims=True) for x in (STUDENT, TEACHER)]
    np.testing.assert_allclose(gradient, (centred[0] - centred[1]) / V, atol=3e-3)


def test_distill_loss_is_finite_for_disjoint_distributions() -> None:
    """With teacher and student certain of different tokens, losses and gradients are finite; JSD
    reaches its maximum, the entropy of beta.
    """
    teacher, student = (np.full((B, T, V), -1e4, np.float32) for _ in range(2))
    teacher[..., 3], student[..., 5] = 0, 0
    each = losses(student, teacher, LABEL)
    for gradient, found in each:
        assert np.isfinite(found.total)
        assert np.isfinite(np.asarray(gradient)).all()
    between = each[1][1]  # its maximum is the entropy of beta
    entropy = -0.3 * np.log(0.3) - 0.7 * np.log(0.7)
    np.testing.assert_allclose(between.extras["divergence"] / between.weight, entropy, rtol=1e-6)


def test_log_probs_ignore_vocabulary_padding() -> None:
    """As in Qwen, both models pad 23 tokens to different row counts: 31 and 26."""
    for x, more in ((STUDENT, 8), (TEACHER, 3)):
        wide = jnp.asarray(np.concatenate([x, random_logits(9, more)], -1))
        plain = log_probs(jnp.asarray(x), V, 2.0)
        np.testing.assert_array_equal(log_probs(wide, V, 2.0), plain)


KS = [1, 8, V]
SOME = [0.3]


@jax.jit
def topk_divergences(student: jax.Array, teacher: jax.Array) -> Any:
    """Return the top-k logits, their divergences `[k, beta, B, T]`, the full divergences
    `[beta, B, T]`, and the KL gradient at k = V.
    """
    recorded = {k: topk_logprobs(teacher, V, 1.0, k) for k in KS}
    p, q = (log_probs(x, V, 1.0) for x in (teacher, student))

    def kl(student: jax.Array) -> jax.Array:
        return divergence(*compare_topk(V, 1.0)(student, recorded[V]), 0.0).sum()

    each = [compare_topk(V, 1.0)(student, recorded[k]) for k in KS]
    some = jnp.stack([jnp.stack([divergence(*both, beta) for beta in SOME]) for both in each])
    full = jnp.stack([divergence(p, q, beta) for beta in SOME])
    return recorded, some, full, jax.grad(kl)(student)


def test_topk_divergence_bounds_and_reaches_full_divergence() -> None:
    """The divergence over top-k logits grows with k, never exceeds the full one, and equals it at k
    = V, with the gradient softmax(s) - softmax(t).
    """
    recorded, some, full, gradient = topk_divergences(STUDENT, TEACHER)
    rounding = 1e-2  # float16 log-probabilities
    assert (some <= full[None] + rounding).all()
    assert (np.diff(some, axis=0) >= -rounding).all()  # non-decreasing in k
    assert (some[0, 0] < full[0] - 0.1).any()
    assert np.isneginf(np.asarray(recorded[V].logprob_BTL)[..., -1]).all()
    np.testing.assert_allclose(some[-1], full, rtol=2e-3, atol=1e-3)
    s, t = (np.asarray(torch.softmax(torch.tensor(x), -1)) for x in (STUDENT, TEACHER))
    np.testing.assert_allclose(gradient, s - t, atol=2e-3)  # dKL/dz, in closed form


def test_topk_logprobs_hold_topk_and_remainder() -> None:
    found: TopKLogprobs = topk_divergences(STUDENT, TEACHER)[0][8]
    p = torch.log_softmax(torch.tensor(TEACHER), -1)
    top, token = p.topk(8, -1)
    np.testing.assert_array_equal(found.token_BTk, token.numpy())
    assert (found.token_BTk.dtype, found.logprob_BTL.dtype) == (jnp.uint16, jnp.float16)
    np.testing.assert_allclose(found.logprob_BTL[..., :8], top.numpy(), rtol=1e-3)
    rest = torch.log(1 - top.exp().sum(-1))
    np.testing.assert_allclose(found.logprob_BTL[..., 8], rest.numpy(), rtol=2e-3)


KEY = jax.random.key(0)


def test_hidden_loss_equals_torch() -> None:
    rng = np.random.default_rng(0)
    rows = rows_of()
    shape = rows.token_BT.shape
    student = [rng.standard_normal((*shape, 6), np.float32) for _ in range(3)]
    teacher = [rng.standard_normal((*shape, 10), np.float32) for _ in range(5)]
    counted = torch.tensor(np.asarray(rows.label_BT) != IGNORED)
    matrix = {n: rng.standard_normal((10, 6), np.float32) for n in (1, 2)}
    params = {PARAMS_KEY: {str(n): {"weight": jnp.asarray(x)} for n, x in matrix.items()}}
    layers = ((1, 2), (2, 4))
    for by in ("mse", "cosine"):
        expected = torch.zeros(())
        for s, t in layers:
            ours = torch.tensor(student[s]) @ torch.tensor(matrix[s]).T
            theirs = torch.tensor(teacher[t])
            each = ((ours - theirs) ** 2).mean(-1)
            if by == "cosine":
                each = 1 - F.cosine_similarity(ours, theirs, dim=-1)
            expected += each[counted].sum() / len(layers)
        found = hidden_loss(
            HiddenLossConfig(by, layers), params, _arrays(student), _arrays(teacher), rows.label_BT
        )
        np.testing.assert_allclose(found, expected.item(), rtol=1e-5)


def _arrays(each: list[np.ndarray]) -> list[jax.Array]:
    return list(map(jnp.asarray, each))


def test_recorded_teacher_loss_equals_online_loss() -> None:
    """With recorded logits for every token, the loss and its parts equal those of the running
    teacher.
    """
    (model, params), (_, teacher) = pairs(0, 0.7), pairs(1, 0.7)
    rows, mix = rows_of(), DistillLossConfig(0.5, 2.0, 0.8)
    logits = compute_logits(model, teacher, rows)
    recorded_rows = DistillRows(
        rows.token_BT, rows.label_BT, rows.position_BT, rows.document_BT,
        teacher=jax.jit(topk_logprobs, static_argnums=(1, 2, 3))(logits, VOCAB, 2.0, VOCAB),
    )  # fmt: skip

    objective, recorded = OnlineTeacherLoss(model, VOCAB, mix), RecordedTeacherLoss(VOCAB, mix)

    one = jax.jit(lambda t: objective(model, params, t, rows, KEY))(teacher)
    two = jax.jit(lambda r: recorded(model, params, (), r, KEY))(recorded_rows)
    assert float(one.total) > 1
    for ours, theirs in zip(jax.tree.leaves(two), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3)
    assert float(one.weight) == (np.asarray(rows.label_BT) != IGNORED).sum()
    with pytest.raises(ConfigError, match="no recorded teacher outputs"):
        recorded(model, params, (), rows, KEY)


def test_projections_are_added_and_removed() -> None:
    """Projections are created only where widths differ and can be removed again; invalid layer
    pairs and losses are refused.
    """
    model, params = pairs(0, 1.0)
    wider = dataclasses.replace(model.config, hidden_size=56)
    hidden = HiddenLossConfig("mse", ((1, 1),))
    both = with_projections(params, hidden, model.config, wider, 0)
    assert both[PARAMS_KEY]["1"]["weight"].shape == (56, model.config.hidden_size)
    assert remove_projections(both).keys() == params.keys()
    same = with_projections(params, hidden, model.config, model.config, 0)
    assert same.keys() == params.keys()
    with pytest.raises(ConfigError, match="hidden state 2 of the teacher does not exist"):
        check_pairs(HiddenLossConfig("mse", ((1, 2),)), model.config, model.config)
    with pytest.raises(ConfigError, match="needs pairs of layers"):
        check_pairs(HiddenLossConfig(), model.config, model.config)


def test_even_pairs_spaces_teacher_layers_evenly() -> None:
    assert even_pairs(3, 6) == ((1, 2), (2, 4), (3, 6))
    assert even_pairs(2, 2) == ((1, 1), (2, 2))
