"""A model pruned by the magnitudes of its weights, without a look at what that does: for timing.

One decision: this is no way to a smaller model that is any good (`jaxllm.compress` is), but weights
that are sparse take as long to read whichever of them are left.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.api import LM
from jaxllm.errors import ConfigError
from jaxllm.weights.formats import Weight, as_format, dense
from jaxllm.weights.leaves import sparse
from jaxllm.weights.leaves.leaf import ROWS, up
from jaxllm.weights.paths import map_leaves
from jaxllm.weights.quantize import format_at


def prune_for_timing(lm: LM, name: str) -> LM:
    """The same model with its matrices in the sparse format `name`, half of each row's weights 0.

    The tokens' table and the head are in the format's numbers, not sparse, as where `quantize` is
    given its name. Raises ConfigError for a format that is not sparse.
    """
    if sparse.parse(name) is None:
        raise ConfigError(f"weights are pruned to a sparse format, as bfloat16-2:4, not {name!r}")

    def change(path: str, leaf: Weight) -> Weight:
        found = format_at(name, path, leaf.ndim)
        if found is None or (wanted := sparse.parse(found)) is None:
            return leaf if found is None else as_format(leaf, found)
        return wanted.make(half_of(dense(leaf), wanted.pattern))

    return dataclasses.replace(lm, params=map_leaves(change, lm.params))


def half_of(array: jax.Array, pattern: str) -> jax.Array:
    """The larger half by magnitude, of each aligned 4 columns or of each row; 0 in the others'
    place. Of equal ones the first are kept."""
    columns = array.shape[-1]
    if pattern == sparse.TWO_OF_FOUR:
        return _two_of_four(array)
    rows = np.asarray(array).reshape(-1, columns)
    kept = np.zeros_like(rows)
    for at in range(0, len(rows), ROWS):
        block = rows[at : at + ROWS]
        first = np.argpartition(-np.abs(block.astype(np.float32)), columns // 2, axis=1)
        here = first[:, : columns - columns // 2]
        some = np.take_along_axis(block, here, axis=1)
        np.put_along_axis(kept[at : at + ROWS], here, some, axis=1)
    return jnp.asarray(kept.reshape(array.shape))


@jax.jit
def _two_of_four(array: jax.Array) -> jax.Array:
    columns = array.shape[-1]
    edges: list[Any] = [(0, 0)] * (array.ndim - 1)
    wide = jnp.pad(array, [*edges, (0, up(columns, 4) - columns)])
    four = wide.reshape(*array.shape[:-1], -1, 4)
    size = jnp.abs(four)
    before = jnp.arange(4)[:, None] < jnp.arange(4)[None]  # whether a comes before b
    a, b = size[..., :, None], size[..., None, :]
    first = jnp.expand_dims(before, tuple(range(size.ndim - 1)))
    larger = ((a > b) | ((a == b) & first)).sum(axis=-2)  # how many are kept sooner than b
    return jnp.where(larger < 2, four, 0).reshape(wide.shape)[..., :columns]
