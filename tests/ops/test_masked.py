"""Attention under an explicit mask, and token likelihoods: gradients compared with PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxllm.ops.attention import Part
from jaxllm.ops.masked import attend_with_mask
from jaxllm.ops.token_logprobs import log_likelihood

B, T, K, G, H, SCALE = 2, 7, 3, 2, 5, 0.4
MASK = np.tril(np.ones((T, T), bool)) & (np.arange(T)[:, None] != 2)  # query 2 sees nothing


def attend_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float) -> torch.Tensor:
    """Return attention with soft-capped scores; zeros for the query that sees nothing."""
    k, v = (x.repeat_interleave(G, dim=2) for x in (k, v))
    score = cap * torch.tanh(SCALE * torch.einsum("btnh,bsnh->bnts", q, k) / cap)
    score = torch.where(torch.tensor(MASK), score, torch.tensor(-1e30, dtype=score.dtype))
    weight = torch.where(torch.tensor(MASK), torch.softmax(score, dim=-1), 0.0)
    return torch.einsum("bnts,bsnh->btnh", weight, v)


@pytest.mark.parametrize("forward_mode", [False, True])
def test_masked_attention_gradients_equal_torch(forward_mode: bool) -> None:
    """Both modes of differentiation have torch's slopes, also of a query that sees nothing."""
    rng = np.random.default_rng(7)
    shapes = [(B, T, K * G, H), (B, T, K, H), (B, T, K, H), (B, T, K * G, H)]
    *inputs, slope = (rng.standard_normal(s, np.float32) for s in shapes)
    position = jnp.zeros((B, T), jnp.int32)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = jnp.broadcast_to(jnp.asarray(MASK), (B, T, T))
        return attend_with_mask(q, [Part(k, v, position)], mask, scale=SCALE, cap=3.0)

    theirs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    expected = attend_torch(*theirs, 3.0)
    expected.backward(torch.tensor(slope, dtype=torch.float64))
    wanted = [x.grad.numpy() for x in theirs if x.grad is not None]
    arrays = [jnp.asarray(x) for x in inputs]
    if forward_mode:
        directions = [jnp.asarray(rng.standard_normal(s, np.float32)) for s in shapes[:3]]
        moved = jax.jvp(run, arrays, directions)[1]
        along = sum((np.asarray(d) * w).sum() for d, w in zip(directions, wanted, strict=True))
        np.testing.assert_allclose((np.asarray(moved) * slope).sum(), along, rtol=1e-4)
        return
    y, backward = jax.vjp(run, *arrays)
    np.testing.assert_allclose(y, expected.detach(), rtol=1e-5, atol=1e-6)
    assert not np.asarray(y)[:, 2].any()
    for found, want in zip(backward(jnp.asarray(slope)), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_likelihood_gradient_equals_torch() -> None:
    """The slope of a logit is that of torch's cross-entropy, also where a logit is -inf."""
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((5, 131), np.float32) * 4
    logits[1, 7] = -np.inf
    token = rng.integers(8, 131, 5)
    weight = rng.standard_normal(5).astype(np.float32)
    theirs = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    losses = torch.nn.functional.cross_entropy(theirs, torch.tensor(token), reduction="none")
    (-losses * torch.tensor(weight)).sum().backward()
    y, backward = jax.vjp(lambda x: log_likelihood(x, jnp.asarray(token, jnp.int32)), logits)
    np.testing.assert_allclose(y, -losses.detach(), rtol=1e-6)
    np.testing.assert_allclose(backward(jnp.asarray(weight))[0], theirs.grad, rtol=1e-5, atol=1e-7)
