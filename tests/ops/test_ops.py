"""The numerical operations against PyTorch, transformers and brute force."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.activations import ACT2FN

from jaxllm import ops
from jaxllm.config.model import Rope
from jaxllm.ops import native
from jaxllm.ops.attention import BLOCK
from tests.ops.ctypes_kernels import Cached
from tests.ops.samples import brute_force
from tests.test_against_transformers import ROPES


@pytest.mark.parametrize("name", [n for n in ROPES if n != "dynamic"])
def test_rotary_frequencies_equal_transformers(name: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=8, max_position_embeddings=96,
        rope_parameters=dict(ROPES[name]),
    )  # fmt: skip
    kind = ROPES[name]["rope_type"]
    compute = LlamaRotaryEmbedding.compute_default_rope_parameters
    theirs, magnitude = (ROPE_INIT_FUNCTIONS.get(kind) or compute)(config)
    ours, factor = ops.inverse_frequencies(Rope(**ROPES[name]), head_dim=64)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
    assert factor == pytest.approx(magnitude)


def test_rotary_angles_stay_exact_at_long_positions() -> None:
    """Angles are exact at positions that bfloat16 cannot represent: 256 and 257 differ, and 100,000
    is accurate.
    """
    rope = Rope(rope_type="default", rope_theta=1e4)
    position_BT = jnp.array([[256, 257, 2047, 100_000]])
    cos, sin = ops.rope_angles(
        rope, position_BT, jnp.array([1]), head_dim=64, max_position_embeddings=128
    )
    inverse = (1e4 ** -(np.arange(0, 64, 2) / 64)).astype(np.float32)
    angle = np.asarray(position_BT[0], np.float32)[:, None] * inverse  # as float32 rounds them
    np.testing.assert_allclose(cos[0], np.cos(angle.astype(np.float64)), atol=2e-6)
    np.testing.assert_allclose(sin[0], np.sin(angle.astype(np.float64)), atol=2e-6)
    assert float(jnp.abs(cos[0, 0] - cos[0, 1]).max()) > 0.1


def test_rotated_vectors_score_depends_on_relative_position() -> None:
    """The dot product of two rotated vectors depends only on the distance of their positions."""
    rope = Rope(rope_type="default", rope_theta=1e4)
    x = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def score(p: int, q: int) -> float:
        def rotated(v: jax.Array, position: int) -> jax.Array:
            angles = ops.rope_angles(
                rope, jnp.array([[position]]), jnp.array([1]), head_dim=16,
                max_position_embeddings=64,
            )  # fmt: skip
            return ops.rotate(v, *angles)

        return float((rotated(x[0], p) * rotated(x[1], q)).sum())

    assert score(3, 10) == pytest.approx(score(103, 110), abs=1e-4)
    assert score(3, 10) != pytest.approx(score(3, 11), abs=1e-2)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_activations_equal_transformers(name: str) -> None:
    x = np.linspace(-12, 12, 2001, dtype=np.float32)
    theirs = ACT2FN[name](torch.tensor(x)).numpy()
    np.testing.assert_allclose(ops.ACTIVATIONS[name](jnp.asarray(x)), theirs, atol=2e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
def test_norms_equal_pytorch(eps: float) -> None:
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype(np.float32) * 3 for s in ((2, 5, 40), (40,), (40,)))
    tx, tw, tb = map(torch.tensor, (x, w, b))
    layer = torch.nn.functional.layer_norm(tx, (40,), tw, tb, eps).numpy()
    rms = torch.nn.functional.rms_norm(tx, (40,), tw, eps).numpy()
    np.testing.assert_allclose(
        ops.layer_norm(*map(jnp.asarray, (x, w, b)), eps=eps), layer, atol=2e-5
    )
    np.testing.assert_allclose(ops.rms_norm(*map(jnp.asarray, (x, w)), eps=eps), rms, atol=2e-5)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("case", ["one part", "shared part", "gaps", "nothing to see"])
def test_attention_equals_brute_force(window: int | None, case: str, kernels: bool) -> None:
    rng = np.random.default_rng(1)
    B, T, N, K, H = 2, 3, 6, 2, 5
    q = rng.standard_normal((B, T, N, H)).astype(np.float32)
    q_pos = np.array([[4, 5, 6], [2, -1, 3]])

    def part(rows: int, positions: Any) -> tuple[np.ndarray, ...]:
        pos = np.broadcast_to(np.asarray(positions), (rows, len(positions)))
        shape = (rows, len(positions), K, H)
        k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        v[pos < 0] = np.nan  # empty slots must not be read
        return k, v, pos

    parts = {
        "one part": [part(B, [0, 1, 2, 3, 4, 5, 6])],
        "shared part": [part(1, [0, 1, 2]), part(B, [3, 4, 5])],
        "gaps": [part(B, [-1, 0, 5, -1, 2]), part(B, [6, 1, -1])],
        "nothing to see": [part(B, [7, 8, -1])],
    }[case]
    with contextlib.nullcontext() if kernels else native.disable_kernels():
        given = [ops.Part(*map(jnp.asarray, p)) for p in parts]
        ours, _ = ops.attend(jnp.asarray(q), jnp.asarray(q_pos), given, scale=0.3, window=window)
    expected, _ = brute_force(q, q_pos, [Cached(*part) for part in parts], 0.3, window)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
def test_attention_over_many_blocks_equals_one_softmax(kernels: bool) -> None:
    """Block-wise attention over more than three blocks equals one dense softmax."""
    S, K, H = 3 * BLOCK + 17, 2, 8
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (1, 4, 4, H)) * 3
    k, v = (jax.random.normal(key, (1, S, K, H)) for key in keys[1:])
    pos = jnp.where(jnp.arange(S) % 7 == 0, -1, jnp.arange(S))[None]
    q_pos = jnp.array([[5, BLOCK, 2 * BLOCK + 3, S + 1]])
    with contextlib.nullcontext() if kernels else native.disable_kernels():
        ours, _ = ops.attend(q, q_pos, [ops.Part(k, v, pos)], scale=0.5, window=None)
    seen = (pos[:, None] >= 0) & (pos[:, None] <= q_pos[:, :, None])
    scores = 0.5 * jnp.einsum("btkgh,bskh->bkgts", q.reshape(1, 4, K, 2, H), k)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    expected = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_attention_over_int8_entries_equals_dequantized() -> None:
    """Attention over int8 entries equals attention over their dequantized values; the attention
    mass sums to 4 heads.
    """
    rng = np.random.default_rng(2)
    k, v = (rng.standard_normal((1, 2 * BLOCK + 5, 2, 8)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((2, 1, 4, 8)).astype(np.float32)
    pos, q_pos = np.arange(2 * BLOCK + 5)[None], np.array([[300], [2 * BLOCK]])
    k8, v8 = (ops.cast(jnp.asarray(x), jnp.int8) for x in (k, v))
    part = ops.Part(k8, v8, jnp.asarray(pos))
    ours, mass = ops.attend(
        jnp.asarray(q), jnp.asarray(q_pos), [part], scale=0.3, window=None, mass=True
    )
    rounded = (np.asarray(ops.dequantize(k8)), np.asarray(ops.dequantize(v8)), pos)
    np.testing.assert_allclose(
        ours, brute_force(q, q_pos, [Cached(*rounded)], 0.3, None)[0], atol=1e-5
    )
    assert np.abs(rounded[0] - k).max() > 1e-3
    np.testing.assert_allclose(np.asarray(mass).sum(axis=1), 4, rtol=1e-5)
    assert not np.asarray(mass)[0, 301:].any()


def test_attention_gradient_equals_dense_softmax() -> None:
    """The gradients with respect to q, k and v equal those of a dense softmax."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (1, 3, 2, 4))
    k, v = (jax.random.normal(key, (1, 5, 1, 4)) for key in keys[1:])
    pos, q_pos = jnp.array([[0, 1, -1, 2, 3]]), jnp.array([[1, 2, 3]])

    def blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (ops.attend(q, q_pos, [ops.Part(k, v, pos)], scale=0.5, window=None)[0] ** 2).sum()

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        seen = (pos[:, None] >= 0) & (pos[:, None] <= q_pos[:, :, None])
        scores = jnp.einsum("btnh,bsh->bnts", q, k[:, :, 0]) * 0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
        return (jnp.einsum("bnts,bsh->btnh", weights, v[:, :, 0]) ** 2).sum()

    for ours, theirs in zip(
        jax.grad(blocks, (0, 1, 2))(q, k, v), jax.grad(dense, (0, 1, 2))(q, k, v), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
