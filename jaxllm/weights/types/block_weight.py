"""Integers in GGUF's blocks (Q4_0, Q8_0), which native kernels read in place from a mapped file.

A block holds 32 columns: a float16 scale, and then codes as `IntWeight` stores them. The format is
therefore that of an `IntWeight`, which is used for all but products and embeddings.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.ops import native
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.types.arrays import add_dependency
from jaxllm.weights.types.base import Format, WeightBase, check_finite, nan_out_of_range
from jaxllm.weights.types.bitpack import CHUNK
from jaxllm.weights.types.int_weight import IntFormat, IntWeight

GROUP = 32  # columns of a block
MAX_BYTES = (1 << 31) - 1  # what XLA's int32 indices reach


class BlockWeight(WeightBase, struct.PyTreeNode):
    """A matrix `[O, I]` of symmetric integers with 4 or 8 bits; I is in whole chunks of 128.

    Its bytes may begin before the first row, so that they begin where XLA can use them in place.
    """

    input_block = GROUP
    supports_int8_inputs = True

    data: jax.Array  # uint8: less than a row of other bytes, then all rows
    bits: int = struct.field(pytree_node=False)
    columns: int = struct.field(pytree_node=False)  # I

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.bits, self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.data.shape[0] // self.row_bytes, self.columns)

    @property
    def int_format(self) -> IntFormat:
        """The format of its values."""
        return IntFormat(self.bits, GROUP, scale_dtype="float16")

    @property
    def format(self) -> str:
        return self.int_format.name

    @jax.jit
    def to_int_weight(self) -> IntWeight:
        """Return the same weight with separate codes and scales, bit for bit."""
        begin = self.data.shape[0] % self.row_bytes
        return _split_blocks(self.data[begin:].reshape(self.shape[0], -1), self.bits)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return self.to_int_weight().to_dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        rows, size = self.shape[0], self.row_bytes
        begin = self.data.shape[0] % size + index.reshape(-1).clip(0, max(rows - 1, 0)) * size
        bytes_NB = self.data.at[begin[:, None] + jnp.arange(size)[None]].get(mode="clip")
        return nan_out_of_range(_split_blocks(bytes_NB, self.bits).to_dense(), index, rows)

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        return add_dependency(x_RI, self).to_int_weight().matmul(x_RI)

    def for_accelerator(self) -> IntWeight:
        """Return it as integers: a GPU has no use for a mapped file."""
        return self.to_int_weight().for_accelerator()

    def native_matrix(self) -> native.Matrix:
        kind = native.Kind.INT4 if self.bits == 4 else native.Kind.INT8
        return native.Matrix(kind, [self.data], GROUP, self.shape[0])

    def arrays(self) -> dict[str, jax.Array]:
        return self.to_int_weight().arrays()

    def with_rows(self, index: np.ndarray) -> IntWeight:
        return self.to_int_weight().with_rows(index)

    def with_columns(self, begin: int, end: int) -> IntWeight:
        return self.to_int_weight().with_columns(begin, end)

    def concatenate(self, appended: Sequence[Any], axis: int) -> IntWeight:
        parts = [x.to_int_weight() if isinstance(x, BlockWeight) else x for x in appended]
        return self.to_int_weight().concatenate(parts, axis)


def map_blocks(
    path: str, format: Format, shape: tuple[int, ...], tensor: LazyTensor, *, passed: bool
) -> BlockWeight:
    """Return the weight at `path` over its bytes in a mapped file.

    Args:
        passed: whether its scales are known to be finite.

    Raises:
        CheckpointError: if one is not.
    """
    assert isinstance(format, IntFormat)
    weight = BlockWeight(jax.device_put(tensor.read(), may_alias=True), format.bits, shape[1])
    assert weight.format == format.name and weight.shape == shape
    if not passed:
        size = row_bytes(format.bits, GROUP)
        blocks = tensor.read()[tensor.shape[0] % weight.row_bytes :].reshape(-1, size)
        check_finite(path, {".scale": blocks[:, :2].view(np.float16)}, ".scale")
    return weight


def row_bytes(bits: int, columns: int) -> int:
    """Return the bytes of a row of blocks."""
    return columns // GROUP * (2 + GROUP * bits // 8)


def fits_in_place(bits: int, shape: tuple[int, ...]) -> bool:
    """Return whether the blocks of a tensor of this shape can be a `BlockWeight`."""
    if len(shape) != 2 or not shape[1] or shape[1] % CHUNK:
        return False
    return (shape[0] + 1) * row_bytes(bits, shape[1]) <= MAX_BYTES


def _split_blocks(bytes_OB: jax.Array, bits: int) -> IntWeight:
    """Return the weight of rows of blocks."""
    size = 2 + GROUP * bits // 8
    blocks_OGb = bytes_OB.reshape(bytes_OB.shape[0], bytes_OB.shape[1] // size, size)
    scale_OG = jax.lax.bitcast_convert_type(blocks_OGb[..., :2], jnp.float16)
    data = blocks_OGb[..., 2:].reshape(bytes_OB.shape[0], -1)
    data = jax.lax.bitcast_convert_type(data, jnp.int8) if bits == 8 else data
    return IntWeight(data, scale_OG, None, bits, GROUP, blocks_OGb.shape[1] * GROUP)
