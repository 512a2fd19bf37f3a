"""Products with a weight leaf; the leaf's kind decides how, and only here is that decided.

Weights are `[out, in]`: a row is one dot product. Accumulation is float32.
"""

import math

import jax
import jax.numpy as jnp


def linear(x: jax.Array, weight_OI: jax.Array, bias_O: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias` over the last axis of x: `[..., I]` to `[..., O]`, float32.

    Where the formats of x and weight differ, both are widened to float32.
    """
    rows = math.prod(x.shape[:-1])
    x_RI = x.reshape(rows, x.shape[-1])
    if x_RI.dtype != weight_OI.dtype:
        x_RI, weight_OI = x_RI.astype(jnp.float32), weight_OI.astype(jnp.float32)
    if rows == 1 and x_RI.dtype == jnp.bfloat16:
        y_RO = jax.lax.platform_dependent(x_RI, weight_OI, cpu=_paired, default=_product)
    else:
        y_RO = _product(x_RI, weight_OI)
    if bias_O is not None:
        y_RO = y_RO + bias_O.astype(jnp.float32)[None]
    return y_RO.reshape(*x.shape[:-1], y_RO.shape[-1])


def embed(weight_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
    """Rows of an embedding table: `[B, T]` ids to `[B, T, D]`; NaN for an id outside the table.

    An id that only the device sees cannot be refused: NaN makes it show instead of another row.
    """
    return weight_VD.at[token_BT].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def _product(x_RI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x_RI, weight_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _paired(x_RI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """XLA:CPU widens a whole bf16 weight for one row but not for two: ten times the speed."""
    return _product(jnp.concatenate([x_RI, x_RI]), weight_OI)[:1]
