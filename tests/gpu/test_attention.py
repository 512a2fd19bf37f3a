"""Attention as an accelerator computes it, run on a CPU: in float32 it equals the CPU's."""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import ops
from jaxllm.ops import attention, flash
from jaxllm.ops.target import trace_for
from tests.gpu import cudnn
from tests.ops.test_native_attention import brute_force, in_numpy


@pytest.fixture(scope="module", autouse=True)
def _accelerator() -> Iterator[None]:
    with trace_for("rocm"):
        yield


def test_stand_in_has_interface_of_private_module() -> None:
    """The one private module of JAX still has what attention calls: on a GPU only it would fail."""
    theirs = flash._cudnn()
    for name in ("dot_product_attention", "check_cudnn_version"):
        ours = inspect.signature(getattr(cudnn, name)).parameters
        assert {*ours} <= {*inspect.signature(getattr(theirs, name)).parameters}
    assert {x.name for x in cudnn.MaskType} <= {x.name for x in theirs.MaskType}


def draw(
    rng: np.random.Generator, at: np.ndarray, rows: int, dtype: str, K: int = 2, H: int = 8
) -> ops.Part:
    """Return random keys and values at these positions, NaN in empty slots."""
    x = rng.normal(0, 1, (2, rows, at.shape[1], K, H)).astype(np.float32)
    if rows == at.shape[0]:
        x[:, at < 0] = np.nan
    k, v = (ops.cast(jnp.asarray(a), jnp.dtype(dtype)) for a in x)
    return ops.Part(k, v, jnp.asarray(at, jnp.int32))


def places(rng: np.random.Generator, rows: int, slots: int, used: float) -> np.ndarray:
    """Return positions in any order, with empty slots, and a row without any."""
    at = np.stack([rng.permutation(slots) for _ in range(rows)])
    at[rng.random(at.shape) > used] = -1
    at[-1] = -1
    return at


@pytest.mark.parametrize("size", ["whole", "blocks"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
def test_any_positions_equal_brute_force(
    monkeypatch: pytest.MonkeyPatch, dtype: str, size: str
) -> None:
    """With windows, caps, holes, shared segments, one or several queries; whole or in blocks."""
    if size == "blocks":
        monkeypatch.setattr(attention, "MAX_SCORES", 1)
        monkeypatch.setattr(attention, "BLOCK", 16)
    rng, bound = np.random.default_rng(3), 2e-2 if dtype == "bfloat16" else 1e-5
    B, S = 3, 40
    for T, window, cap in ((1, None, None), (1, 9, 3.0), (5, None, 3.0), (5, 9, None)):  # pairs
        at = S + np.arange(T) + np.zeros((B, 1), int)
        at[0, T // 2 :] = -1
        shared = draw(rng, np.arange(11)[None], 1, dtype)
        seen = np.where(np.arange(7) < np.array([[0], [4], [7]]), np.arange(7), -1)
        by_row = draw(rng, np.arange(7)[None], 1, dtype)._replace(position_BS=jnp.asarray(seen))
        parts = [shared, by_row, draw(rng, places(rng, B, S, 0.7), B, dtype)]
        parts.append(draw(rng, at, B, dtype))
        kind = "float32" if dtype == "int8" else dtype
        q = jnp.asarray(rng.normal(0, 1, (B, T, 6, 8)), kind)
        rules: Any = {"scale": 0.3, "window": window, "cap": cap}
        attend = jax.jit(partial(ops.attend, **rules, mass=True))
        out, mass_BS = attend(q, jnp.asarray(at), parts)
        expected = brute_force(np.asarray(q, np.float32), at, in_numpy(parts), 0.3, window, cap)
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=bound)
        assert mass_BS is not None
        total = np.asarray(mass_BS).sum(axis=1)
        sees = np.array([sum(np.any(at[b, t] >= 0) for t in range(T)) for b in range(B)])
        np.testing.assert_allclose(total, 6.0 * sees, rtol=1e-3 if dtype == "bfloat16" else 1e-5)


def test_value_that_is_not_finite_stays_in_its_head() -> None:
    rng = np.random.default_rng(4)
    at = np.arange(20)[None]
    part = draw(rng, at, 1, "float32")
    part = ops.Part(*(jnp.repeat(x, 2, axis=0) for x in part))
    q, now = jnp.asarray(rng.normal(0, 1, (2, 1, 4, 8)), jnp.float32), jnp.full((2, 1), 30)
    rules: Any = {"scale": 0.3, "window": None}
    attend = jax.jit(partial(ops.attend, **rules))
    before = np.asarray(attend(q, now, [part])[0])
    bad = part._replace(v_BSKH=part.v_BSKH.at[0, 3, 1].set(jnp.nan))  # type: ignore[union-attr]
    after = np.asarray(attend(q, now, [bad])[0])
    np.testing.assert_array_equal(after[1], before[1])
    np.testing.assert_array_equal(after[0, :, :2], before[0, :, :2])
    assert np.isnan(after[0, :, 2:]).all()


@pytest.mark.parametrize("T", [1, 5])
def test_packed_slots_equal_positions(monkeypatch: pytest.MonkeyPatch, T: int) -> None:
    """With used slots first, cuDNN's lengths say what positions say, whatever the slots' order;
    also for rows without cached tokens, with NaN in unused slots, and for padding.
    """
    monkeypatch.setattr(flash, "_cudnn", lambda: cudnn)
    monkeypatch.setattr(flash, "is_supported", lambda *_: True)
    rng = np.random.default_rng(5)
    B, S = 4, 24
    length = np.array([[0], [7], [24], [3]])
    at = np.where(np.arange(S) < length, np.arange(S), -1)
    at[2] = rng.permutation(S)
    frozen = np.where(np.arange(6) < np.array([[6], [0], [2], [0]]), np.arange(6), -1)
    now = S + np.arange(T) + np.zeros((B, 1), int)
    if T > 1:
        now[3, T // 2 :] = -1
    parts = [draw(rng, x, B, "float32") for x in (frozen, at, now)]
    q = jnp.asarray(rng.normal(0, 1, (B, T, 6, 8)), jnp.float32)
    rules: Any = {"scale": 0.3, "window": None}
    parts[2] = ops.Part(*(jnp.nan_to_num(x) for x in parts[2]))  # a padding token's are finite
    by_position, by_length = (
        np.asarray(jax.jit(partial(ops.attend, **rules, packed=packed))(q, now, parts)[0])
        for packed in (False, True)
    )
    real = now >= 0
    np.testing.assert_allclose(by_length[real], by_position[real], atol=1e-6)
    assert np.isfinite(by_length).all()
