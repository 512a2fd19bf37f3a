"""The attention kernel through XLA, on every available instruction set, against brute force."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import ops
from jaxllm.ops import native
from tests.ops import samples
from tests.ops.ctypes_kernels import Cached

pytestmark = pytest.mark.usefixtures("kernels")

Parts = list[tuple[np.ndarray, np.ndarray, np.ndarray]]


def brute_force(q: np.ndarray, at: np.ndarray, parts: Parts, *options: Any) -> np.ndarray:
    """Return softmax attention in float64. options: scale, window, cap."""
    return samples.brute_force(q, at, [Cached(*part) for part in parts], *options)[0]


def in_numpy(parts: list[ops.Part]) -> Parts:
    def dense(x: ops.Entries) -> np.ndarray:
        return np.asarray(ops.dequantize(x).astype(jnp.float32))

    return [(dense(p.k_BSKH), dense(p.v_BSKH), np.asarray(p.position_BS)) for p in parts]


@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])  # test_kernels.py has the others
def test_attention_reads_cache_in_place(cache_dtype: str) -> None:
    """Attention over shared, per-row and mixed cache parts equals brute force; empty slots and NaN
    queries do not leak.
    """
    rng = np.random.default_rng(6)
    for B, T, N, K, H, S, window in ((3, 1, 4, 4, 20, 30, 7), (2, 5, 6, 2, 16, 70, None)):

        def part(
            rows: int, slots: int, places: int | None = None, K: int = K, H: int = H
        ) -> ops.Part:
            x = rng.normal(0, 1, (2, rows, slots, K, H)).astype(np.float32)
            used = rng.random((places or rows, slots)) < 0.7
            position = np.where(used, rng.integers(0, 60, slots), -1)
            if places is None:
                x[:, ~used] = np.nan  # the content of an empty slot must not matter
            k, v = (ops.cast(jnp.asarray(a), jnp.dtype(cache_dtype)) for a in x)
            return ops.Part(k, v, jnp.asarray(position.astype(np.int32)))

        # Shared by all rows; shared with positions per row; separate per row; the new tokens.
        parts = [part(1, S), part(1, 20, B), part(B, 40), part(B, T)]
        # Keys per row, values shared.
        parts.append(part(B, 30, B)._replace(v_BSKH=part(1, 30, B).v_BSKH))
        q = rng.normal(0, 1, (B, T, N, H)).astype(np.float32)
        at = rng.integers(-1, 60, (B, T)).astype(np.int32)
        expected = brute_force(q, at, in_numpy(parts), 0.3, window)
        attend = jax.jit(partial(ops.attend, scale=0.3, window=window))
        for isa in native.available_isas():
            native.isa(isa)
            out = attend(jnp.asarray(q), jnp.asarray(at), parts)[0]
            np.testing.assert_allclose(out, expected, atol=5e-6, err_msg=isa)
            bad = jnp.asarray(q).at[0, 0, 0, 0].set(jnp.nan)
            out = np.asarray(attend(bad, jnp.asarray(at), parts)[0])
            assert np.isnan(out[0, 0, 0]).all() or at[0, 0] < 0
            np.testing.assert_allclose(out[0, 0, 1], expected[0, 0, 1], atol=5e-6)


@pytest.mark.parametrize("heads", [(8, 1, 64), (4, 2, 40)])
def test_bfloat16_queries_attend_bfloat16_cache(heads: tuple[int, int, int]) -> None:
    """Weights are rounded to bfloat16 before the product with values, and so is the result: within
    2**-7 of float64.
    """
    N, K, H = heads
    rng = np.random.default_rng(7)
    for B, T, S, window in ((2, 1, 130, 9), (2, 37, 70, None)):

        def part(rows: int, position: np.ndarray, K: int = K, H: int = H) -> ops.Part:
            x = rng.normal(0, 1, (2, rows, position.shape[1], K, H)).astype(np.float32)
            x[:, np.broadcast_to(position, x.shape[1:3]) < 0] = np.nan
            k, v = (jnp.asarray(a, jnp.bfloat16) for a in x)
            return ops.Part(k, v, jnp.asarray(position, jnp.int32))

        at = S + np.arange(T) + np.zeros((B, 1), int)
        at[-1, T // 2 :] = -1  # padding
        holes = np.where(rng.random((B, S)) < 0.8, np.arange(S), -1)
        parts = [part(1, np.arange(S)[None]), part(B, holes), part(B, at)]
        q = jnp.asarray(rng.normal(0, 1, (B, T, N, H)), jnp.bfloat16)
        q_32, plain = np.asarray(q, np.float32), in_numpy(parts)
        expected = brute_force(q_32, at, plain, 0.3, window)
        bound = brute_force(q_32, at, [(k, abs(v), p) for k, v, p in plain], 0.3, window)
        attend = jax.jit(partial(ops.attend, scale=0.3, window=window))
        for isa in native.available_isas():
            native.isa(isa)
            out = attend(q, jnp.asarray(at), parts)[0]
            assert out.dtype == jnp.bfloat16
            off = abs(np.asarray(out, np.float32) - expected) / (bound + 1e-6)
            assert off.max() < 2**-7, isa  # two roundings to 8 bits


def test_scores_of_later_spans_may_be_far_larger() -> None:
    """Slots are folded in spans of 512, whose softmaxes are merged: from -150 to 150 is e**300."""
    at = np.arange(1300)[None]
    k = np.where(at < 512, -1.5, np.where(at < 1024, 1.5, 0.5))[:, :, None, None] * np.ones(16)
    v = np.random.default_rng(3).normal(0, 1, k.shape)
    k, v, q = (x.astype(np.float32) for x in (k, v, np.full((1, 1, 1, 16), 6.25)))
    parts = [ops.Part(jnp.asarray(k), jnp.asarray(v), jnp.asarray(at, jnp.int32))]
    now = np.array([[1300]])
    expected = brute_force(q, now, [(k, v, at)], 1.0, None)
    for isa in native.available_isas():
        native.isa(isa)
        out = ops.attend(jnp.asarray(q), jnp.asarray(now), parts, scale=1.0, window=None)[0]
        np.testing.assert_allclose(out, expected, atol=1e-5, err_msg=isa)


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16"])
def test_attention_confines_value_that_is_not_finite(cache_dtype: str) -> None:
    """A NaN or infinite value reaches only the queries and heads that attend to it."""
    rng = np.random.default_rng(9)
    q, k, v = (jnp.asarray(rng.normal(0, 1, (1, 20, 2, 32)), cache_dtype) for _ in "qkv")
    at = jnp.arange(20)[None]
    attend = jax.jit(partial(ops.attend, scale=0.3, window=None))
    for isa, bad in itertools.product(native.available_isas(), (np.nan, np.inf)):
        native.isa(isa)
        before = np.asarray(attend(q, at, [ops.Part(k, v, at)])[0], np.float32)
        after = attend(q, at, [ops.Part(k, v.at[0, 11, 1].set(bad), at)])[0]
        after = np.asarray(after, np.float32)
        np.testing.assert_allclose(after[0, :11], before[0, :11], atol=0.02, err_msg=isa)
        np.testing.assert_allclose(after[0, 11:, 0], before[0, 11:, 0], atol=0.02, err_msg=isa)
        assert not np.isfinite(after[0, 11:, 1]).any(), isa


def test_attention_supports_keys_and_values_of_different_formats() -> None:
    """int8 keys with float32 values give the brute-force result."""
    rng = np.random.default_rng(11)
    q, k, v = (jnp.asarray(rng.normal(0, 1, (1, 4, 2, 16)), jnp.float32) for _ in "qkv")
    part = ops.Part(ops.cast(k, jnp.int8), v, jnp.arange(4)[None])
    out, _ = ops.attend(q, part.position_BS, [part], scale=0.3, window=None)
    expected = brute_force(np.asarray(q), np.arange(4)[None], in_numpy([part]), 0.3, None)
    np.testing.assert_allclose(out, expected, atol=5e-6)


def _capped(cache_dtype: str) -> tuple[jax.Array, jax.Array, list[ops.Part]]:
    """Return queries, their positions, and two cache parts with slots that no query attends to."""
    rng = np.random.default_rng(13)
    q = jnp.asarray(rng.normal(0, 3, (2, 3, 4, 32)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(0, 1, (2, 90, 2, 32)), jnp.float32) for _ in "kv")
    at = jnp.asarray([[80, 81, 82], [5, -1, 88]], jnp.int32)
    k, v = (ops.cast(x, jnp.dtype(cache_dtype)) for x in (k, v))
    own = jnp.where(jnp.arange(90) % 5 == 0, -1, jnp.arange(90))[None]
    parts = [ops.Part(k, v, own), ops.Part(*jax.tree.map(lambda x: x[:, :3], (k, v)), at)]
    return q, at, parts


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8"])
def test_soft_cap_equals_brute_force(cache_dtype: str) -> None:
    """Soft-capped scores equal brute force on every instruction set and in plain JAX."""
    q, at, parts = _capped(cache_dtype)
    outs = {}
    for cap in (0.7, 50.0):
        expected = brute_force(np.asarray(q), np.asarray(at), in_numpy(parts), 0.3, 40, cap)
        attend = jax.jit(partial(ops.attend, scale=0.3, window=40, cap=cap))
        for isa in native.available_isas():
            native.isa(isa)
            outs[isa, cap] = attend(q, at, parts)[0]
            np.testing.assert_allclose(outs[isa, cap], expected, atol=5e-6, err_msg=isa)
        with native.disable_kernels():
            plain = ops.attend(q, at, parts, scale=0.3, window=40, cap=cap)[0]
        np.testing.assert_allclose(outs[isa, cap], plain, atol=5e-6)
    assert float(jnp.abs(outs[isa, 0.7] - outs[isa, 50.0]).max()) > 0.1


def test_soft_cap_bounds_overflowing_scores() -> None:
    """A score that overflows float32 becomes the cap, and a NaN query affects only its own head."""
    _, at, parts = _capped("float32")
    q = jnp.zeros((2, 3, 4, 32)).at[..., 0].set(3e38)  # a single term, or the sums would mix signs
    parts = [part._replace(k_BSKH=part.k_BSKH.at[..., 0].multiply(9)) for part in parts]
    attend = jax.jit(partial(ops.attend, scale=0.3, window=None, cap=5.0))
    for isa in native.available_isas():
        native.isa(isa)
        with native.disable_kernels():
            plain = np.asarray(ops.attend(q, at, parts, scale=0.3, window=None, cap=5.0)[0])
        assert np.isfinite(plain).all()
        np.testing.assert_allclose(attend(q, at, parts)[0], plain, atol=5e-6, err_msg=isa)
        bad = np.asarray(attend(q.at[0, 0, 0, 0].set(jnp.nan), at, parts)[0])
        assert np.isnan(bad[0, 0, 0]).all() and np.isfinite(bad[0, 0, 1]).all(), isa


def test_soft_cap_gradient_and_vmap_equal_plain_jax() -> None:
    """With a soft cap, the kernel's loss and gradients equal plain JAX, and vmap equals separate
    calls.
    """
    q, at, parts = _capped("float32")

    def loss(q: jax.Array, parts: list[ops.Part]) -> jax.Array:
        return (ops.attend(q, at, parts, scale=0.3, window=None, cap=2.0)[0] ** 2).sum()

    both = jax.value_and_grad(loss, allow_int=True)
    ours, batch = both(q, parts), jax.vmap(loss, (0, None))(jnp.stack([q, 2 * q]), parts)
    with native.disable_kernels():
        plain = both(q, parts)
    np.testing.assert_allclose(ours[0], plain[0], rtol=1e-5)
    np.testing.assert_allclose(ours[1], plain[1], atol=1e-5)
    np.testing.assert_allclose(batch, [loss(q, parts), loss(2 * q, parts)], rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bits_follow_from_positions_alone(isa: str, dtype: Any) -> None:
    """A query's result has the same bits whatever parts and slots its keys are in, whichever row
    they are in, and whatever else is asked at the same time.
    """
    rng = np.random.default_rng(3)
    S, K, H, N = 700, 2, 64, 8
    k, v = (jnp.asarray(rng.normal(0, 1, (1, S, K, H)), dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(0, 1, (1, S, N, H)), dtype)
    position = np.arange(S, dtype=np.int32)[None]
    rules: Any = {"scale": 0.3, "window": 300}

    def run(at: slice, parts: list[tuple[Any, Any, Any]], row_B: Any = None) -> np.ndarray:
        rows = 1 if row_B is None else len(row_B)
        held = [ops.Part(*map(jnp.asarray, part)) for part in parts]
        asked = (jnp.repeat(q[:, at], rows, 0), jnp.repeat(position[:, at], rows, 0))
        return np.asarray(ops.attend(*asked, held, row_B=row_B, **rules)[0], np.float32)

    whole = run(slice(None), [(k, v, position)])[0]
    order = rng.permutation(S)  # slots in any order, others empty
    empty = np.full((1, 900), -1, np.int32)
    slots = np.sort(rng.permutation(900)[:S])
    empty[0, slots] = order
    blank = jnp.zeros((1, 900, K, H), dtype)
    spread_k, spread_v = (blank.at[:, slots].set(x[:, order]) for x in (k, v))

    def cut(*ends: int) -> list[tuple[Any, Any, Any]]:
        pairs = itertools.pairwise(ends)
        return [(k[:, a:b], v[:, a:b], position[:, a:b]) for a, b in pairs]

    ways = {
        "spread": [(spread_k, spread_v, empty)],
        "cut": cut(0, 1, 333, S),
        "a part of a hundred": cut(0, 100, S),
    }
    for name, parts in ways.items():
        for at in (slice(0, 1), slice(650, 651), slice(100, 140), slice(0, S)):
            assert run(at, parts)[0].tobytes() == whole[at].tobytes(), (name, at)
    others = [jnp.asarray(rng.normal(0, 1, (4, S, K, H)), dtype).at[2].set(x[0]) for x in (k, v)]
    last = (k[:, 650:651], v[:, 650:651], position[:, 650:651])
    rows = np.repeat(np.where(position < 650, position, -1), 4, 0)
    some = [tuple(jnp.repeat(x, 3, 0) for x in last)]
    found = run(slice(650, 651), [(*others, rows), *some], np.array([2, 0, 9], np.int32))
    assert found[0].tobytes() == whole[650:651].tobytes()
    assert found[1].tobytes() != found[0].tobytes()
    page_RP = np.array([[3, 9, 0, 7, 1, 4, 8, 99], [8, 99, 99, 99, 99, 99, 99, 99]], np.int32)
    pages = [np.zeros((10, 100, *x.shape[2:]), x.dtype) for x in (k, v)]
    at_PS = np.full((10, 100), -1, np.int32)
    for i, page in enumerate(page_RP[0, :7]):  # the text's first 650 tokens
        size = min(100, 650 - 100 * i)
        for to, x in ((pages[0], k), (pages[1], v), (at_PS, position)):
            to[page, :size] = x[0, 100 * i : 100 * i + size]
    some = [tuple(jnp.repeat(x, 2, 0) for x in last)]
    found = run(slice(650, 651), [(*pages, at_PS), *some], page_RP)
    assert found[0].tobytes() == whole[650:651].tobytes()
    assert found[1].tobytes() == run(slice(650, 651), [cut(600, 650)[0], last])[0].tobytes()
