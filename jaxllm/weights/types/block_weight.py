"""Integers in GGUF's blocks, which native kernels multiply as they are.

A block of Q4_K, Q5_K and Q6_K holds 256 columns (`super_blocks`); they are the formats q4_k, q5_k
and q6_k. A block of Q4_0 and Q8_0 holds 32: a float16 scale, and then codes as `IntWeight` stores
them. These are read in place from a mapped GGUF file, and saved in the format of `IntWeight`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.ops import cuda, native
from jaxllm.ops.cuda.launch import Rows
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.types.arrays import add_dependency, matmul
from jaxllm.weights.types.base import (
    ArraySpecs,
    Format,
    ReadBlocks,
    WeightBase,
    check_finite,
    fill_arrays,
    group_slice,
    nan_out_of_range,
    to_device,
)
from jaxllm.weights.types.bitpack import CHUNK, pack_codes
from jaxllm.weights.types.int_weight import MAX_F32_ROWS, IntFormat, IntWeight
from jaxllm.weights.types.super_blocks import SUPER_BLOCKS
from jaxllm.weights.types.super_search import QUANTIZERS

GROUP = 32  # columns of a block of Q4_0 or Q8_0; rounded inputs of any type share a scale
SUPER = 256  # columns of a block of the other types
LARGEST = 65504  # of float16; the squares of larger numbers would overflow in the search
MAX_BYTES = (1 << 31) - 1  # what XLA's int32 indices reach
# For CUDA kernels: an array of each of these bytes of a block, in their order, and their format.
_SPLIT = {
    "Q4_K": ({"scale": slice(0, 16), "weight": slice(16, 144)}, Rows(4, 32, struct="Q4K")),
    "Q5_K": (
        {"scale": slice(0, 16), "zero": slice(16, 48), "weight": slice(48, 176)},
        Rows(4, 32, struct="Q5K"),
    ),
    "Q6_K": (
        {"weight": slice(0, 128), "zero": slice(128, 208), "scale": slice(208, 210)},
        Rows(4, 16, struct="Q6K"),
    ),
}


@dataclasses.dataclass(frozen=True)
class BlockFormat(Format):
    """The format of `BlockWeight` for blocks of 256 columns."""

    type: str  # of `SUPER_BLOCKS`

    @property
    def name(self) -> str:
        return self.type.lower()

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> "BlockWeight":
        """Search the scales of each block, as llama.cpp does without importances.

        Raises:
            ConfigError: for rows that are not whole blocks, and numbers that float16 cannot hold.
        """
        if shape[-1] % SUPER or not shape[-1]:
            raise ConfigError(
                f"{self.name} requires rows of whole blocks of {SUPER} columns, got shape {shape}."
                f" Use {FALLBACKS[self.name]}"
            )

        def quantize(rows: np.ndarray) -> list[np.ndarray]:
            numbers = np.asarray(rows, np.float32).reshape(-1, SUPER)
            if not np.abs(numbers).max(initial=0) <= LARGEST:
                raise ConfigError(f"{self.name} cannot hold weights beyond {LARGEST:,} or NaN")
            return [QUANTIZERS[self.type](numbers).reshape(len(rows), -1)]

        specs: Any = self.array_specs(shape)
        return self.from_arrays(shape, to_device(fill_arrays(specs, blocks(), quantize)))

    def array_specs(self, shape: tuple[int, ...]) -> ArraySpecs:
        return {".blocks": ((*shape[:-1], BLOCK_TYPES[self.type].row_bytes(shape[-1])), np.uint8)}

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> "BlockWeight":
        return BlockWeight(arrays[".blocks"], self.type, shape[-1])

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        if shape[-1] % SUPER:
            raise CheckpointError(f"{path} is {self.name}, but {shape[-1]} columns are no blocks")
        check_finite(path, {".scale": _halves(self.type, arrays[".blocks"])}, ".scale")


def parse(name: str) -> BlockFormat | None:
    """Parse `q4_k`, `q5_k` or `q6_k`; None for other names."""
    return BlockFormat(name.upper()) if name in FALLBACKS else None


# Formats for rows that are not whole blocks: of about as many bits, as llama-quantize chooses.
FALLBACKS = {"q4_k": "int4-g32-zp-f16", "q5_k": "int8-g32-f16", "q6_k": "int8-g32-f16"}


class BlockType(NamedTuple):
    """A type of blocks: its kernels, columns and bytes of a block, and the format of weights."""

    kind: native.Kind
    columns: int
    nbytes: int
    format: Format

    def row_bytes(self, columns: int) -> int:
        return columns // self.columns * self.nbytes


BLOCK_TYPES = {  # their formats differ: `map_blocks` finds a type by it
    "Q4_0": BlockType(native.Kind.INT4, GROUP, 18, IntFormat(4, GROUP, scale_dtype="float16")),
    "Q8_0": BlockType(native.Kind.INT8, GROUP, 34, IntFormat(8, GROUP, scale_dtype="float16")),
    **{
        name: BlockType(native.Kind[name], SUPER, block.nbytes, BlockFormat(name))
        for name, block in SUPER_BLOCKS.items()
    },
}


class BlockWeight(WeightBase, struct.PyTreeNode):
    """A weight `[..., O, I]` of integers; I is in whole chunks of 128, and in whole blocks."""

    input_block = GROUP
    supports_int8_inputs = True

    # uint8 [..., O, row bytes]. Or flat, a matrix in a mapped file: less than a row of other bytes,
    # so that they begin where XLA can use them in place, then all rows. Or a matrix as CUDA kernels
    # read it: several arrays [O, ...] (`split_bytes`).
    data: jax.Array | dict[str, jax.Array]
    type: str = struct.field(pytree_node=False)  # of `BLOCK_TYPES`
    columns: int = struct.field(pytree_node=False)  # I

    @property
    def row_bytes(self) -> int:
        return BLOCK_TYPES[self.type].row_bytes(self.columns)

    @property
    def rows(self) -> jax.Array:
        """Its rows of bytes, uint8 `[..., O, row bytes]`."""
        if isinstance(self.data, dict):
            return _join_bytes(self.data, self.type)
        if self.data.ndim > 1:
            return self.data
        return self.data[self.data.shape[0] % self.row_bytes :].reshape(-1, self.row_bytes)

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.data, dict):
            return (self.data["weight"].shape[0], self.columns)
        if self.data.ndim > 1:
            return (*self.data.shape[:-1], self.columns)
        return (self.data.shape[0] // self.row_bytes, self.columns)

    @property
    def format(self) -> str:
        return BLOCK_TYPES[self.type].format.name

    @jax.jit
    def to_int_weight(self) -> IntWeight:
        """Return the same weight with separate codes and scales, bit for bit."""
        return _split_blocks(jnp.asarray(self.rows), self.type)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return self.to_int_weight().to_dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        rows, flat = self.shape[0], index.reshape(-1).clip(0, max(self.shape[0] - 1, 0))
        if isinstance(self.data, dict):
            part = {name: jnp.asarray(x).at[flat].get(mode="clip") for name, x in self.data.items()}
            bytes_NB = _join_bytes(part, self.type)
        elif self.data.ndim > 1:
            bytes_NB = jnp.asarray(self.data).at[flat].get(mode="clip")
        else:  # a slice of all rows would copy them
            begin = self.data.shape[0] % self.row_bytes + flat * self.row_bytes
            at = begin[:, None] + jnp.arange(self.row_bytes)[None]
            bytes_NB = self.data.at[at].get(mode="clip")
        return nan_out_of_range(_split_blocks(bytes_NB, self.type).to_dense(), index, rows)

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        weight = add_dependency(x_RI, self).to_int_weight()
        if not weight.is_composite:
            return weight.matmul(x_RI)
        if x_RI.dtype == jnp.int8:
            x_RI = jnp.maximum(x_RI, -127)  # as in the kernels
        many = x_RI.dtype == jnp.bfloat16 and x_RI.shape[0] > MAX_F32_ROWS
        return matmul(x_RI, weight.to_dense(jnp.bfloat16 if many else jnp.float32))

    def for_accelerator(self) -> "IntWeight | BlockWeight":
        """Return a matrix as integers, or as CUDA kernels read it.

        A GPU has no use for a mapped file. Stacks stay, as experts cannot have offsets.
        """
        if self.ndim > 2:
            return self
        if self.type in _SPLIT and cuda.find_problem() is None:
            return self.split_bytes()
        return self.to_int_weight().for_accelerator()

    def split_bytes(self) -> "BlockWeight":
        """Return a matrix of `_SPLIT` with the same bytes as arrays for CUDA kernels."""
        blocks_OGB = self.rows.reshape(self.shape[0], -1, BLOCK_TYPES[self.type].nbytes)
        parts = _SPLIT[self.type][0].items()
        arrays = {name: blocks_OGB[..., part].reshape(self.shape[0], -1) for name, part in parts}
        return self.replace(data=arrays)

    def cuda_matrix(self) -> cuda.Matrix | None:
        if not isinstance(self.data, dict):
            return None
        return cuda.Matrix(_SPLIT[self.type][1], self.data)

    def native_matrix(self) -> native.Matrix | None:
        if isinstance(self.data, dict):
            return None
        data = self.data if self.ndim > 2 else self.data.reshape(-1)
        return native.Matrix(BLOCK_TYPES[self.type].kind, [data], GROUP, self.shape[-2])

    def arrays(self) -> dict[str, jax.Array]:
        return {".blocks": self.rows} if self._is_stored else self.to_int_weight().arrays()

    def with_rows(self, index: np.ndarray) -> Any:
        if not self._is_stored:
            return self.to_int_weight().with_rows(index)
        return self.replace(data=self.rows[..., index, :])

    def with_columns(self, begin: int, end: int) -> Any:
        splits_block = begin % SUPER or end % SUPER
        if not self._is_stored or (splits_block and self.ndim == 2):  # integers have groups of 32
            return self.to_int_weight().with_columns(begin, end)
        group_slice(self.format, begin, end, self.columns, SUPER)
        first, last = (BLOCK_TYPES[self.type].row_bytes(at) for at in (begin, end))
        return self.replace(data=self.rows[..., first:last], columns=end - begin)

    def concatenate(self, appended: Sequence[Any], axis: int) -> Any:
        if not self._is_stored:
            parts = [x.to_int_weight() if isinstance(x, BlockWeight) else x for x in appended]
            return self.to_int_weight().concatenate(parts, axis)
        columns = self.columns + axis * sum(x.columns for x in appended)
        data = jnp.concatenate([self.rows, *(x.rows for x in appended)], axis=axis - 2)
        return self.replace(data=data, columns=columns)

    @property
    def _is_stored(self) -> bool:
        """Whether files store its blocks."""
        return self.type in SUPER_BLOCKS


def _join_bytes(arrays: Mapping[str, jax.Array], type: str) -> jax.Array:
    """Invert `BlockWeight.split_bytes`: return rows of blocks, uint8 `[O, row bytes]`."""
    parts = [
        arrays[name].reshape(len(arrays[name]), -1, part.stop - part.start)
        for name, part in _SPLIT[type][0].items()
    ]
    return jnp.concatenate(parts, axis=-1).reshape(len(parts[0]), -1)


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
        bytes_ = raw.reshape(-1)[raw.size % weight.row_bytes :]
        check_finite(path, {".scale": _halves(type, bytes_)}, ".scale")
    return weight


def fits_in_place(type: str, shape: tuple[int, ...]) -> bool:
    """Return whether the blocks of a tensor of this type and shape can be a `BlockWeight`."""
    block = BLOCK_TYPES.get(type)
    if block is None or len(shape) != 2 or not shape[1] or shape[1] % max(CHUNK, block.columns):
        return False
    return (shape[0] + 1) * block.row_bytes(shape[1]) <= MAX_BYTES


def _halves(type: str, bytes_: np.ndarray) -> np.ndarray:
    """Return the float16 numbers of blocks."""
    halves = SUPER_BLOCKS[type].halves if type in SUPER_BLOCKS else slice(2)
    return bytes_.reshape(-1, BLOCK_TYPES[type].nbytes)[:, halves].view(np.float16)


def _split_blocks(bytes_OB: jax.Array, type: str) -> IntWeight:
    """Return the weight of rows of blocks, `[..., O, row bytes]`."""
    block, lead = BLOCK_TYPES[type], bytes_OB.shape[:-1]
    count = bytes_OB.shape[-1] // block.nbytes  # blocks of a row
    blocks, columns = bytes_OB.reshape(math.prod(lead) * count, block.nbytes), count * block.columns

    def as_rows(x: jax.Array) -> jax.Array:
        return x.reshape(*lead, count * x.shape[-1])

    if type not in SUPER_BLOCKS:
        bits, codes = 4 if type == "Q4_0" else 8, blocks[:, 2:]
        scale = jax.lax.bitcast_convert_type(blocks[:, :2], jnp.float16)[:, None]
        codes = jax.lax.bitcast_convert_type(codes, jnp.int8) if bits == 8 else codes
        return IntWeight(as_rows(codes), as_rows(scale), None, bits, GROUP, columns)
    read = SUPER_BLOCKS[type]
    codes, scale = as_rows(read.read_codes(blocks)), as_rows(read.read_scales(blocks))
    if read.read_offsets is None:  # 16 columns have a scale
        first, second = scale[..., 0::2], scale[..., 1::2]
        return IntWeight(codes, first, None, 8, GROUP, columns, second_scale=second)
    offset = as_rows(read.read_offsets(blocks))
    if type == "Q4_K":
        zero = jnp.zeros(scale.shape, jnp.uint8)
        return IntWeight(pack_codes(codes, 4), scale, zero, 4, GROUP, columns, offset=offset)
    return IntWeight(codes.view(jnp.int8), scale, None, 8, GROUP, columns, offset=offset)
