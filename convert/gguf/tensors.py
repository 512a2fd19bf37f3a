"""Tensors of a GGUF file as lazy tensors: dequantized, or as the pieces of an exact leaf.

For every quantized type there is a leaf that represents its numbers exactly and has kernels for
products. Q4_K, Q5_K and Q6_K keep their blocks (`q4_k`, ...). Q8_0 and Q4_0 are integers in groups
of 32 with float16 scales, Q4_0 in the same bytes; Q5_0's 5-bit codes take 8 bits. Q4_1 and Q5_1 add
a number per group (`offset/...`). The types of `more_types` have a scale per 16 or 32 columns,
except Q2_K, which becomes float32: no leaf has offsets per 16 columns. On a CPU, the kernels read
the blocks of most types where they lie (`to_blocks`).
"""

import dataclasses
import mmap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxllm.convert.gguf.blocks import BLOCK_SIZE, ReadBlocks, TensorType
from jaxllm.convert.gguf.header import TensorInfo
from jaxllm.convert.gguf.more_types import MORE_TYPES
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.safetensors import ALIGNMENT, empty_aligned, view_mapped_tensor
from jaxllm.weights.types import mxfp4
from jaxllm.weights.types.base import BLOCK_ROWS, Format, PartialShape, round_up
from jaxllm.weights.types.bitpack import CHUNK
from jaxllm.weights.types.block_weight import BLOCK_TYPES, fits_in_place
from jaxllm.weights.types.int_weight import IntFormat
from jaxllm.weights.types.super_blocks import SUPER_BLOCKS

_EIGHT, _FOUR = (IntFormat(bits, BLOCK_SIZE, scale_dtype="float16") for bits in (8, 4))


class LeafRecipe(NamedTuple):
    """The format of an exact leaf for a type.

    Attributes:
        read_packed: Reads the bytes of 4-bit codes as the leaf packs them: columns i and i + 16 of
            32 share one. None: the leaf has a byte per code.
        padding_byte: The byte of codes in padding columns, which stand for zero.
    """

    format: IntFormat
    read_packed: ReadBlocks | None = None
    padding_byte: int = 0

    def read_piece(self, block: TensorType, name: str, blocks: np.ndarray) -> np.ndarray:
        """Return the numbers of a piece `[n, k]`, from blocks uint8 `[n, nbytes]`."""
        assert block.read_codes is not None
        assert block.read_scales is not None
        match name.rpartition(".")[2]:
            case "data":
                packed = self.read_packed
                return packed(blocks) if packed else block.read_codes(blocks).view(np.uint8)
            case "offset":
                assert block.read_offsets is not None
                return block.read_offsets(blocks)
            case "first":  # of every two runs
                return block.read_scales(blocks)[:, 0::2]
            case "second":
                return block.read_scales(blocks)[:, 1::2]
        stored = np.dtype(self.format.scale_dtype)
        if stored != np.float32:  # a block's first number: copied, not converted
            return blocks[:, : stored.itemsize].view(stored)
        return block.read_scales(blocks)


def _with_offset(integer: IntFormat) -> IntFormat:
    return dataclasses.replace(integer, has_offset=True)


