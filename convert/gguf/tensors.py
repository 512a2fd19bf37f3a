"""Tensors of a GGUF file as lazy tensors: dequantized, or as the pieces of an exact leaf.

For every quantized type there is a leaf that represents its numbers exactly and has kernels for
products. Q8_0 and Q4_0 are integers in groups of 32 with float16 scales, Q4_0 in the same bytes;
Q5_0's 5-bit codes take 8 bits. Q4_1, Q5_1, Q4_K and Q5_K add a number per group (`offset/...`).
Q6_K has a scale per 16 columns (`int8-g16`).
"""

import dataclasses
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxllm.convert.gguf.blocks import (
    BLOCK_SIZE,
    SUPER_BLOCK_SIZE,
    BlockType,
    read_scales,
    unpack_fifth_bits,
    unpack_q6_k,
    unpack_runs,
)
from jaxllm.convert.gguf.header import TensorInfo
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.safetensors import ALIGNMENT, empty_aligned, view_mapped_tensor
from jaxllm.weights.types.base import BLOCK_ROWS, Format, PartialShape, round_up
from jaxllm.weights.types.bitpack import CHUNK
from jaxllm.weights.types.int_weight import OFFSET, IntFormat

_HALF = np.dtype(np.float16)
_EIGHT, _FOUR = (
    IntFormat(8, BLOCK_SIZE, scale_dtype="float16"),
    IntFormat(4, BLOCK_SIZE, scale_dtype="float16"),
)
ReadPiece = Callable[
    [np.ndarray], np.ndarray
]  # blocks [n, nbytes] to the numbers of a piece [n, k]


class LeafRecipe(NamedTuple):
    """The format of an exact leaf for a type, and the functions that compute its pieces.

    padding_byte: The byte of codes in padding columns, which stand for zero.
    """

    format: Format
    read_pieces: Mapping[str, ReadPiece]
    padding_byte: int = 0


def _read_scale(begin: int) -> ReadPiece:
    return lambda blocks: np.ascontiguousarray(blocks[:, begin : begin + 2]).view(_HALF)


def _read_five_bits(begin: int, offset: int) -> ReadPiece:
    """Return a reader of 5-bit codes minus `offset`; four bytes of fifth bits come first."""

    def part(blocks: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little")
        low = blocks[:, begin + 4 :]
        codes = np.concatenate([low & 15, low >> 4], axis=1) | bits << 4
        return codes - np.uint8(offset)  # modulo 256: the bytes of int8

    return part


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack 4-bit codes `[n, 8, 32]` into bytes: columns i and i + 16 share one."""
    return (codes[..., :16] | codes[..., 16:] << 4).reshape(len(codes), -1)


def _zeros(count: int) -> ReadPiece:
    return lambda blocks: np.zeros((len(blocks), count), np.uint8)


def _read_q6_k_scales(first: int) -> ReadPiece:
    """Return a reader of every other one of Q6_K's 16 scales."""

    def part(blocks: np.ndarray) -> np.ndarray:
        whole = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)[:, first::2]
        return whole * np.ascontiguousarray(blocks[:, 208:]).view(_HALF).astype(np.float32)

    return part


def _offset_recipe(
    integer: IntFormat, data: ReadPiece, scale: ReadPiece, offset: ReadPiece, count: int
) -> LeafRecipe:
    parts = {".offset": offset, ".weight.data": data, ".weight.scale": scale}
    if integer.zero_point:
        parts[".weight.zero"] = _zeros(count)
    return LeafRecipe(dataclasses.replace(integer, variant=OFFSET), parts)


