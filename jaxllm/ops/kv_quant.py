"""Keys and values as a cache stores them: float arrays, or int8 with a scale per token and head.

Code that moves slots treats both as pytrees whose leaves are `[B, S, ...]`; only `dequantize` and
`cast` distinguish them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


class Int8Entries(struct.PyTreeNode):
    """Symmetric int8 values, `value * scale`; per token and head, the largest magnitude is 127.

    The rounding error is at most `scale / 2`. Not finite if the rounded numbers were not.

    Attributes:
        value: int8 `[..., S, K, H]`.
        scale: float32 `[..., S, K]`; 0 if all values are 0.
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


def concat_slots(parts: Sequence[jax.Array], rows: int) -> jax.Array:
    """Concatenate arrays `[rows or 1, S, ...]` along S to one `[rows, S, ...]`."""
    each = [jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in parts]
    return jnp.concatenate(each, axis=1)


def dequantize(entries: Entries) -> jax.Array:
    """Dequantize int8 entries to float32; return arrays unchanged."""
    if isinstance(entries, Int8Entries):
        return entries.value.astype(jnp.float32) * entries.scale[..., None]
    return entries


def cast(entries: Entries, dtype: Any) -> Entries:
    """Cast entries to a float dtype or int8; return them unchanged if they have it."""
    if entries.dtype == dtype:
        return entries
    x = dequantize(entries)
    if dtype != jnp.int8:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(axis=-1) / 127
    value = jnp.round(x / jnp.where(scale == 0, 1.0, scale)[..., None])
    return Int8Entries(value.astype(jnp.int8), scale)
