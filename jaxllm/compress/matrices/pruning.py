"""Pruning that leaves the remaining weights unchanged: magnitude and Wanda."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.layers.input_stats import InputStats
from jaxllm.compress.matrices.sparsity import Sparsity, lowest_mask
from jaxllm.weights.formats import Weight, to_dense


def prune_magnitude(weight: Weight, sparsity: Sparsity) -> jax.Array:
    """Zero the smallest weights of the matrix."""
    array = jnp.asarray(to_dense(weight))
    return _zero_masked(
        array, lowest_mask(np.abs(np.asarray(array, np.float32)), sparsity, rows=False)
    )


def prune_wanda(weight: Weight, stats: InputStats, sparsity: Sparsity) -> jax.Array:
    """Zero the weights with the smallest `|w_ij| ||x_j||` in each row.

    Sun et al. 2024, arXiv 2306.11695.
    """
    array = jnp.asarray(to_dense(weight))
    score = np.abs(np.asarray(array, np.float32)) * np.asarray(stats.norm_I)[None]
    return _zero_masked(array, lowest_mask(score, sparsity, rows=True))


def prune_below(weight: Weight, bound: float) -> jax.Array:
    """Zero the weights whose magnitude is below `bound`."""
    array = jnp.asarray(to_dense(weight))
    return jnp.where(jnp.abs(array.astype(jnp.float32)) < bound, jnp.zeros((), array.dtype), array)


def magnitude_threshold(weights: Iterable[Weight], fraction: float) -> float:
    """Return the exact magnitude below which a fraction of all elements of all weights lies.

    Ties at the threshold are not below it. Memory: one matrix. The bits of positive float32 numbers
    sort like the numbers, so this counts the upper 16 bits first, then the lower 16 of one bin.
    """
    found = list(weights)
    high = sum(
        (_count_values(_magnitude_bits(w) >> 16) for w in found), np.zeros(1 << 16, np.int64)
    )
    wanted = int(high.sum() * fraction)
    top = int(np.searchsorted(np.cumsum(high), wanted, side="right"))
    wanted -= int(high[:top].sum())
    low = np.zeros(1 << 16, np.int64)
    for weight in found:
        bits = _magnitude_bits(weight)
        low += _count_values(bits[bits >> 16 == top] & 0xFFFF)
    bottom = int(np.searchsorted(np.cumsum(low), wanted, side="right"))
    return float(np.array(top << 16 | bottom, np.uint32).view(np.float32))


def _magnitude_bits(weight: Weight) -> np.ndarray:
    """Return the float32 bits of the magnitudes."""
    array = np.abs(np.asarray(to_dense(weight, jnp.float32))).reshape(-1)
    return array.view(np.uint32)


def _count_values(values: np.ndarray) -> np.ndarray:
    return np.bincount(values, minlength=1 << 16)


def _zero_masked(array: jax.Array, mask_OI: np.ndarray) -> jax.Array:
    return jnp.where(jnp.asarray(mask_OI), jnp.zeros((), array.dtype), array)
