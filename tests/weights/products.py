"""Products in plain JAX: the definition that all kernels follow."""

from typing import Any

import jax

from jaxllm.weights.types.arrays import as_weight


def plain_product(x_RI: jax.Array, weight: Any) -> jax.Array:
    """Return `x @ weight.T`, also for composite weights."""
    leaf = as_weight(weight)
    return leaf.apply_with(x_RI, plain_product) if leaf.is_composite else leaf.matmul(x_RI)
