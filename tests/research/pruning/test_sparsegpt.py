"""SparseGPT against least squares, the other methods and its error identity."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compress.column_solver import factor_hessian, solve_columns
from jaxllm.compress.input_stats import InputStats
from jaxllm.errors import ConfigError
from jaxllm.research.pruning.magnitude import prune_magnitude
from jaxllm.research.pruning.sparsegpt import prune_columns
from jaxllm.research.pruning.sparsity import parse
from jaxllm.research.pruning.wanda import prune_wanda
from tests.compress.test_column_solver import (
    COLUMNS,
    ROWS,
    W_OI,
    X_RI,
    damped,
    integer,
    trace,
)


@pytest.mark.parametrize(("share", "name"), [("50%", None), ("2:4", None), ("2:4", "int8")])
def test_pruning_errors_sum_to_output_error(share: str, name: str | None) -> None:
    """`sum |e|^2 = trace((W - Q) H (W - Q)^T)`, and less than by magnitude pruning."""
    by, to = factor_hessian(X_RI.T @ X_RI, len(X_RI)), name and integer(name)
    found = prune_columns(jnp.asarray(W_OI), by, parse(share), to or None)
    h_II = damped(X_RI, by)
    assert found.error == pytest.approx(trace(W_OI, found.value_OI, h_II), rel=1e-5)
    plain = prune_magnitude(jnp.asarray(W_OI), parse(share))
    assert (np.asarray(found.value_OI) == 0).sum() >= (np.asarray(plain) == 0).sum()
    if to:
        plain = to.quantize(plain).to_dense()
        leaf = to.from_codes(found.codes_OI, found.scale_OG, found.zero_OG)
        np.testing.assert_array_equal(leaf.to_dense(), found.value_OI)
    assert found.error < trace(W_OI, plain, h_II)


def test_pruning_errors_are_ordered() -> None:
    """The least-squares optimum for its mask bounds SparseGPT's error, that bounds Wanda's, and
    that bounds magnitude's.
    """
    x_RI = X_RI * np.linspace(0.2, 3, COLUMNS)[None]
    by, half = factor_hessian(x_RI.T @ x_RI, len(x_RI)), parse("50%")
    h_II = damped(x_RI, by)
    found = prune_columns(jnp.asarray(W_OI), by, half)
    best = np.zeros_like(W_OI, np.float64)
    for row, kept in enumerate(np.asarray(found.value_OI) != 0):
        best[row, kept] = np.linalg.solve(h_II[np.ix_(kept, kept)], h_II[kept] @ W_OI[row])
    moments = InputStats.empty(COLUMNS).add(jnp.asarray(x_RI, jnp.float32))
    errors = [
        trace(W_OI, q, h_II)
        for q in (
            best,
            found.value_OI,
            prune_wanda(jnp.asarray(W_OI), moments, half),
            prune_magnitude(jnp.asarray(W_OI), half),
        )
    ]
    assert errors == sorted(errors)


def test_solver_keeps_zeros_and_patterns() -> None:
    """Quantizing or solving again keeps the zeros, 2:4 zeroes two of four, and a share is exact."""
    by = factor_hessian(X_RI.T @ X_RI, len(X_RI))
    pruned = prune_columns(jnp.asarray(W_OI), by, parse("2:4")).value_OI
    zero = np.asarray(pruned) == 0
    assert (zero.reshape(ROWS, -1, 4).sum(-1) == 2).all()
    rounded = solve_columns(pruned, by, target=integer("int4-g64"))
    assert (np.asarray(rounded.value_OI)[zero] == 0).all()
    once = prune_columns(pruned, by, parse("2:4")).value_OI
    np.testing.assert_array_equal(once, pruned)
    half = prune_columns(jnp.asarray(W_OI), by, parse("50%")).value_OI
    first = np.asarray(half)[:, :128]
    assert (first == 0).sum() == first.size // 2 and (np.asarray(half) == 0).sum() == half.size // 2


def test_act_order_refuses_patterns() -> None:
    """2:4 patterns need adjacent columns, so act_order refuses them."""
    by = factor_hessian(X_RI.T @ X_RI, len(X_RI), act_order=True)
    with pytest.raises(ConfigError, match="2:4 needs adjacent columns"):
        prune_columns(jnp.asarray(W_OI), by, parse("2:4"))
