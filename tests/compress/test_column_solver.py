"""GPTQ against explicit inverses, closed forms and their error identity."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compress.column_solver import HessianFactor, factor_hessian, solve_columns
from jaxllm.compress.input_stats import InputStats, check_finite
from jaxllm.errors import NonFiniteError
from jaxllm.weights.types.int_weight import IntFormat, parse

ROWS, COLUMNS, TOKENS = 12, 136, 700  # more than one column block, not a multiple


def integer(name: str) -> IntFormat:
    found = parse(name)
    assert found is not None
    return found


def _inputs() -> np.ndarray:
    rng = np.random.default_rng(0)
    mixed = np.eye(COLUMNS) + 0.3 * rng.standard_normal((COLUMNS, COLUMNS))
    return np.asarray(rng.standard_normal((TOKENS, COLUMNS)) @ mixed)


X_RI = _inputs()
W_OI = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def damped(x_RI: np.ndarray, by: HessianFactor) -> np.ndarray:
    h_II = 2 / len(x_RI) * x_RI.T @ x_RI
    return np.asarray(h_II + by.damping * np.diagonal(h_II).mean() * np.eye(len(h_II)))


def trace(w_OI: np.ndarray, q_OI: Any, h_II: np.ndarray) -> float:
    difference = w_OI.astype(np.float64) - np.asarray(q_OI, np.float64)
    return float(np.trace(difference @ h_II @ difference.T))


@pytest.mark.parametrize("name", ["int3-g64", "int4-g32-zp", "int8"])
def test_column_errors_sum_to_output_error(name: str) -> None:
    """`sum |e|^2 = trace((W - Q) H (W - Q)^T)`, and less than by rounding."""
    by, to = factor_hessian(X_RI.T @ X_RI, len(X_RI)), integer(name)
    found = solve_columns(jnp.asarray(W_OI), by, target=to)
    h_II = damped(X_RI, by)
    assert found.error == pytest.approx(trace(W_OI, found.value_OI, h_II), rel=1e-5)
    leaf = to.from_codes(found.codes_OI, found.scale_OG, found.zero_OG)
    np.testing.assert_array_equal(leaf.to_dense(), found.value_OI)
    assert found.error < trace(W_OI, to.quantize(jnp.asarray(W_OI)).to_dense(), h_II)


@pytest.mark.parametrize("static", [True, False])
def test_act_order_processes_large_inputs_first(static: bool) -> None:
    """act_order keeps the error identity and the group assignment, and changes nothing if the
    inputs are in order already.
    """
    x_RI, w_OI = X_RI * np.linspace(0.2, 3, COLUMNS)[None], W_OI
    by, plain = (
        factor_hessian(x_RI.T @ x_RI, len(x_RI), act_order=order) for order in (True, False)
    )
    to = integer("int3-g64")
    found = solve_columns(jnp.asarray(w_OI), by, target=to, static_groups=static)
    assert found.error == pytest.approx(trace(w_OI, found.value_OI, damped(x_RI, by)), rel=1e-5)
    groups = np.arange(COLUMNS) // 64
    np.testing.assert_array_equal(
        found.group_I, groups if static else groups[np.argsort(by.order_I)]
    )
    # If the inputs are in this order already, nothing changes.
    sorted_RI, sorted_OI = x_RI[:, by.order_I], jnp.asarray(w_OI[:, by.order_I])
    same, none = (
        solve_columns(
            sorted_OI,
            factor_hessian(sorted_RI.T @ sorted_RI, len(x_RI), act_order=order),
            target=to,
        )
        for order in (True, False)
    )
    np.testing.assert_array_equal(same.codes_OI, none.codes_OI)
    assert (np.diff(plain.order_I) == 1).all()


def test_gptq_equals_optimal_brain_surgery() -> None:
    """Frantar and Alistarh 2022 (arXiv 2208.11580): equals inverting the remaining Hessian after
    each column; the weights left are the least-squares optimum.
    """
    rng = np.random.default_rng(2)
    x_RI = rng.standard_normal((90, 24)) @ rng.standard_normal((24, 24))
    w_OI = rng.standard_normal((5, 24)).astype(np.float32)
    by = factor_hessian(x_RI.T @ x_RI, len(x_RI))
    to = integer("int3-g32")
    h_II, left = damped(x_RI, by), w_OI.astype(np.float64)
    scale_OG, zero_OG = to.choose_grid(jnp.asarray(np.pad(w_OI, ((0, 0), (0, 8))))[:, None])
    codes = np.zeros((5, 24), np.int64)
    for i in range(24):
        codes[:, i] = to.to_codes(jnp.asarray(left[:, i : i + 1], jnp.float32), scale_OG, zero_OG)[
            :, 0
        ]
        q = np.asarray(to.to_values(codes[:, i : i + 1], scale_OG, zero_OG), np.float64)[:, 0]
        inverse = np.linalg.inv(h_II[i:, i:])
        left[:, i:] -= np.outer((left[:, i] - q) / inverse[0, 0], inverse[0])
        done, free = slice(0, i + 1), slice(i + 1, 24)
        if i == 11:
            h_FR, h_RR = h_II[done, free], h_II[free, free]
            moved = (w_OI.astype(np.float64) - left)[:, done] @ h_FR @ np.linalg.inv(h_RR)
            np.testing.assert_allclose(left[:, free], w_OI[:, free] + moved, atol=1e-9)
    found = solve_columns(jnp.asarray(w_OI), by, target=to)
    np.testing.assert_array_equal(found.codes_OI, codes)
    np.testing.assert_allclose(found.value_OI, left, atol=1e-5)


def test_dead_channels_and_few_tokens() -> None:
    """A channel that is always zero gets zero weights, and damping rises until the Hessian is
    invertible.
    """
    rng = np.random.default_rng(3)
    x_RI = rng.standard_normal((40, COLUMNS))
    x_RI[:, 7] = 0
    by = factor_hessian(x_RI.T @ x_RI, len(x_RI))
    assert by.dead_I.sum() == 1
    found = solve_columns(jnp.asarray(W_OI), by, target=integer("int4-g64"))
    assert (np.asarray(found.value_OI)[:, 7] == 0).all() and np.isfinite(found.error)
    assert factor_hessian(x_RI.T @ x_RI, len(x_RI), damping=0.0).damping > 0
    for bad in (np.nan, np.inf):
        with pytest.raises(NonFiniteError, match="is singular"):
            factor_hessian(np.full((4, 4), bad), 3)


def test_input_stats_accumulate_over_batches() -> None:
    rng = np.random.default_rng(3)
    x_RI = rng.standard_normal((60, 5)).astype(np.float32)
    found = InputStats.empty(5).add(jnp.asarray(x_RI[:13])).add(jnp.asarray(x_RI[13:]))
    np.testing.assert_allclose(found.gram_II, x_RI.T @ x_RI, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.mean_abs_I, np.abs(x_RI).mean(0), rtol=1e-5)
    np.testing.assert_array_equal(found.peak_I, np.abs(x_RI).max(0))
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp: inputs of 1 of 5 channels"):
        check_finite(found.add(jnp.asarray([[np.nan, 0, 0, 0, 0]], jnp.float32)), "layers.1.mlp")
