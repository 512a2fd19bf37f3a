"""Attention sinks on every path: a score of each head that has a weight and no value."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxllm import ops
from jaxllm.ops import native
from jaxllm.ops.documents import attend_documents
from jaxllm.ops.masked import (
    attend_with_mask,
    attention_scores,
    document_mask,
    softmax_weights,
    weigh_values,
)

B, T, K, G, H, SCALE, WINDOW = 2, 7, 2, 3, 16, 0.4, 4
N = K * G
RNG = np.random.default_rng(5)
Q, KEYS, VALUES, SLOPE = (
    RNG.standard_normal((B, T, heads, H), np.float32) for heads in (N, K, K, N)
)
# The sink may be negligible, as large as scores, or so large that the others vanish.
SINKS = np.array([-1.0, 0.5, 3.0, -200.0, 200.0, 0.0], np.float32)
AT = np.stack([np.arange(T), np.array([0, 1, 2, 3, 4, -1, -1])]).astype(np.int32)
ALONE = np.zeros((B, T), np.int32)


def weights(q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return `[B, N, T, T]`, as transformers' gpt-oss: a softmax whose last column is dropped."""
    at = torch.tensor(AT)
    seen = (at[:, None] >= 0) & (at[:, None] <= at[:, :, None])
    seen &= at[:, :, None] - at[:, None] < WINDOW
    score = SCALE * torch.einsum("btnh,bsnh->bnts", q, k.repeat_interleave(G, dim=2))
    score = torch.where(seen[:, None], score, torch.tensor(-1e30, dtype=score.dtype))
    sink = sinks.reshape(1, N, 1, 1).expand(B, N, T, 1)
    weight = torch.softmax(torch.cat([score, sink], dim=-1), dim=-1)[..., :-1]
    return torch.where(seen[:, None], weight, 0.0)


def expected() -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return the weights, the heads, and the slopes of queries, keys, values and sinks."""
    arrays = [
        torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (Q, KEYS, VALUES, SINKS)
    ]
    q, k, v, sinks = arrays
    weight = weights(q, k, sinks)
    out = torch.einsum("bnts,bsnh->btnh", weight, v.repeat_interleave(G, dim=2))
    out.backward(torch.tensor(SLOPE, dtype=torch.float64))
    slopes = [x.grad.numpy() for x in arrays if x.grad is not None]
    return weight.detach().numpy(), out.detach().numpy(), slopes


def parts(k: Any, v: Any) -> list[ops.Part]:
    """Return the first three slots as a cache, and the others as new tokens."""
    return [
        ops.Part(k[:, begin:end], v[:, begin:end], jnp.asarray(AT[:, begin:end]))
        for begin, end in ((0, 3), (3, T))
    ]


def mask() -> jax.Array:
    part = ops.Part(jnp.asarray(KEYS), jnp.asarray(VALUES), jnp.asarray(AT))
    return document_mask(jnp.asarray(AT), [part], jnp.asarray(ALONE), window=WINDOW)


def by_attend(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    options: Any = {"scale": SCALE, "window": WINDOW}
    return ops.attend(q, jnp.asarray(AT), parts(k, v), sink_N=sinks, packed=True, **options)[0]


def by_mask(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    return attend_with_mask(q, parts(k, v), mask(), scale=SCALE, sink_N=sinks)


def by_documents(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    at, options = jnp.asarray(AT), {"window": WINDOW, "cap": None, "packed": True}
    return attend_documents(q, at, k, v, jnp.asarray(ALONE), scale=SCALE, sink_N=sinks, **options)


def by_weights(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    at, each = jnp.asarray(AT), parts(k, v)
    score = attention_scores(q, at, each, scale=SCALE, window=WINDOW)
    return weigh_values(softmax_weights(score, sinks), each, jnp.dtype(jnp.float32))


@pytest.mark.parametrize("run", [by_attend, by_mask, by_documents, by_weights])
@pytest.mark.parametrize("kernels", [False, True])
def test_heads_and_slopes_with_sinks_equal_torch(run: Callable[..., Any], kernels: bool) -> None:
    """Heads, and the slopes of queries, keys, values and sinks, on each path."""
    _, heads, slopes = expected()
    arrays = [jnp.asarray(x) for x in (Q, KEYS, VALUES, SINKS)]
    with native.use_one_path(False) if kernels else native.disable_kernels():
        found, backward = jax.vjp(jax.jit(run), *arrays)
        backs = backward(jnp.asarray(SLOPE))
    np.testing.assert_allclose(found, heads, rtol=1e-5, atol=2e-6)
    for back, slope in zip(backs, slopes, strict=True):
        np.testing.assert_allclose(back, slope, rtol=1e-4, atol=1e-5)


def test_kernel_of_each_set_takes_sinks() -> None:
    """The native kernel's heads, in both dtypes; rows that see nothing give zeros."""
    _, heads, _ = expected()
    at = jnp.asarray(AT)
    for isa in native.available_isas():
        native.isa(isa)
        for dtype, near in ((jnp.float32, 2e-6), (jnp.bfloat16, 0.03)):
            q, k, v = (jnp.asarray(x, dtype) for x in (Q, KEYS, VALUES))
            attend = jax.jit(partial(ops.attend, scale=SCALE, window=WINDOW))
            found = attend(q, at, parts(k, v), sink_N=jnp.asarray(SINKS))[0]
            np.testing.assert_allclose(found.astype(jnp.float32), heads, atol=near, err_msg=isa)
            assert not np.asarray(found[1, 5:], np.float32).any(), isa


def test_sink_takes_its_share_of_mass() -> None:
    """A slot's attention mass is the sum of its weights, of which the sink has taken its own."""
    weight, heads, _ = expected()
    q, k, v = map(jnp.asarray, (Q, KEYS, VALUES))
    options: Any = {"scale": SCALE, "window": WINDOW, "sink_N": jnp.asarray(SINKS)}
    found, mass = ops.attend(q, jnp.asarray(AT), parts(k, v), mass=True, **options)
    np.testing.assert_allclose(found, heads, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(mass, weight.sum(axis=(1, 2)), rtol=1e-5, atol=2e-6)
