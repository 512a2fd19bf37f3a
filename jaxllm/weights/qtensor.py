"""Quantized weights as pytrees: integers with scales, and bfloat16 stored losslessly in 12 bits.

A leaf of either kind stands where an array `[out, in]` stood; `dense` gives the numbers back. What
is done with a leaf is decided in `linear`, how one is made in `quantize`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

CHUNK = 128  # columns of a row are stored in whole chunks; the kernels walk by them
HALF = 16  # a byte holds columns i (low four bits) and i + 16 (high) of each 32


class QTensor(struct.PyTreeNode):
    """`weight[o, i] = (q[o, i] - zero[o, g]) * scale[o, g]`, with g = i // group.

    bits 8: `data` is int8 `[O, I']`, q from -127 to 127, no zero point. bits 4: `data` is uint8
    `[O, I' / 2]`, q from 0 to 15: byte 16 b + j of a row holds columns 32 b + j (low four bits) and
    32 b + j + 16 (high). I' is `columns` rounded up to whole chunks of 128; what is added is zero.

    scale: float32 or float16 `[O, G]`, G = I' / group, or 1 where `group` is None: one scale a row.
    May be negative. zero: uint8 `[O, G]`, or None: 8 for 4 bits, 0 for 8. columns: I.
    """

    data: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    bits: int = struct.field(pytree_node=False)
    group: int | None = struct.field(pytree_node=False)
    columns: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.data.shape[0], self.columns)

    @property
    def size(self) -> int:
        return self.data.shape[0] * self.columns

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> Any:
        """The format that `dense` gives by default."""
        return jnp.dtype(jnp.float32)

    @property
    def nbytes(self) -> int:
        return sum(int(x.nbytes) for x in jax.tree.leaves(self))

    def integers(self) -> jax.Array:
        """q less its zero point: int8 `[O, I']`."""
        if self.bits == 8:
            return self.data
        rows = self.data.shape[0]
        byte = self.data.reshape(rows, self.data.shape[1] // HALF, HALF)
        q = jnp.stack([byte & 15, byte >> 4], axis=2).astype(jnp.int8)
        q = q.reshape(rows, 2 * self.data.shape[1])
        if self.zero is None:
            return q - 8
        return q - jnp.repeat(self.zero.astype(jnp.int8), q.shape[1] // self.zero.shape[1], axis=1)

    def dense(self, dtype: Any = jnp.float32) -> jax.Array:
        """The weights themselves, `[O, I]`, computed in float32."""
        weights: jax.Array = self._dense(dtype)
        return weights

    @partial(jax.jit, static_argnums=1)  # where nothing around it is compiled, it is, as a whole
    def _dense(self, dtype: Any) -> jax.Array:
        q = self.integers()
        scale = self.scale.astype(jnp.float32)
        size = q.shape[1] // scale.shape[1]
        grouped = q.reshape(*scale.shape, size).astype(jnp.float32)
        return (grouped * scale[:, :, None]).reshape(q.shape)[:, : self.columns].astype(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        """Rows by number, `[..., I]` float32; NaN for a number outside the table."""
        part = jax.tree.map(lambda x: x.at[index.reshape(-1)].get(mode="clip"), self)
        return or_nan(part.dense(), index, self.data.shape[0])


class Packed(struct.PyTreeNode):
    """bfloat16 in 12 bits, losslessly: sign and mantissa in a byte, the exponent in four bits.

    Four bits name one of 16 consecutive exponents, `base` to `base + 15`, chosen to hold as many of
    the weights as can be; the rare others are exact on the side, `escape_*`. Rows are stored in
    whole blocks of 64 columns. Within a block, byte `8 (2 j + h) + i` is of column `32 h + 8 j + i`
    (j < 4, h < 2, i < 8), the order in which the kernel's byte interleaving puts it right. The
    exponent of byte p of blocks 2 b and 2 b + 1 is in the low and high bits of byte p of nibble
    block b.

    sign_mantissa: uint8 `[O, I']`. nibbles: uint8 `[O, I'' / 2]`, I'' = I' in whole 128. base:
    int32 scalar. escape_begin: int32 `[O + 1]`, where each row's escapes begin. escape_column:
    int32 `[E]`, ascending in a row; escape_value: bfloat16 `[E]`. columns: I. widest: the most
    escapes in a row.
    """

    sign_mantissa: jax.Array
    nibbles: jax.Array
    base: jax.Array
    escape_begin: jax.Array
    escape_column: jax.Array
    escape_value: jax.Array
    columns: int = struct.field(pytree_node=False)
    widest: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.sign_mantissa.shape[0], self.columns)

    @property
    def size(self) -> int:
        return self.sign_mantissa.shape[0] * self.columns

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.bfloat16)

    @property
    def nbytes(self) -> int:
        return sum(int(x.nbytes) for x in jax.tree.leaves(self))

    def dense(self, dtype: Any = jnp.bfloat16) -> jax.Array:
        """The weights themselves, `[O, I]`, every bit of them in bfloat16."""
        return self._rows(jnp.arange(self.sign_mantissa.shape[0])).astype(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        """Rows by number, `[..., I]` bfloat16; NaN for a number outside the table."""
        rows = self.sign_mantissa.shape[0]
        return or_nan(self._rows(jnp.clip(index.reshape(-1), 0, rows - 1)), index, rows)

    @jax.jit
    def _rows(self, index: jax.Array) -> jax.Array:
        byte = self.sign_mantissa[index].astype(jnp.uint16)
        nibble = self.nibbles[index].reshape(index.shape[0], -1, 64)
        nibble = jnp.stack([nibble & 15, nibble >> 4], axis=2).reshape(index.shape[0], -1)
        exponent = nibble[:, : byte.shape[1]].astype(jnp.uint16) + self.base.astype(jnp.uint16)
        bits = ((byte & 128) << 8) | (exponent << 7) | (byte & 127)
        block = bits.reshape(index.shape[0], -1, 4, 2, 8).swapaxes(2, 3)
        dense = jax.lax.bitcast_convert_type(block, jnp.bfloat16).reshape(index.shape[0], -1)
        dense = dense[:, : self.columns]
        if not self.widest:
            return dense
        begin, end = self.escape_begin[index], self.escape_begin[index + 1]
        at = begin[:, None] + jnp.arange(self.widest)[None]
        last = self.escape_column.shape[0] - 1
        column = jnp.where(at < end[:, None], self.escape_column[jnp.minimum(at, last)], -1)
        column = jnp.where(column < 0, self.columns, column)  # out of range: dropped
        row = jnp.arange(index.shape[0])[:, None]
        return dense.at[row, column].set(self.escape_value[jnp.minimum(at, last)], mode="drop")


def or_nan(rows: jax.Array, index: jax.Array, count: int) -> jax.Array:
    inside = ((index >= 0) & (index < count)).reshape(-1, 1)
    return jnp.where(inside, rows, jnp.nan).reshape(*index.shape, rows.shape[1])
