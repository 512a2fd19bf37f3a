"""Products in plain JAX, the definition that all kernels follow, and the check of a weight."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.weights.linear import embed, linear
from jaxllm.weights.types.arrays import as_weight


def plain_product(x_RI: jax.Array, weight: Any) -> jax.Array:
    """Return `x @ weight.T`, also for composite weights."""
    leaf = as_weight(weight)
    return leaf.apply_with(x_RI, plain_product) if leaf.is_composite else leaf.matmul(x_RI)


def assert_products_equal(weight: Any, dense_OI: Any, rows: tuple[int, ...] = (1, 5)) -> None:
    """Check products and row lookups against the dense matrix in float64.

    Products may be off by 1e-6 of the sum of absolute products; rows outside the matrix are NaN.
    """
    wide_OI, outside = np.asarray(dense_OI, np.float64), len(dense_OI)
    for R in rows:
        x_RI = np.random.default_rng(1).standard_normal((R, wide_OI.shape[1]), np.float32)
        bound_RO = 1e-6 * (np.abs(x_RI) @ np.abs(wide_OI).T)
        for product in (jax.jit(linear), plain_product):
            y_RO = np.asarray(product(jnp.asarray(x_RI), weight))
            assert (np.abs(y_RO - x_RI @ wide_OI.T) <= bound_RO).all()
    row_BTI = np.asarray(embed(weight, jnp.array([[outside - 1, 0], [3, outside]])), np.float32)
    np.testing.assert_array_equal(row_BTI[0], np.asarray(dense_OI)[[-1, 0]])
    np.testing.assert_array_equal(row_BTI[1, 0], np.asarray(dense_OI)[3])
    assert np.isnan(row_BTI[1, 1]).all()
