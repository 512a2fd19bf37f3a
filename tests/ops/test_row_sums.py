"""Sums, softmaxes and norms of rows: float64's values, and bits of their own row alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops import norms, row_sums

WIDTHS = (1, 7, 64, 100, 2049)


def rows_of(width: int, rows: int = 37) -> np.ndarray:
    return np.random.default_rng(width).normal(0, 3, (rows, width)).astype(np.float32)


def test_sums_equal_float64(isa: str) -> None:
    for width in WIDTHS:
        x = rows_of(width)
        wide = x.astype(np.float64)
        size = np.abs(wide).sum(axis=1)
        found = np.asarray(row_sums.row_sum(x))[:, 0]
        assert (np.abs(found - wide.sum(axis=1)) < 1e-6 * size).all()
        top = wide.max(axis=1, keepdims=True)
        total = np.exp(wide - top).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(row_sums.softmax(x), np.exp(wide - top) / total, 3e-6, 1e-30)
        expected = (top + np.log(total))[:, 0]
        np.testing.assert_allclose(row_sums.logsumexp(x), expected, 1e-6, 1e-6)
        np.testing.assert_allclose(row_sums.log_softmax(x), wide - expected[:, None], 1e-5, 2e-6)


def test_norms_equal_float64(isa: str) -> None:
    for width in WIDTHS:
        x, (weight, bias) = rows_of(width), rows_of(width, 2)
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 0.1) * (weight + 1.0)
        found = norms.rms_norm(jnp.asarray(x), jnp.asarray(weight), eps=0.1, weight_offset=1.0)
        np.testing.assert_allclose(found, expected, 1e-5, 1e-5)
        centred = wide - wide.mean(axis=1, keepdims=True)
        scale = np.sqrt((centred**2).mean(axis=1, keepdims=True) + 0.1)
        found = norms.layer_norm(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias), eps=0.1)
        np.testing.assert_allclose(found, centred / scale * weight + bias, 1e-4, 1e-4)
        half = norms.rms_norm(jnp.bfloat16(x), jnp.bfloat16(weight), eps=0.1)
        assert half.dtype == jnp.bfloat16


@jax.jit  # one program for all instruction sets
def compute_all(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
    normed = norms.rms_norm(x, weight, eps=1e-5), norms.layer_norm(x, weight, weight, eps=1e-5)
    return row_sums.row_sum(x), row_sums.logsumexp(x), row_sums.softmax(x), *normed


def test_bits_do_not_depend_on_other_rows(isa: str) -> None:
    for width in WIDTHS:
        x, weight = jnp.asarray(rows_of(width)), jnp.asarray(rows_of(width, 1)[0])
        whole = [np.asarray(y) for y in compute_all(x, weight)]
        for rows in (1, 2, 16):
            for some, y in zip(compute_all(x[5 : 5 + rows], weight), whole, strict=True):
                assert np.asarray(some).tobytes() == y[5 : 5 + rows].tobytes(), (width, rows)


def test_rows_that_are_not_finite_give_nan(isa: str) -> None:
    """NaN, +inf and only -inf give NaN in their row alone; some -inf are zeros of the softmax."""
    x = rows_of(70, 5)
    x[0], x[1, 69], x[2, 3], x[3, :40] = -np.inf, np.nan, np.inf, -np.inf
    for found in (row_sums.softmax(x), row_sums.log_softmax(x)):
        assert np.isnan(found[:3]).all() and not np.isnan(found[3:]).any()
    assert np.isnan(row_sums.logsumexp(x)).tolist() == [True] * 3 + [False] * 2
    np.testing.assert_allclose(np.asarray(row_sums.softmax(x))[3:].sum(axis=1), 1, 1e-5)
    assert not np.asarray(row_sums.softmax(x))[3, :40].any()


@pytest.mark.parametrize("name", ["row_sum", "logsumexp", "softmax", "rms_norm", "layer_norm"])
def test_derivatives_and_vmap_are_those_of_plain_jax(kernels: None, name: str) -> None:
    x, weight = jnp.asarray(rows_of(24, 6)), jnp.asarray(rows_of(24, 1)[0])

    def like(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(weight, x.shape)

    both: dict[str, tuple[Any, Any]] = {
        "row_sum": (row_sums.row_sum, lambda x: x.sum(axis=-1, keepdims=True)),
        "logsumexp": (row_sums.logsumexp, lambda x: jax.nn.logsumexp(x, axis=-1)),
        "softmax": (row_sums.softmax, jax.nn.softmax),
        "rms_norm": (
            lambda x: norms.rms_norm(x, weight, eps=0.1),
            lambda x: x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.1) * like(x),
        ),
        "layer_norm": (
            lambda x: norms.layer_norm(x, weight, weight, eps=0.1),
            lambda x: jax.nn.standardize(x, epsilon=0.1) * like(x) + like(x),
        ),
    }
    ours, plain = both[name]
    cube = x.reshape(2, 3, 24)
    np.testing.assert_allclose(jax.vmap(ours, 1)(cube), jax.vmap(plain, 1)(cube), 2e-5, 2e-5)
    slopes = [jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (ours, plain)]
    np.testing.assert_allclose(*slopes, 1e-4, 1e-4)