_FOUR_UP = IntFormat(4, BLOCK_SIZE, zero_point=True)  # codes from 0; the offset does the rest
LEAVES: Mapping[str, LeafRecipe] = {
    "Q8_0": LeafRecipe(_EIGHT, {".data": lambda blocks: blocks[:, 2:], ".scale": _read_scale(0)}),
    "Q4_0": LeafRecipe(
        _FOUR, {".data": lambda blocks: blocks[:, 2:], ".scale": _read_scale(0)}, 0x88
    ),
    "Q5_0": LeafRecipe(_EIGHT, {".data": _read_five_bits(2, 16), ".scale": _read_scale(0)}),
    "Q4_1": _offset_recipe(
        dataclasses.replace(_FOUR_UP, scale_dtype="float16"),
        lambda b: b[:, 4:],
        _read_scale(0),
        _read_scale(2),
        1,
    ),
    "Q5_1": _offset_recipe(_EIGHT, _read_five_bits(4, 0), _read_scale(0), _read_scale(2), 1),
    "Q4_K": _offset_recipe(
        _FOUR_UP,
        lambda blocks: _pack_nibbles(unpack_runs(blocks[:, 16:])),
        lambda blocks: read_scales(blocks)[0],
        lambda blocks: -read_scales(blocks)[1],
        8,
    ),
    "Q5_K": _offset_recipe(
        IntFormat(8, BLOCK_SIZE),
        lambda blocks: (unpack_runs(blocks[:, 48:]) | unpack_fifth_bits(blocks[:, 16:48])).reshape(
            -1, SUPER_BLOCK_SIZE
        ),
        lambda blocks: read_scales(blocks)[0],
        lambda blocks: -read_scales(blocks)[1],
        8,
    ),
    "Q6_K": LeafRecipe(
        IntFormat(8, 16),
        {
            ".data": lambda blocks: unpack_q6_k(blocks) - np.uint8(32),
            ".first": _read_q6_k_scales(0),
            ".second": _read_q6_k_scales(1),
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a mapped file.

    Attributes:
        row_order: The stored row for each row to read; None: all rows in stored order.
        weight_offset: A number to subtract from the stored ones.
    """

    buffer: mmap.mmap
    tensor_info: TensorInfo
    row_order: np.ndarray | None = None
    weight_offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape after reordering."""
        shape = self.tensor_info.shape
        if self.row_order is None:
            return shape
        return (len(self.row_order), shape[-1]) if len(shape) > 1 else (len(self.row_order),)

    @property
    def block(self) -> BlockType:
        return self.tensor_info.block

    def to_plain(self) -> LazyTensor:
        """Return the numbers, dequantized to float32 if quantized, else in their own dtype."""
        block, shape = self.block, self.shape
        dtype = np.dtype(np.float32) if block.dtype is None else block.dtype
        if self.weight_offset:
            dtype = np.dtype(np.float32)

        def change(rows: np.ndarray) -> np.ndarray:
            if self.weight_offset:
                return block.dequantize(rows) - np.float32(self.weight_offset)
            if block.dtype is None:
                return block.dequantize(rows)
            return np.ascontiguousarray(rows).view(block.dtype)

        def read() -> np.ndarray:
            array = empty_aligned(shape, dtype)
            flat, done = array.reshape(self._row_count, -1), 0
            for part in self._read_raw_rows(BLOCK_ROWS):
                numbers = change(part)
                flat[done : done + len(numbers)] = numbers
                done += len(numbers)
            return array

        def parts(rows: int) -> Iterator[np.ndarray]:
            return (change(part) for part in self._read_raw_rows(rows))

        if block.dtype is not None and self.row_order is None and not self.weight_offset:
            lying = view_mapped_tensor(self.buffer, self.tensor_info.offset, dtype, shape)
            if self.tensor_info.offset % ALIGNMENT == 0:  # XLA can use it without a copy
                return lying
            return dataclasses.replace(lying, read=read)
        apart = parts if len(shape) > 1 else None
        return LazyTensor(dtype, shape, read, self._raw_tensor.release, apart)

    def to_leaf(self) -> tuple[Format, dict[str, LazyTensor]] | None:
        """Return the format and the pieces of an exact leaf, or None if there is none."""
        kept = LEAVES.get(self.block.name)
        if kept is None or len(self.shape) < 2 or self.weight_offset:
            return None
        expected = kept.format.array_specs(self.shape)
        return kept.format, {
            name: self._make_piece(kept, name, *expected[name]) for name in expected
        }

    def _make_piece(
        self, kept: LeafRecipe, name: str, shape: PartialShape, dtype: Any
    ) -> LazyTensor:
        size, held = tuple(n or 0 for n in shape), np.dtype(dtype)
        empty = kept.padding_byte if name.endswith(".data") else 0

        def read() -> np.ndarray:
            array = empty_aligned(size, held)
            rows, done = array.reshape(self._row_count, -1), 0
            if held.itemsize == 1:
                rows = rows.view(np.uint8)
            for raw in self._read_raw_rows(BLOCK_ROWS):
                blocks = np.ascontiguousarray(raw).reshape(-1, self.block.nbytes)
                made = kept.read_pieces[name](
                    blocks
                )  # per block; often a view, so copied only once
                made = made.reshape(len(raw), -1, made.shape[1])
                into = rows[done : done + len(raw)].reshape(len(raw), -1, made.shape[2])
                into[:, : made.shape[1]], into[:, made.shape[1] :] = made, empty
                done += len(raw)
            return array

        return LazyTensor(held, size, read, self._raw_tensor.release)

    @property
    def _row_count(self) -> int:
        """The number of rows; a vector is one row, or one row per number if it has an order."""
        shape = self.shape
        if len(shape) > 1:
            return int(np.prod(shape[:-1]))
        return shape[0] if self.row_order is not None else 1

    @property
    def _raw_tensor(self) -> LazyTensor:
        """Its bytes `[R, row bytes]`, in stored order."""
        shape = self.tensor_info.shape
        if len(shape) == 1 and self.row_order is not None:
            shape = (*shape, 1)  # each number is a row
        rows = int(np.prod(shape[:-1]))
        size = (rows, self.block.row_bytes(shape[-1]))
        return view_mapped_tensor(self.buffer, self.tensor_info.offset, np.uint8, size)

    def _read_raw_rows(self, rows: int) -> Iterator[np.ndarray]:
        """Yield its bytes in blocks of rows, in order; pages are released before the next block."""
        lying = self._raw_tensor
        if self.row_order is None:
            yield from lying.blocks(rows)
            return
        whole = lying.read()
        for begin in range(0, len(self.row_order), rows):
            yield whole[self.row_order[begin : begin + rows]]
        lying.release()


def pack_blocks(kind: IntFormat, data: np.ndarray, scale: np.ndarray, columns: int) -> np.ndarray:
    """Pack a leaf's pieces into rows of Q8_0 or Q4_0 `[R, row bytes]`, without rounding."""
    assert kind in (_EIGHT, _FOUR)
    count, rows = columns // BLOCK_SIZE, len(data)
    codes = (
        np.ascontiguousarray(data)
        .view(np.uint8)
        .reshape(rows, round_up(columns, CHUNK) // BLOCK_SIZE, -1)
    )
    scales = np.ascontiguousarray(scale).view(np.uint8).reshape(rows, -1, 2)
    made = np.concatenate([scales[:, :count], codes[:, :count]], axis=2)
    return made.reshape(rows, -1)
