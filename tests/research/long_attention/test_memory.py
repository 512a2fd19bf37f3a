"""The compressive memory against float64 sums, token by token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.buckets import make_buckets, max_segments
from jaxllm.research.long_attention.memory import (
    UPDATES,
    Memory,
    Update,
    discard_segment,
    empty_memory,
    finish_segment,
    read,
    run_segments,
    write,
)

B, T, N, K, H, L = 2, 23, 6, 2, 5, 4


@pytest.fixture(scope="module")
def qkv() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((B, T, heads, H), np.float32) for heads in (N, K, K))


def brute_force(q: Any, k: Any, v: Any, segments: Any, update: str) -> tuple[Any, ...]:
    """Return one row's outputs `[T, N, H]`, M and z by the paper's equations, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    out, heads = np.zeros((len(q), q.shape[1], H)), []
    for h in range(K):
        m, z = np.zeros((H, H)), np.zeros(H)
        for s in sorted(set(segments)):
            here = [t for t in range(len(q)) if segments[t] == s]
            for t in here:
                for n in range(h * (N // K), (h + 1) * (N // K)):
                    out[t, n] = q[t, n] @ m / (q[t, n] @ z) if z.any() else 0
            new, old, grown = np.zeros((H, H)), np.zeros((H, H)), np.zeros(H)
            for t in here:
                known = k[t, h] @ m / (k[t, h] @ z) if z.any() else np.zeros(H)
                new += np.outer(k[t, h], v[t, h])
                old += np.outer(k[t, h], known)
                grown += k[t, h]
            if update == "delta_once":
                m = m + new - np.minimum(1, z / grown)[:, None] * old
                z = np.maximum(z, grown)
            else:
                m, z = m + new - (old if update == "delta" else 0), z + grown
        heads.append((m, z))
    return out, np.stack([m for m, _ in heads]), np.stack([z for _, z in heads])


RUN = jax.jit(
    lambda memory, q, k, v, at, update, length: run_segments(
        memory, q, k, v, make_buckets(at, length), update
    ),
    static_argnums=(5, 6),
)


def finished(memory: Memory) -> Memory:
    return finish_segment(memory, memory.segment_B + 1)


@pytest.mark.parametrize("update", UPDATES)
def test_run_segments_equals_loops_by_hand(qkv: Any, update: Update) -> None:
    """Outputs and memory equal float64 loops, for one row from position 0 and one from within a
    segment with padding before and between its tokens.
    """
    at = np.stack([np.arange(T), np.arange(T) + 5])
    at[1, [0, 1, 9, 20]] = -1
    at[1, at[1] >= 0] = np.arange(T - 4) + 6
    out, there, memory = RUN(
        empty_memory(B, K, H, update), *qkv, jnp.asarray(at, jnp.int32), update, L
    )
    memory = finished(memory)
    for row in range(B):
        real = at[row] >= 0
        segments = at[row, real] // L
        theirs, m, z = brute_force(*(x[row, real] for x in qkv), segments, update)
        np.testing.assert_allclose(out[row, real], theirs, atol=2e-5)
        assert (np.asarray(there[row, real]) == (segments > segments[0])[:, None]).all()
        np.testing.assert_allclose(memory.m_BKHH[row], m, atol=1e-4)
        np.testing.assert_allclose(memory.z_BKH[row], z, rtol=1e-5)


def test_delta_once_retains_repeated_bindings_unlike_delta() -> None:
    """The published delta rule halves a value that is written twice; delta_once returns it, and
    replaces it if it changes.
    """
    rng = np.random.default_rng(2)
    k, v, other = (jnp.asarray(rng.standard_normal((1, 1, 1, H), np.float32)) for _ in range(3))
    real = jnp.ones((1, 1), bool)

    def after(update: Update, *values: jax.Array) -> Memory:
        memory = empty_memory(1, 1, H, update)
        for value in values:
            memory = finished(write(memory, k, value, real, update))
        return memory

    def recall(memory: Memory) -> Any:
        return read(memory, k)[0]

    for update in UPDATES:
        np.testing.assert_allclose(recall(after(update, v)), v, atol=1e-5)
    once, twice = after("delta", v), after("delta", v, v)
    np.testing.assert_allclose(twice.m_BKHH, once.m_BKHH, atol=1e-5)  # stated in the paper
    np.testing.assert_allclose(twice.z_BKH, 2 * once.z_BKH, rtol=1e-6)  # not stated in the paper
    np.testing.assert_allclose(recall(twice), v / 2, atol=1e-5)
    np.testing.assert_allclose(recall(after("delta_once", v, v, v)), v, atol=1e-5)
    np.testing.assert_allclose(recall(after("delta_once", v, other)), other, atol=1e-5)
    np.testing.assert_allclose(recall(after("linear", v, other)), (v + other) / 2, atol=1e-5)


@pytest.mark.parametrize("scale", [300.0, 6e4])
def test_float16_inputs_give_finite_results(scale: float) -> None:
    """Outputs, memory and gradients are finite for inputs that would overflow in float16."""
    rng = np.random.default_rng(4)
    q, k, v = (
        jnp.asarray(scale * rng.uniform(-1, 1, (1, 9, heads, H)), jnp.float16)
        for heads in (N, K, K)
    )
    at = jnp.arange(9, dtype=jnp.int32)[None]
    out, _, memory = RUN(empty_memory(1, K, H, "delta"), q, k, v, at, "delta", L)
    assert out.dtype == jnp.float32
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, memory)))
    gradient = jax.grad(
        lambda q: RUN(empty_memory(1, K, H, "delta"), q, k, v, at, "delta", L)[0].sum()
    )
    assert np.isfinite(gradient(q)).all()


def test_padding_leaves_memory_unchanged(qkv: Any) -> None:
    at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    _, _, memory = RUN(empty_memory(B, K, H, "delta"), *qkv, at, "delta", L)
    _, _, after = RUN(memory, *qkv, jnp.full_like(at, -1), "delta", L)
    for ours, theirs in zip(*map(jax.tree.leaves, (after, memory)), strict=True):
        assert np.array_equal(ours, theirs)


def test_discard_segment_restores_segment_start(qkv: Any) -> None:
    """Discarding the current segment gives the memory after the last finished one."""
    at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    border = T // L * L
    _, _, memory = RUN(empty_memory(B, K, H, "delta"), *qkv, at, "delta", L)
    _, _, before = RUN(
        empty_memory(B, K, H, "delta"), *qkv, jnp.where(at < border, at, -1), "delta", L
    )
    for ours, theirs in zip(
        *map(jax.tree.leaves, (discard_segment(memory), finished(before))), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_max_segments_equals_worst_case(length: int) -> None:
    """The bound equals the most segments that any run of so many tokens touches."""
    for tokens in range(1, 3 * length + 3):
        touched = max(
            len({p // length for p in range(first, first + tokens)}) for first in range(length)
        )
        assert touched == max_segments(tokens, length)
