"""Cache equality, as `KVCache.__eq__` defines it."""

from typing import Any

import jax
import numpy as np


def caches_equal(one: Any, two: Any) -> bool:
    """Whether two caches have one structure, and the same bits in the slots that hold tokens."""

    def signature(cache: Any) -> Any:
        leaves, structure = jax.tree.flatten(cache)
        return structure, [(x.shape, x.dtype) for x in leaves]

    if signature(one) != signature(two) or not np.array_equal(
        one.next_position_B, two.next_position_B
    ):
        return False
    if not np.array_equal(one.edits_B, two.edits_B):
        return False
    memories = zip(jax.tree.leaves(one.memory), jax.tree.leaves(two.memory), strict=True)
    if any(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in memories):
        return False
    return all(map(_segments_equal, one.segments, two.segments))


def _segments_equal(one: Any, two: Any) -> bool:
    is_real_BS = np.asarray(one.position_BS) >= 0

    def slots_equal(x: jax.Array, y: jax.Array) -> bool:
        shared = x.shape[: is_real_BS.ndim] != is_real_BS.shape  # one row, but positions per row
        slots = is_real_BS.any(axis=0, keepdims=True) if shared else is_real_BS
        return np.asarray(x)[slots].tobytes() == np.asarray(y)[slots].tobytes()

    if not np.array_equal(one.position_BS, two.position_BS):
        return False
    return all(map(slots_equal, jax.tree.leaves(one), jax.tree.leaves(two)))
