"""Products in plain JAX, by which all kernels are defined."""

from typing import Any

import jax

from jaxllm.weights.types.arrays import as_weight


def plain_product(x_RI: jax.Array, weight: Any) -> jax.Array:
    """`x @ weight.T`, of composite weights too."""
    leaf = as_weight(weight)
    return leaf.apply_with(x_RI, plain_product) if leaf.is_composite else leaf.matmul(x_RI)
