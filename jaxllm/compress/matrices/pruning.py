"""Pruning that leaves the remaining weights unchanged: magnitude and Wanda."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.layers.moments import Moments
from jaxllm.compress.matrices.sparsity import Sparsity, lowest
from jaxllm.weights.formats import Weight, dense


def by_magnitude(weight: Weight, sparsity: Sparsity) -> jax.Array:
    """Zero the smallest weights of the matrix."""
    array = jnp.asarray(dense(weight))
    return _without(array, lowest(np.abs(np.asarray(array, np.float32)), sparsity, rows=False))


def wanda(weight: Weight, moments: Moments, sparsity: Sparsity) -> jax.Array:
    """Zero the weights with the smallest `|w_ij| ||x_j||` in each row.

    Sun et al. 2024, arXiv 2306.11695.
    """
    array = jnp.asarray(dense(weight))
    score = np.abs(np.asarray(array, np.float32)) * np.asarray(moments.norm_I)[None]
    return _without(array, lowest(score, sparsity, rows=True))


def below(weight: Weight, bound: float) -> jax.Array:
    """Zero the weights whose magnitude is below `bound`."""
    array = jnp.asarray(dense(weight))
    return jnp.where(jnp.abs(array.astype(jnp.float32)) < bound, jnp.zeros((), array.dtype), array)


def bound_of(weights: Iterable[Weight], fraction: float) -> float:
    """Return the exact magnitude below which a fraction of all elements of all weights lies.

    Ties at the threshold are not below it. Memory: one matrix. The bits of positive float32 numbers
    sort like the numbers, so this counts the upper 16 bits first, then the lower 16 of one bin.
    """
    found = list(weights)
    high = sum((_counts(_bits(w) >> 16) for w in found), np.zeros(1 << 16, np.int64))
    wanted = int(high.sum() * fraction)
    top = int(np.searchsorted(np.cumsum(high), wanted, side="right"))
    wanted -= int(high[:top].sum())
    low = np.zeros(1 << 16, np.int64)
    for weight in found:
        bits = _bits(weight)
        low += _counts(bits[bits >> 16 == top] & 0xFFFF)
    bottom = int(np.searchsorted(np.cumsum(low), wanted, side="right"))
    return float(np.array(top << 16 | bottom, np.uint32).view(np.float32))


def _bits(weight: Weight) -> np.ndarray:
    """Return the float32 bits of the magnitudes."""
    array = np.abs(np.asarray(dense(weight, jnp.float32))).reshape(-1)
    return array.view(np.uint32)


def _counts(values: np.ndarray) -> np.ndarray:
    return np.bincount(values, minlength=1 << 16)


def _without(array: jax.Array, gone_OI: np.ndarray) -> jax.Array:
    return jnp.where(jnp.asarray(gone_OI), jnp.zeros((), array.dtype), array)
