"""Rounding to nearest, with a search for the clipped range of each group."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxllm.compress.layers.input_stats import InputStats, gram_blocks
from jaxllm.weights.types.base import round_up
from jaxllm.weights.types.int_weight import IntFormat, IntWeight

SHRINK_STEPS = 20  # down to half of the range, as in AWQ
ROW_BLOCK = 128  # rows per batch


def round_to_nearest(
    weight_OI: jax.Array, target: IntFormat, stats: InputStats | None = None, *, clip: bool = False
) -> IntWeight:
    """Round a weight to the nearest codes of `target`.

    Args:
        clip: Shrink each group's range to the fraction (1, 19/20, ... 11/20) with the least error.
        stats: With them the error is that of the group's output, `sum (x . (w' - w))^2` (Lin et
            al. 2024, arXiv 2306.00978), else the squared error of the weights.

    A format with one scale per row treats all columns as one group.
    """
    if not clip:
        return target.quantize(weight_OI)
    rows, columns = weight_OI.shape
    size, width = target.group_size(columns), round_up(columns, target.group_size(columns))
    if stats is None:
        gram_Ggg = jnp.broadcast_to(jnp.eye(size), (width // size, size, size))
    else:
        gram_Ggg = gram_blocks(stats, size, width)
    parts = []
    for begin in range(0, rows, ROW_BLOCK):
        w_OI = weight_OI[begin : begin + ROW_BLOCK].astype(jnp.float32)
        w_OGg = jnp.pad(w_OI, ((0, 0), (0, width - columns))).reshape(len(w_OI), -1, size)
        parts.append(_search_clipping(w_OGg, gram_Ggg, target))
    codes_OGg, scale_OG, zero_OG = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return target.from_codes(codes_OGg.reshape(rows, -1)[:, :columns], scale_OG, zero_OG)


@partial(jax.jit, static_argnums=2)
def _search_clipping(
    w_OGg: jax.Array, gram_Ggg: jax.Array, target: IntFormat
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return codes, scales and zero points of the range with the least error."""

    def quantize_range(shrink: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        scale, zero = target.choose_grid(w_OGg, shrink)
        codes = target.to_codes(w_OGg, scale[..., None], zero[..., None])
        return codes, scale, zero

    def error(shrink: jax.Array) -> jax.Array:
        codes, scale, zero = quantize_range(shrink)
        off_OGg = target.to_values(codes, scale[..., None], zero[..., None]) - w_OGg
        return jnp.einsum("ogi,gij,ogj->og", off_OGg, gram_Ggg, off_OGg, optimize=True)

    shrink_S = 1 - jnp.arange(SHRINK_STEPS // 2, dtype=jnp.float32) / SHRINK_STEPS
    error_SOG = jax.lax.map(error, shrink_S)
    return quantize_range(shrink_S[error_SOG.argmin(0)])
