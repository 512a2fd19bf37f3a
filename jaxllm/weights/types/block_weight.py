"""Integers in GGUF's blocks, which native kernels read in place from a mapped file.

A block of Q4_0 and Q8_0 holds 32 columns: a float16 scale, and then codes as `IntWeight` stores
them. A block of Q4_K, Q5_K and Q6_K holds 256 (`super_blocks`). An `IntWeight` has the same numbers
and format; it does all but products and embeddings.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.ops import native
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.types.arrays import add_dependency, matmul
from jaxllm.weights.types.base import Format, WeightBase, check_finite, nan_out_of_range
from jaxllm.weights.types.bitpack import CHUNK, pack_codes
from jaxllm.weights.types.int_weight import MAX_F32_ROWS, OFFSET, IntFormat, IntWeight
from jaxllm.weights.types.super_blocks import SUPER_BLOCKS

GROUP = 32  # columns of a block of Q4_0 or Q8_0; rounded inputs of any type share a scale
MAX_BYTES = (1 << 31) - 1  # what XLA's int32 indices reach


class BlockType(NamedTuple):
    """A type of blocks: its kernels, columns and bytes of a block, and the format of its values."""

    kind: native.Kind
    columns: int
    nbytes: int
    format: IntFormat

    def row_bytes(self, columns: int) -> int:
        return columns // self.columns * self.nbytes


BLOCK_TYPES = {  # their formats differ: `map_blocks` finds a type by it
    "Q4_0": BlockType(native.Kind.INT4, GROUP, 18, IntFormat(4, GROUP, scale_dtype="float16")),
    "Q8_0": BlockType(native.Kind.INT8, GROUP, 34, IntFormat(8, GROUP, scale_dtype="float16")),
    "Q4_K": BlockType(native.Kind.Q4_K, 256, 144, IntFormat(4, GROUP, True, variant=OFFSET)),
    "Q5_K": BlockType(native.Kind.Q5_K, 256, 176, IntFormat(8, GROUP, variant=OFFSET)),
    "Q6_K": BlockType(native.Kind.Q6_K, 256, 210, IntFormat(8, GROUP // 2)),
}


class BlockWeight(WeightBase, struct.PyTreeNode):
    """A matrix `[O, I]` of integers; I is in whole chunks of 128, and in whole blocks.

    Its bytes may begin before the first row, so that they begin where XLA can use them in place.
    """

    input_block = GROUP
    supports_int8_inputs = True

    data: jax.Array  # uint8: less than a row of other bytes, then all rows
    type: str = struct.field(pytree_node=False)  # of `BLOCK_TYPES`
    columns: int = struct.field(pytree_node=False)  # I

    @property
    def row_bytes(self) -> int:
        return BLOCK_TYPES[self.type].row_bytes(self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.data.shape[0] // self.row_bytes, self.columns)

    @property
    def int_format(self) -> IntFormat:
        """The format of its values."""
        return BLOCK_TYPES[self.type].format

    @property
    def format(self) -> str:
        return self.int_format.name

    @jax.jit
    def to_int_weight(self) -> IntWeight:
        """Return the same weight with separate codes and scales, bit for bit."""
        begin = self.data.shape[0] % self.row_bytes
        return _split_blocks(self.data[begin:].reshape(self.shape[0], -1), self.type)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return self.to_int_weight().to_dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        rows, size = self.shape[0], self.row_bytes
        begin = self.data.shape[0] % size + index.reshape(-1).clip(0, max(rows - 1, 0)) * size
        bytes_NB = self.data.at[begin[:, None] + jnp.arange(size)[None]].get(mode="clip")
        return nan_out_of_range(_split_blocks(bytes_NB, self.type).to_dense(), index, rows)

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        weight = add_dependency(x_RI, self).to_int_weight()
        if not weight.is_composite:
            return weight.matmul(x_RI)
        if x_RI.dtype == jnp.int8:
            x_RI = jnp.maximum(x_RI, -127)  # as in the kernels
        many = x_RI.dtype == jnp.bfloat16 and x_RI.shape[0] > MAX_F32_ROWS
        return matmul(x_RI, weight.to_dense(jnp.bfloat16 if many else jnp.float32))

    def for_accelerator(self) -> IntWeight:
        """Return it as integers: a GPU has no use for a mapped file."""
        return self.to_int_weight().for_accelerator()

    def native_matrix(self) -> native.Matrix:
        return native.Matrix(BLOCK_TYPES[self.type].kind, [self.data], GROUP, self.shape[0])

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
    """Return the weight at `path` over its bytes, which usually lie in a mapped file.

    Args:
        passed: whether its scales are known to be finite.

    Raises:
        CheckpointError: if one is not.
    """
    (type,) = (name for name, block in BLOCK_TYPES.items() if block.format == format)
    raw = tensor.read()
    weight = BlockWeight(jax.device_put(raw, may_alias=True), type, shape[1])
    assert weight.shape == shape
    if not passed:
        blocks = raw[raw.size % weight.row_bytes :].reshape(-1, BLOCK_TYPES[type].nbytes)
        halves = SUPER_BLOCKS[type].halves if type in SUPER_BLOCKS else slice(2)
        check_finite(path, {".scale": blocks[:, halves].view(np.float16)}, ".scale")
    return weight


def fits_in_place(type: str, shape: tuple[int, ...]) -> bool:
    """Return whether the blocks of a tensor of this type and shape can be a `BlockWeight`."""
    block = BLOCK_TYPES.get(type)
    if block is None or len(shape) != 2 or not shape[1] or shape[1] % max(CHUNK, block.columns):
        return False
    return (shape[0] + 1) * block.row_bytes(shape[1]) <= MAX_BYTES


def _split_blocks(bytes_OB: jax.Array, type: str) -> IntWeight:
    """Return the weight of rows of blocks."""
    rows, block = bytes_OB.shape[0], BLOCK_TYPES[type]
    bits, columns = block.format.bits, bytes_OB.shape[1] // block.nbytes * block.columns
    if type not in SUPER_BLOCKS:
        blocks_OGb = bytes_OB.reshape(rows, -1, block.nbytes)
        scale_OG = jax.lax.bitcast_convert_type(blocks_OGb[..., :2], jnp.float16)
        data = blocks_OGb[..., 2:].reshape(rows, -1)
        data = jax.lax.bitcast_convert_type(data, jnp.int8) if bits == 8 else data
        return IntWeight(data, scale_OG, None, bits, GROUP, columns)
    read, blocks = SUPER_BLOCKS[type], bytes_OB.reshape(-1, block.nbytes)
    codes_OI = read.read_codes(blocks).reshape(rows, columns)
    scale_OG = read.read_scales(blocks).reshape(rows, -1)
    if read.read_offsets is None:  # 16 columns have a scale
        first, second = scale_OG[:, 0::2], scale_OG[:, 1::2]
        return IntWeight(codes_OI, first, None, bits, GROUP, columns, second_scale=second)
    offset_OG = read.read_offsets(blocks).reshape(rows, -1)
    zero = jnp.zeros(scale_OG.shape, jnp.uint8) if bits == 4 else None
    data = pack_codes(codes_OI, 4) if bits == 4 else codes_OI.view(jnp.int8)
    return IntWeight(data, scale_OG, zero, bits, GROUP, columns, offset=offset_OG)
