"""Which weights of a model are set to zero, without changing the others: magnitude and Wanda."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.layers.moments import Moments
from jaxllm.compress.matrices.sparsity import Sparsity, lowest
from jaxllm.weights.formats import Weight, dense


def by_magnitude(weight: Weight, sparsity: Sparsity) -> jax.Array:
    """The weight without its smallest entries, counted over the whole matrix."""
    array = jnp.asarray(dense(weight))
    return _without(array, lowest(np.abs(np.asarray(array, np.float32)), sparsity, rows=False))


def wanda(weight: Weight, moments: Moments, sparsity: Sparsity) -> jax.Array:
    """The weight without, in each row, the entries of least `|w_ij| ||x_j||`.

    Sun et al. 2024, arXiv 2306.11695.
    """
    array = jnp.asarray(dense(weight))
    score = np.abs(np.asarray(array, np.float32)) * np.asarray(moments.norm_I)[None]
    return _without(array, lowest(score, sparsity, rows=True))


def below(weight: Weight, bound: float) -> jax.Array:
    """The weight without what is smaller than `bound`."""
    array = jnp.asarray(dense(weight))
    return jnp.where(jnp.abs(array.astype(jnp.float32)) < bound, jnp.zeros((), array.dtype), array)


def bound_of(weights: Iterable[Weight], fraction: float) -> float:
    """The magnitude that a fraction of all entries of all weights lies below, exactly.

    Of equal magnitudes all stay. Memory: one matrix, for the bits of a float32 are in the order of
    their numbers: the upper half of them is counted first, and then the lower half of one value.
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
    """Of the magnitudes."""
    array = np.abs(np.asarray(dense(weight, jnp.float32))).reshape(-1)
    return array.view(np.uint32)


def _counts(values: np.ndarray) -> np.ndarray:
    return np.bincount(values, minlength=1 << 16)


def _without(array: jax.Array, gone_OI: np.ndarray) -> jax.Array:
    return jnp.where(jnp.asarray(gone_OI), jnp.zeros((), array.dtype), array)
