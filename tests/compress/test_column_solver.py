"""GPTQ and SparseGPT against explicit inverses, closed forms and their error identity."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compress.column_solver import HessianFactor, factor_hessian, solve_columns
from jaxllm.compress.input_stats import InputStats
from jaxllm.compress.methods.magnitude import prune_magnitude
from jaxllm.compress.methods.wanda import prune_wanda
from jaxllm.errors import ConfigError, NonFiniteError
from jaxllm.weights import sparsity
from jaxllm.weights.types.int_weight import IntFormat, parse

ROWS, COLUMNS, TOKENS = 12, 136, 700  # more than one column block, not a multiple


def integer(name: str) -> IntFormat:
    found = parse(name)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def x_RI() -> np.ndarray:
    rng = np.random.default_rng(0)
    mixed = np.eye(COLUMNS) + 0.3 * rng.standard_normal((COLUMNS, COLUMNS))
    return np.asarray(rng.standard_normal((TOKENS, COLUMNS)) @ mixed)


@pytest.fixture(scope="module")
def w_OI() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def damped(x_RI: np.ndarray, by: HessianFactor) -> np.ndarray:
    h_II = 2 / len(x_RI) * x_RI.T @ x_RI
    return np.asarray(h_II + by.damping * np.diagonal(h_II).mean() * np.eye(len(h_II)))


def trace(w_OI: np.ndarray, q_OI: Any, h_II: np.ndarray) -> float:
    difference = w_OI.astype(np.float64) - np.asarray(q_OI, np.float64)
    return float(np.trace(difference @ h_II @ difference.T))


CASES: dict[str, dict[str, Any]] = {
    "int3-g64": {"target": integer("int3-g64")},
    "int4-g32-zp": {"target": integer("int4-g32-zp")},
    "int8": {"target": integer("int8")},
    "50%": {"sparsity": sparsity.parse("50%")},
    "2:4": {"sparsity": sparsity.parse("2:4")},
    "2:4 and int8": {"sparsity": sparsity.parse("2:4"), "target": integer("int8")},
}


@pytest.mark.parametrize("case", CASES)
def test_column_errors_sum_to_output_error(case: str, x_RI: np.ndarray, w_OI: np.ndarray) -> None:
    """`sum |e|^2 = trace((W - Q) H (W - Q)^T)`, and less than by rounding or magnitude pruning."""
    by = factor_hessian(x_RI.T @ x_RI, len(x_RI))
    found = solve_columns(jnp.asarray(w_OI), by, **CASES[case])
    h_II = damped(x_RI, by)
    assert found.error == pytest.approx(trace(w_OI, found.value_OI, h_II), rel=1e-5)
    to, pattern = CASES[case].get("target"), CASES[case].get("sparsity")
    plain = jnp.asarray(w_OI)
    if pattern is not None:
        plain = prune_magnitude(plain, pattern)
        assert (np.asarray(found.value_OI) == 0).sum() >= (np.asarray(plain) == 0).sum()
    if to is not None:
        plain = to.quantize(plain).to_dense()
        leaf = to.from_codes(found.codes_OI, found.scale_OG, found.zero_OG)
        np.testing.assert_array_equal(leaf.to_dense(), found.value_OI)
    assert found.error < trace(w_OI, plain, h_II)


@pytest.mark.parametrize("static", [True, False])
def test_act_order_processes_large_inputs_first(
    static: bool, x_RI: np.ndarray, w_OI: np.ndarray
) -> None:
    """act_order keeps the error identity and the group assignment, and changes nothing if the
    inputs are in order already.
    """
    x_RI = x_RI * np.linspace(0.2, 3, COLUMNS)[None]
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


def test_pruning_errors_are_ordered(x_RI: np.ndarray, w_OI: np.ndarray) -> None:
    """The least-squares optimum for its mask bounds SparseGPT's error, that bounds Wanda's, and
    that bounds magnitude's.
    """
    x_RI = x_RI * np.linspace(0.2, 3, COLUMNS)[None]
    by, half = factor_hessian(x_RI.T @ x_RI, len(x_RI)), sparsity.parse("50%")
    h_II = damped(x_RI, by)
    found = solve_columns(jnp.asarray(w_OI), by, sparsity=half)
    best = np.zeros_like(w_OI, np.float64)
    for row, kept in enumerate(np.asarray(found.value_OI) != 0):
        best[row, kept] = np.linalg.solve(h_II[np.ix_(kept, kept)], h_II[kept] @ w_OI[row])
    moments = InputStats.empty(COLUMNS).add(jnp.asarray(x_RI, jnp.float32))
    errors = [
        trace(w_OI, q, h_II)
        for q in (
            best,
            found.value_OI,
            prune_wanda(jnp.asarray(w_OI), moments, half),
            prune_magnitude(jnp.asarray(w_OI), half),
        )
    ]
    assert errors == sorted(errors)


def test_solver_keeps_zeros_and_patterns(x_RI: np.ndarray, w_OI: np.ndarray) -> None:
    """Quantizing or solving again keeps the zeros, 2:4 zeroes two of four, and a share is exact."""
    by = factor_hessian(x_RI.T @ x_RI, len(x_RI))
    pruned = solve_columns(jnp.asarray(w_OI), by, sparsity=sparsity.parse("2:4")).value_OI
    zero = np.asarray(pruned) == 0
    assert (zero.reshape(ROWS, -1, 4).sum(-1) == 2).all()
    rounded = solve_columns(pruned, by, target=integer("int4-g64"))
    assert (np.asarray(rounded.value_OI)[zero] == 0).all()
    once = solve_columns(pruned, by, sparsity=sparsity.parse("2:4")).value_OI
    np.testing.assert_array_equal(once, pruned)
    half = solve_columns(jnp.asarray(w_OI), by, sparsity=sparsity.parse("50%")).value_OI
    first = np.asarray(half)[:, :128]
    assert (first == 0).sum() == first.size // 2 and (np.asarray(half) == 0).sum() == half.size // 2


def test_dead_channels_and_few_tokens(w_OI: np.ndarray) -> None:
    """A channel that is always zero gets zero weights, and damping rises until the Hessian is
    invertible.
    """
    rng = np.random.default_rng(3)
    x_RI = rng.standard_normal((40, COLUMNS))
    x_RI[:, 7] = 0
    by = factor_hessian(x_RI.T @ x_RI, len(x_RI))
    assert by.dead_I.sum() == 1
    found = solve_columns(jnp.asarray(w_OI), by, target=integer("int4-g64"))
    assert (np.asarray(found.value_OI)[:, 7] == 0).all() and np.isfinite(found.error)
    assert factor_hessian(x_RI.T @ x_RI, len(x_RI), damping=0.0).damping > 0
    for bad in (np.nan, np.inf):
        with pytest.raises(NonFiniteError, match="is singular"):
            factor_hessian(np.full((4, 4), bad), 3)


def test_act_order_refuses_patterns(x_RI: np.ndarray, w_OI: np.ndarray) -> None:
    """2:4 patterns need adjacent columns, so act_order refuses them."""
    by = factor_hessian(x_RI.T @ x_RI, len(x_RI), act_order=True)
    with pytest.raises(ConfigError, match="2:4 needs adjacent columns"):
        solve_columns(jnp.asarray(w_OI), by, sparsity=sparsity.parse("2:4"))
