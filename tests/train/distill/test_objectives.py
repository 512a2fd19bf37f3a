"""Distillation objectives: hidden states against torch, recorded against online teachers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jaxllm.errors import ConfigError
from jaxllm.train.data.rows import IGNORED
from jaxllm.train.distill import losses as states
from jaxllm.train.distill.losses import (
    DistillLossConfig,
    DistillRows,
    HiddenLossConfig,
    OnlineTeacherLoss,
    RecordedTeacherLoss,
    topk_logprobs,
)
from tests.tiny_models import VOCAB
from tests.train.distill.bigram_model import B, T, compute_logits, pairs, rows_of

KEY = jax.random.key(0)


def test_hidden_loss_equals_torch() -> None:
    rng = np.random.default_rng(0)
    student = [rng.standard_normal((B, T, 6), np.float32) for _ in range(3)]
    teacher = [rng.standard_normal((B, T, 10), np.float32) for _ in range(5)]
    rows = rows_of()
    counted = torch.tensor(np.asarray(rows.label_BT) != IGNORED)
    matrix = {n: rng.standard_normal((10, 6), np.float32) for n in (1, 2)}
    params = {states.PARAMS_KEY: {str(n): {"weight": jnp.asarray(x)} for n, x in matrix.items()}}
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
        found = states.hidden_loss(
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
    both = states.with_projections(params, hidden, model.config, wider, 0)
    assert both[states.PARAMS_KEY]["1"]["weight"].shape == (56, model.config.hidden_size)
    assert states.remove_projections(both).keys() == params.keys()
    same = states.with_projections(params, hidden, model.config, model.config, 0)
    assert same.keys() == params.keys()
    with pytest.raises(ConfigError, match="hidden state 2 of the teacher does not exist"):
        states.check_pairs(HiddenLossConfig("mse", ((1, 2),)), model.config, model.config)
    with pytest.raises(ConfigError, match="needs pairs of layers"):
        states.check_pairs(HiddenLossConfig(), model.config, model.config)


def test_even_pairs_spaces_teacher_layers_evenly() -> None:
    assert states.even_pairs(3, 6) == ((1, 2), (2, 4), (3, 6))
    assert states.even_pairs(2, 2) == ((1, 1), (2, 2))