_FOUR_UP = IntFormat(4, BLOCK_SIZE, zero_point=True)  # codes from 0; the offset does the rest
LEAVES: Mapping[str, LeafRecipe] = {
    "Q8_0": LeafRecipe(_EIGHT),
    "Q4_0": LeafRecipe(_FOUR, lambda blocks: blocks[:, 2:], 0x88),
    "Q5_0": LeafRecipe(_EIGHT),
    "Q4_1": LeafRecipe(
        _with_offset(dataclasses.replace(_FOUR_UP, scale_dtype="float16")),
        lambda blocks: blocks[:, 4:],
    ),
    "Q5_1": LeafRecipe(_with_offset(_EIGHT)),
    "MXFP4": LeafRecipe(mxfp4.FORMAT, lambda blocks: blocks[:, 1:]),
    **{row.name: LeafRecipe(IntFormat(8, row.run)) for row in MORE_TYPES if not row.read_offsets},
}


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a mapped file.

    Attributes:
        row_order: The stored row for each row to read, of a stack of matrices too; None: all rows
            in stored order.
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
        stacks = int(np.prod(shape[:-2]))
        rows = (*shape[:-2], len(self.row_order) // stacks)
        return (*rows, shape[-1]) if len(shape) > 1 else rows

    @property
    def block(self) -> TensorType:
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

    def to_blocks(self) -> LazyTensor | None:
        """Return its bytes as a `BlockWeight` holds them, or None if that cannot be.

        They lie in the mapped file; those of reordered rows are copied from it.
        """
        info = self.tensor_info
        if self.weight_offset or not fits_in_place(self.block.name, self.shape):
            return None
        if self.row_order is not None:
            return self._to_bytes()
        before = info.offset % ALIGNMENT
        size = before + info.shape[0] * self.block.row_bytes(info.shape[1])
        return view_mapped_tensor(self.buffer, info.offset - before, np.uint8, (size,))

    def to_leaf(self) -> tuple[Format, dict[str, LazyTensor]] | None:
        """Return the format and the pieces of an exact leaf, or None if there is none."""
        reader = LEAVES.get(self.block.name)
        if len(self.shape) < 2 or self.weight_offset:
            return None
        if self.block.name in SUPER_BLOCKS:
            return BLOCK_TYPES[self.block.name].format, {".blocks": self._to_bytes()}
        if reader is None:
            return None
        expected = reader.format.array_specs(self.shape)
        return reader.format, {
            name: self._make_piece(reader, name, *expected[name]) for name in expected
        }

    def _make_piece(
        self, reader: LeafRecipe, name: str, shape: PartialShape, dtype: Any
    ) -> LazyTensor:
        size, held = tuple(n or 0 for n in shape), np.dtype(dtype)
        if name.endswith(".zero"):  # codes are from 0; the offset does the rest
            return LazyTensor(held, size, lambda: empty_aligned(size, held, zeroed=True))
        empty = reader.padding_byte if name.endswith(".data") else 0

        def read() -> np.ndarray:
            array = empty_aligned(size, held)
            rows, done = array.reshape(self._row_count, -1), 0
            if held.itemsize == 1:
                rows = rows.view(np.uint8)
            for raw in self._read_raw_rows(BLOCK_ROWS):
                blocks = np.ascontiguousarray(raw).reshape(-1, self.block.nbytes)
                piece = reader.read_piece(self.block, name, blocks)  # often a view, copied once
                piece = piece.reshape(len(raw), -1, piece.shape[1])
                into = rows[done : done + len(raw)].reshape(len(raw), -1, piece.shape[2])
                count = piece.shape[1]
                into[:, count:] = empty
                if (
                    piece.dtype == into.dtype
                    and piece.strides[2] == piece.itemsize < piece[0, 0].nbytes
                ):
                    void = np.dtype((np.void, piece.shape[2] * piece.itemsize))
                    into, piece = into.view(void), piece.view(void)  # a copy per block, not number
                into[:, :count] = piece
                done += len(raw)
            return array

        return LazyTensor(held, size, read, self._raw_tensor.release)

    def _to_bytes(self) -> LazyTensor:
        """Return the bytes of all rows, in their order, `[..., O, row bytes]`."""
        size = (*self.shape[:-1], self.block.row_bytes(self.shape[-1]))
        order = self.row_order
        if order is None:
            return view_mapped_tensor(self.buffer, self.tensor_info.offset, np.uint8, size)

        def read() -> np.ndarray:
            array = empty_aligned(size, np.uint8)
            np.take(self._raw_tensor.read(), order, axis=0, out=array.reshape(len(order), -1))
            return array

        return LazyTensor(np.dtype(np.uint8), size, read, self._raw_tensor.release)

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
        raw = lying.read()
        for begin in range(0, len(self.row_order), rows):
            yield raw[self.row_order[begin : begin + rows]]
        lying.release()


def pack_blocks(kind: IntFormat, data: np.ndarray, scale: np.ndarray, columns: int) -> np.ndarray:
    """Pack a leaf's pieces into rows of Q8_0, Q4_0 or MXFP4 `[R, row bytes]`, without rounding."""
    assert kind in (_EIGHT, _FOUR, mxfp4.FORMAT)
    count, rows = columns // BLOCK_SIZE, len(data)
    codes = (
        np.ascontiguousarray(data)
        .view(np.uint8)
        .reshape(rows, round_up(columns, CHUNK) // BLOCK_SIZE, -1)
    )
    scale = np.ascontiguousarray(scale)
    scales = scale.view(np.uint8).reshape(rows, -1, scale.itemsize)
    blocks = np.concatenate([scales[:, :count], codes[:, :count]], axis=2)
    return blocks.reshape(rows, -1)
