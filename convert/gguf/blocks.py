"""The table of GGUF's tensor types, with dequantization and quantization of blocks.

A tensor row is a sequence of blocks, each with a fixed number of columns and bytes, little endian
(ggml's `ggml-common.h`). A block has one or more runs of columns; a code c of a run stands for
`c scale + offset`, computed in float32. So the numbers are bit for bit those of ggml, and so are
the bytes of types that ggml's Python package can write.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxllm.convert.gguf.more_types import MORE_TYPES, table_codes
from jaxllm.weights.types import mxfp4
from jaxllm.weights.types.super_blocks import SUPER_BLOCKS, half_at
from jaxllm.weights.types.super_search import QUANTIZERS

SUPER_BLOCK_SIZE = 256  # columns per block of the K types
BLOCK_SIZE = 32  # columns per block of the other quantized types


ReadBlocks = Callable[[np.ndarray], np.ndarray]


class TensorType(NamedTuple):
    """A tensor type.

    Attributes:
        type_id: ggml's number of the type.
        columns, nbytes: The size of a block.
        read_codes: Reads the codes of blocks uint8 `[n, nbytes]`, int8 or uint8 `[n, columns]`.
        read_scales: Reads the scale of each run, float32 `[n, runs]`.
        read_offsets: Reads the offset of each run, float32 `[n, runs]`; None: there are none.
        quantize_blocks: Quantizes float32 `[n, columns]` to blocks, if the type can be written.
        dtype: The dtype if the type is not quantized.
    """

    type_id: int
    name: str
    columns: int
    nbytes: int
    read_codes: ReadBlocks | None = None
    read_scales: ReadBlocks | None = None
    read_offsets: ReadBlocks | None = None
    quantize_blocks: ReadBlocks | None = None
    dtype: np.dtype | None = None

    def row_bytes(self, columns: int) -> int:
        """Return the size in bytes of a row of `columns` columns, a multiple of the block size."""
        return columns // self.columns * self.nbytes

    def dequantize(self, rows: np.ndarray) -> np.ndarray:
        """Dequantize rows of bytes `[R, row_bytes]` to float32 `[R, I]`."""
        if self.dtype is not None:
            return np.ascontiguousarray(rows).view(self.dtype).astype(np.float32)
        assert self.read_codes is not None
        assert self.read_scales is not None
        blocks = np.ascontiguousarray(rows).reshape(-1, self.nbytes)
        scales, codes = self.read_scales(blocks), self.read_codes(blocks)
        numbers = codes.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
        if self.read_offsets is not None:
            numbers += self.read_offsets(blocks)[..., None]
        return numbers.reshape(len(rows), -1)

    def quantize(self, rows: np.ndarray) -> np.ndarray:
        """Quantize rows of numbers `[R, I]` to bytes `[R, row_bytes]`."""
        if self.dtype is not None:
            with np.errstate(over="ignore"):
                return np.ascontiguousarray(rows.astype(self.dtype)).view(np.uint8)
        assert self.quantize_blocks is not None
        blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, self.columns)
        return self.quantize_blocks(blocks).reshape(len(rows), -1)


def _half_at(begin: int) -> ReadBlocks:
    """Return a reader of a float16 at byte `begin` of each block."""
    return lambda blocks: half_at(blocks, begin)


def _nibbles_at(begin: int, less: int) -> ReadBlocks:
    """Return a reader of 32 4-bit codes minus `less`: all low nibbles, then the high ones."""
    return lambda blocks: (
        np.concatenate([blocks[:, begin:] & 15, blocks[:, begin:] >> 4], axis=1) - np.uint8(less)
    ).view(np.int8)


def _five_bits_at(begin: int, less: int) -> ReadBlocks:
    """Return a reader of 32 5-bit codes minus `less`; four bytes of fifth bits come first."""

    def read(blocks: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little")
        return _nibbles_at(begin + 4, less)(blocks) + (bits << 4).view(np.int8)

    return read


def _quantize_q8_0(blocks: np.ndarray) -> np.ndarray:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    steps = blocks * _inverse(scale)
    away = np.floor(np.abs(steps))  # round half away from zero, like C's roundf
    away = away + np.floor(2 * (np.abs(steps) - away))
    codes = (np.sign(steps) * away).astype(np.int8)
    return np.concatenate([_as_half(scale), codes.view(np.uint8)], axis=1)


def _quantize_q4_0(blocks: np.ndarray) -> np.ndarray:
    largest = np.abs(blocks).argmax(axis=1, keepdims=True)
    scale = np.take_along_axis(blocks, largest, axis=1) / np.float32(-8)
    codes = np.trunc(blocks * _inverse(scale) + np.float32(8.5)).astype(np.uint8).clip(0, 15)
    return np.concatenate([_as_half(scale), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def _quantize_q5_0(blocks: np.ndarray) -> np.ndarray:
    largest = np.abs(blocks).argmax(axis=1, keepdims=True)
    scale = np.take_along_axis(blocks, largest, axis=1) / np.float32(-16)
    codes = np.trunc(blocks * _inverse(scale) + np.float32(16.5)).astype(np.uint8).clip(0, 31)
    return np.concatenate([_as_half(scale), _pack_five_bits(codes)], axis=1)


def _quantize_q5_1(blocks: np.ndarray) -> np.ndarray:
    low = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - low) / np.float32(31)
    codes = np.trunc((blocks - low) * _inverse(scale) + np.float32(0.5)).astype(np.uint8)
    return np.concatenate(
        [_as_half(scale), _as_half(low), _pack_five_bits(codes.clip(0, 31))], axis=1
    )


def _pack_five_bits(codes: np.ndarray) -> np.ndarray:
    """Pack 5-bit codes `[n, 32]` to bytes: four bytes of fifth bits, then nibbles."""
    low, fifth = codes & 15, np.packbits(codes >> 4, axis=1, bitorder="little")
    return np.concatenate([fifth, low[:, :16] | low[:, 16:] << 4], axis=1)


def _inverse(scale: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _as_half(scale: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return scale.astype(np.float16).view(np.uint8)


def _super_block(type_id: int, name: str) -> TensorType:
    read = SUPER_BLOCKS[name]
    readers = read.read_codes, read.read_scales, read.read_offsets
    return TensorType(type_id, name, SUPER_BLOCK_SIZE, read.nbytes, *readers, QUANTIZERS[name])


_ROWS = (
    TensorType(0, "F32", 1, 4, dtype=np.dtype("<f4")),
    TensorType(1, "F16", 1, 2, dtype=np.dtype("<f2")),
    TensorType(30, "BF16", 1, 2, dtype=np.dtype(ml_dtypes.bfloat16)),
    TensorType(
        8, "Q8_0", 32, 34, lambda b: b[:, 2:].view(np.int8), _half_at(0), None, _quantize_q8_0
    ),
    TensorType(2, "Q4_0", 32, 18, _nibbles_at(2, 8), _half_at(0), None, _quantize_q4_0),
    TensorType(3, "Q4_1", 32, 20, _nibbles_at(4, 0), _half_at(0), _half_at(2)),
    TensorType(6, "Q5_0", 32, 22, _five_bits_at(2, 16), _half_at(0), None, _quantize_q5_0),
    TensorType(7, "Q5_1", 32, 24, _five_bits_at(4, 0), _half_at(0), _half_at(2), _quantize_q5_1),
    TensorType(
        39,
        "MXFP4",
        32,
        17,
        table_codes(mxfp4.LEVELS, 1, 16),
        lambda b: np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128),
    ),
    _super_block(12, "Q4_K"),
    _super_block(13, "Q5_K"),
    _super_block(14, "Q6_K"),
)
_READ_ONLY = tuple(
    TensorType(*row[:4], row.read_codes, row.read_scales, row.read_offsets) for row in MORE_TYPES
)
BLOCKS = {row.type_id: row for row in (*_ROWS, *_READ_ONLY)}
BY_NAME = {row.name: row for row in _ROWS}
WRITABLE = tuple(
    row.name for row in _ROWS if row.dtype is not None or row.quantize_blocks is not None
)

# Names of types that are refused.
UNSUPPORTED = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    41: "Q1_0",
}
