"""Keys and values as a cache keeps them: float arrays, or int8 with a scale a token and head.

Everything that moves slots about treats both as pytrees whose leaves are `[B, S, ...]`; only
`dense` and `cast` know the difference.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


class Int8Entries(struct.PyTreeNode):
    """`value * scale`, symmetric: the largest magnitude of each token's head is 127 steps.

    value: int8 `[..., S, K, H]`. scale: float32 `[..., S, K]`, 0 where all is 0. The rounding error
    is at most half a step, `scale / 2`. Not finite where what was rounded was not.
    """

    value: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def nbytes(self) -> int:
        return int(self.value.nbytes + self.scale.nbytes)


Entries = jax.Array | Int8Entries


def side_by_side(parts: Sequence[jax.Array], rows: int) -> jax.Array:
    """Arrays `[rows or 1, S, ...]` as one `[rows, S, ...]`, one after the other along S."""
    each = [jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in parts]
    return jnp.concatenate(each, axis=1)


def dense(entries: Entries) -> jax.Array:
    """The numbers themselves: int8 entries as float32, arrays as they are."""
    if isinstance(entries, Int8Entries):
        return entries.value.astype(jnp.float32) * entries.scale[..., None]
    return entries


def cast(entries: Entries, dtype: Any) -> Entries:
    """The entries in another format, a float dtype or int8; as they are if they have it."""
    if entries.dtype == dtype:
        return entries
    x = dense(entries)
    if dtype != jnp.int8:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(axis=-1) / 127
    value = jnp.round(x / jnp.where(scale == 0, 1.0, scale)[..., None])
    return Int8Entries(value.astype(jnp.int8), scale)
