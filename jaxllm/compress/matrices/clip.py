"""Rounding to nearest, with a search for the clipped range of each group."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxllm.compress.layers.moments import Moments, grams
from jaxllm.weights.leaves.integers import Integer, QTensor
from jaxllm.weights.leaves.leaf import up

STEPS = 20  # down to half of the range, as in AWQ
BLOCK = 128  # rows per batch


def rounded(
    weight_OI: jax.Array, to: Integer, moments: Moments | None = None, *, clip: bool = False
) -> QTensor:
    """Round a weight to the nearest codes of `to`.

    Args:
        clip: Shrink each group's range to the fraction (1, 19/20, ... 11/20) with the least error.
        moments: With them the error is that of the group's output, `sum (x . (w' - w))^2` (Lin et
            al. 2024, arXiv 2306.00978), else the squared error of the weights.

    A format with one scale per row treats all columns as one group.
    """
    if not clip:
        return to.make(weight_OI)
    rows, columns = weight_OI.shape
    size, width = to.size(columns), up(columns, to.size(columns))
    if moments is None:
        gram_Ggg = jnp.broadcast_to(jnp.eye(size), (width // size, size, size))
    else:
        gram_Ggg = grams(moments, size, width)
    parts = []
    for begin in range(0, rows, BLOCK):
        w_OI = weight_OI[begin : begin + BLOCK].astype(jnp.float32)
        w_OGg = jnp.pad(w_OI, ((0, 0), (0, width - columns))).reshape(len(w_OI), -1, size)
        parts.append(_searched(w_OGg, gram_Ggg, to))
    codes_OGg, scale_OG, zero_OG = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return to.of(codes_OGg.reshape(rows, -1)[:, :columns], scale_OG, zero_OG)


@partial(jax.jit, static_argnums=2)
def _searched(
    w_OGg: jax.Array, gram_Ggg: jax.Array, to: Integer
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return codes, scales and zero points of the range with the least error."""

    def tried(shrink: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        scale, zero = to.grid(w_OGg, shrink)
        codes = to.codes(w_OGg, scale[..., None], zero[..., None])
        return codes, scale, zero

    def error(shrink: jax.Array) -> jax.Array:
        codes, scale, zero = tried(shrink)
        off_OGg = to.values(codes, scale[..., None], zero[..., None]) - w_OGg
        return jnp.einsum("ogi,gij,ogj->og", off_OGg, gram_Ggg, off_OGg, optimize=True)

    shrink_S = 1 - jnp.arange(STEPS // 2, dtype=jnp.float32) / STEPS
    error_SOG = jax.lax.map(error, shrink_S)
    return tried(shrink_S[error_SOG.argmin(0)])
