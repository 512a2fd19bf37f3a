"""Magnitude pruning: zeroes the smallest weights of each matrix, or of the whole model."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.layerwise import match_weights
from jaxllm.compress.recipe import (
    ModelState,
    RuleOptions,
    Shapes,
    StepContext,
    StepSpec,
)
from jaxllm.errors import ConfigError
from jaxllm.research.pruning.sparsity import (
    PATTERN,
    Sparsity,
    check_pattern,
    parse as parse_sparsity,
    zero_lowest,
)
from jaxllm.weights.formats import Weight, to_dense
from jaxllm.weights.paths import map_leaves


class MagnitudeOptions(RuleOptions, frozen=True):
    """scope: "layer" prunes the same share of each matrix, "model" the smallest weights overall."""

    scope: str = "layer"


def magnitude(context: StepContext[MagnitudeOptions]) -> ModelState:
    """Zero the smallest weights of each matrix, or of all matrices together."""
    sparsity, params = parse_sparsity(context.argument), context.state.params
    leaves = match_weights(params, context.options.on, "prune: magnitude")
    bound: float | None = None
    if context.options.scope == "model":
        bound = magnitude_threshold(leaves.values(), sparsity.fraction)

    def change(path: str, leaf: Weight) -> Weight:
        if path not in leaves:
            return leaf
        if bound is not None:
            return prune_below(leaf, bound)
        return prune_magnitude(leaf, sparsity)

    return dataclasses.replace(context.state, params=map_leaves(change, params))


def check_magnitude(shapes: Shapes, argument: str, options: MagnitudeOptions) -> None:
    """Raise ConfigError as `check_pattern` does, and for an invalid scope."""
    check_pattern(shapes, argument, options)
    if options.scope not in ("layer", "model"):
        raise ConfigError(f"scope must be layer or model: got {options.scope!r:.40}")
    if options.scope == "model" and parse_sparsity(argument).pattern:
        raise ConfigError(f"scope=model requires a share such as 50%: got {argument}")


def prune_magnitude(weight: Weight, sparsity: Sparsity) -> jax.Array:
    """Zero the smallest weights of the matrix."""
    array = jnp.asarray(to_dense(weight))
    return zero_lowest(array, np.abs(np.asarray(array, np.float32)), sparsity, rows=False)


def prune_below(weight: Weight, bound: float) -> jax.Array:
    """Zero all weights of magnitude below `bound`."""
    array = jnp.asarray(to_dense(weight))
    return jnp.where(jnp.abs(array.astype(jnp.float32)) < bound, jnp.zeros((), array.dtype), array)


def magnitude_threshold(weights: Iterable[Weight], fraction: float) -> float:
    """Return the exact magnitude below which a fraction of all elements of all weights lies.

    Ties at the threshold are not below it. Memory: one matrix. The bits of positive float32 numbers
    sort like the numbers, so this counts the upper 16 bits first, then the lower 16 of one bin.
    """
    weights = list(weights)
    high = np.zeros(1 << 16, np.int64)
    for weight in weights:
        high += _count_values(_magnitude_bits(weight) >> 16)
    rank = int(high.sum() * fraction)
    top = int(np.searchsorted(np.cumsum(high), rank, side="right"))
    rank -= int(high[:top].sum())
    low = np.zeros(1 << 16, np.int64)
    for weight in weights:
        bits = _magnitude_bits(weight)
        low += _count_values(bits[bits >> 16 == top] & 0xFFFF)
    bottom = int(np.searchsorted(np.cumsum(low), rank, side="right"))
    return float(np.array(top << 16 | bottom, np.uint32).view(np.float32))


def _magnitude_bits(weight: Weight) -> np.ndarray:
    """Return the float32 bits of the magnitudes."""
    array = np.abs(np.asarray(to_dense(weight, jnp.float32))).reshape(-1)
    return array.view(np.uint32)


def _count_values(values: np.ndarray) -> np.ndarray:
    return np.bincount(values, minlength=1 << 16)


STEP = StepSpec(
    "prune",
    "magnitude",
    magnitude,
    "zero the smallest weights",
    PATTERN,
    MagnitudeOptions,
    needs_calibration=False,
    check=check_magnitude,
)
