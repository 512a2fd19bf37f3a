"""Products with float32 sums, of the same precision on every device."""

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jax.typing import DTypeLike


def precision_of(dtype: DTypeLike) -> Precision | None:
    """Return JAX's `precision` for factors of a type.

    By default JAX rounds float32 factors to 11 significant bits (TF32) on a GPU and to 8 on a TPU.
    Products of bfloat16 are exact anyway.
    """
    return Precision.HIGHEST if dtype == jnp.float32 else None


def match_dtypes(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cast both to float32 if their dtypes differ, so that mixing loses no precision."""
    if a.dtype == b.dtype:
        return a, b
    return a.astype(jnp.float32), b.astype(jnp.float32)


def einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the sums of products that `spec` names (as `jnp.einsum`), float32."""
    a, b = match_dtypes(a, b)
    return jnp.einsum(
        spec, a, b, precision=precision_of(a.dtype), preferred_element_type=jnp.float32
    )
