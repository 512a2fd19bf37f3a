"""Pooling token vectors into one, and normalization; for NumPy and JAX arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops.row_sums import row_sum

Array = Any  # a jax or numpy array


def pool(x_BTD: Array, mask_BT: Array, pooling: str) -> Array:
    """Pool each row's vectors to float32 `[B, D]`: mean, last or first of its real tokens.

    Tokens are added one after the other, so a row's bits do not depend on its padding.

    Args:
        mask_BT: bool, True for real tokens; padding may be anywhere and hold anything. A row
            without real tokens gives zeros.
        pooling: A key of `POOLING_MASKS`.
    """
    counted_BT = POOLING_MASKS[pooling](mask_BT)
    if isinstance(x_BTD, np.ndarray):
        sum_BD = x_BTD.astype("float32").sum(axis=1, where=counted_BT[:, :, None])
    else:

        def add(sum_BD: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            x_BD, counted_B = token
            return sum_BD + jnp.where(counted_B[:, None], x_BD.astype(jnp.float32), 0.0), None

        start_BD = jnp.zeros_like(x_BTD[:, 0], jnp.float32)
        columns = jnp.moveaxis(x_BTD, 1, 0), jnp.asarray(counted_BT).T
        sum_BD, _ = jax.lax.scan(add, start_BD, columns, unroll=8)
    return sum_BD / counted_BT.sum(axis=1, keepdims=True).clip(1).astype("float32")


def l2_normalize(x_BD: Array) -> Array:
    """Divide each row by its Euclidean norm; rows of zeros stay zero."""
    square_BD = x_BD * x_BD
    is_host = isinstance(x_BD, np.ndarray)
    norm_B1 = (square_BD.sum(axis=-1, keepdims=True) if is_host else row_sum(square_BD)) ** 0.5
    return x_BD / (norm_B1 + (norm_B1 == 0).astype(norm_B1.dtype))


def _first(mask_BT: Array) -> Array:
    return mask_BT & (mask_BT.cumsum(axis=1) == 1)


# Pooling name -> mask of the tokens to average, from the mask of real tokens.
POOLING_MASKS: dict[str, Callable[[Array], Array]] = {
    "mean": lambda mask_BT: mask_BT,
    "last": lambda mask_BT: _first(mask_BT[:, ::-1])[:, ::-1],
    "cls": _first,
}
