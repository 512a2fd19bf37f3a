"""The three losses and their advantages, compared with torch on random arrays."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxllm.research.rl.losses import (
    FORMS,
    AnswerRows,
    PolicyLoss,
    group_advantages,
    token_weights,
)
from jaxllm.train.data.rows import blank_rows

PROMPTS, GROUP, WIDTH = 3, 5, 7
LOW, HIGH = 0.2, 0.28


def random_answers(seed: int) -> dict[str, np.ndarray]:
    """Return lengths, rewards, and log-probabilities far enough apart to be clipped."""
    rng, B = np.random.default_rng(seed), PROMPTS * GROUP
    length_B = rng.integers(1, WIDTH + 1, B)
    there_BN = np.arange(WIDTH)[None] < length_B[:, None]
    arrays = {name: there_BN * rng.normal(-2, 0.4, (B, WIDTH)) for name in ("old", "reference")}
    for name in ("logprob", "raw"):
        arrays[name] = arrays["old"] + there_BN * rng.normal(0, 0.3, (B, WIDTH))
    found = {name: x.astype(np.float32) for name, x in arrays.items()}
    return {**found, "length": length_B, "reward": rng.normal(1, 2, B).astype(np.float32)}


def torch_loss(form: str, beta: float, x: dict[str, Any]) -> torch.Tensor:
    """Return the loss as the papers write it, each form for itself."""
    reward_PG = x["reward"].view(PROMPTS, GROUP)
    advantage = reward_PG - reward_PG.mean(1, keepdim=True)
    if form != "dr-grpo":
        advantage = advantage / (reward_PG.std(1, keepdim=True) + 1e-4)
    ratio, a = torch.exp(x["logprob"] - x["old"]), advantage.view(-1, 1)
    each = -torch.min(ratio * a, torch.clamp(ratio, 1 - LOW, 1 + HIGH) * a)
    d = x["reference"] - x["raw"]
    each = each + beta * (torch.exp(d) - d - 1)
    length = x["length"]
    mask = (torch.arange(WIDTH)[None] < length[:, None]).float()
    if form == "grpo":
        return ((each * mask).sum(1) / length).mean()
    if form == "dr-grpo":
        return (each * mask).sum() / (PROMPTS * GROUP * WIDTH)
    return (each * mask).sum() / mask.sum()


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_equal_torch(form: str, beta: float) -> None:
    arrays = random_answers(len(form))
    x = {name: torch.tensor(array) for name, array in arrays.items()}
    x["logprob"].requires_grad_()
    x["raw"].requires_grad_()
    expected = torch_loss(form, beta, x)
    expected.backward()
    rows = AnswerRows(
        **vars(blank_rows(PROMPTS * GROUP, WIDTH)),
        logprob_BN=arrays["old"],
        reference_BN=arrays["reference"],
        weight_BN=token_weights(arrays["length"], WIDTH, form),
        advantage_B=group_advantages(arrays["reward"].reshape(PROMPTS, GROUP), form).reshape(-1),
        reward_B=arrays["reward"],
    )

    def loss(raw_BN: jax.Array, logprob_BN: jax.Array) -> tuple[jax.Array, Any]:
        found = PolicyLoss(LOW, HIGH, beta).compute(raw_BN, logprob_BN, rows)
        return found.total / found.weight, found

    given = jnp.asarray(arrays["raw"]), jnp.asarray(arrays["logprob"])
    (value, found), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(*given)
    assert float(value) == pytest.approx(float(expected.detach()), abs=1e-6)
    wanted = (x["raw"].grad if beta else torch.zeros_like(x["raw"])), x["logprob"].grad
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert theirs is not None
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6, rtol=1e-5)
    means = {name: float(total / found.weight) for name, total in found.extras.items()}
    assert means["reward"] == pytest.approx(arrays["reward"].mean(), rel=1e-5)
    assert means["length"] == pytest.approx(arrays["length"].mean(), rel=1e-5)
    assert 0 < means["clipped"] < 1
    assert ("kl" in means) == (beta > 0)


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_equal_lengths_are_equal_in_all_forms(form: str) -> None:
    """Answers of full length have the same weight in all forms: one over the length."""
    found = token_weights(np.full(4, WIDTH), WIDTH, form)
    np.testing.assert_allclose(found, 1 / WIDTH, rtol=1e-6)


def test_advantages_of_equal_rewards_are_zero() -> None:
    """A group that is always right, or always wrong, teaches nothing; near rewards differ."""
    for form, size, reward in product(FORMS, (3, 7, 8), (0.1, 0.7, -777.7, 999999999.9)):
        assert not group_advantages(np.full((2, size), reward), form).any()
    near = group_advantages(np.array([[16777216.0, 16777217.0]]), "dr-grpo")
    assert near.tolist() == [[-0.5, 0.5]]
