"""Tensors of a GGUF file as lazy tensors: dequantized, or as the pieces of an exact leaf.

For every quantized type there is a leaf that represents its numbers exactly and has kernels for
products. Q8_0 and Q4_0 are integers in groups of 32 with float16 scales, Q4_0 in the same bytes;
Q5_0's 5-bit codes take 8 bits. Q4_1, Q5_1, Q4_K and Q5_K add a number per group (`offset`). Q6_K
has a scale per 16 columns (`fine`).
"""

import dataclasses
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxllm.weights.files import ALIGNMENT, aligned, mapped_at
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.leaves.digits import CHUNK
from jaxllm.weights.leaves.fine import FineFormat
from jaxllm.weights.leaves.integers import Integer
from jaxllm.weights.leaves.leaf import ROWS, Format, Shape, up
from jaxllm.weights.leaves.offset import OffsetFormat

from .blocks import SMALL, SUPER, Block, fifth_bits, runs, scaled, six_bit_codes
from .header import Entry

_HALF = np.dtype(np.float16)
_EIGHT, _FOUR = Integer(8, SMALL, scale="float16"), Integer(4, SMALL, scale="float16")
Part = Callable[[np.ndarray], np.ndarray]  # blocks [n, nbytes] to the numbers of a piece [n, k]


class Kept(NamedTuple):
    """The format of an exact leaf for a type, and the functions that compute its pieces.

    empty: The byte of codes in padding columns, which stand for zero.
    """

    format: Format
    parts: Mapping[str, Part]
    empty: int = 0


def _scale(begin: int) -> Part:
    return lambda blocks: np.ascontiguousarray(blocks[:, begin : begin + 2]).view(_HALF)


def _five_bits(begin: int, less: int) -> Part:
    """Return a reader of 5-bit codes minus `less`; four bytes of fifth bits come first."""

    def part(blocks: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little")
        low = blocks[:, begin + 4 :]
        codes = np.concatenate([low & 15, low >> 4], axis=1) | bits << 4
        return codes - np.uint8(less)  # modulo 256: the bytes of int8

    return part


def _halves(codes: np.ndarray) -> np.ndarray:
    """Pack 4-bit codes `[n, 8, 32]` into bytes: columns i and i + 16 share one."""
    return (codes[..., :16] | codes[..., 16:] << 4).reshape(len(codes), -1)


def _none(count: int) -> Part:
    return lambda blocks: np.zeros((len(blocks), count), np.uint8)


def _six_scales(first: int) -> Part:
    """Return a reader of every other one of Q6_K's 16 scales."""

    def part(blocks: np.ndarray) -> np.ndarray:
        whole = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)[:, first::2]
        return whole * np.ascontiguousarray(blocks[:, 208:]).view(_HALF).astype(np.float32)

    return part


def _offset(integer: Integer, data: Part, scale: Part, offset: Part, count: int) -> Kept:
    parts = {".offset": offset, ".weight.data": data, ".weight.scale": scale}
    if integer.zero_point:
        parts[".weight.zero"] = _none(count)
    return Kept(OffsetFormat(integer), parts)


_FOUR_UP = Integer(4, SMALL, zero_point=True)  # codes from 0; the offset does the rest
LEAVES: Mapping[str, Kept] = {
    "Q8_0": Kept(_EIGHT, {".data": lambda blocks: blocks[:, 2:], ".scale": _scale(0)}),
    "Q4_0": Kept(_FOUR, {".data": lambda blocks: blocks[:, 2:], ".scale": _scale(0)}, 0x88),
    "Q5_0": Kept(_EIGHT, {".data": _five_bits(2, 16), ".scale": _scale(0)}),
    "Q4_1": _offset(
        dataclasses.replace(_FOUR_UP, scale="float16"), lambda b: b[:, 4:], _scale(0), _scale(2), 1
    ),
    "Q5_1": _offset(_EIGHT, _five_bits(4, 0), _scale(0), _scale(2), 1),
    "Q4_K": _offset(
        _FOUR_UP,
        lambda blocks: _halves(runs(blocks[:, 16:])),
        lambda blocks: scaled(blocks)[0],
        lambda blocks: -scaled(blocks)[1],
        8,
    ),
    "Q5_K": _offset(
        Integer(8, SMALL),
        lambda blocks: (runs(blocks[:, 48:]) | fifth_bits(blocks[:, 16:48])).reshape(-1, SUPER),
        lambda blocks: scaled(blocks)[0],
        lambda blocks: -scaled(blocks)[1],
        8,
    ),
    "Q6_K": Kept(
        FineFormat(),
        {
            ".data": lambda blocks: six_bit_codes(blocks) - np.uint8(32),
            ".first": _six_scales(0),
            ".second": _six_scales(1),
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a mapped file.

    Attributes:
        order: The stored row for each row to read; None: all rows in stored order.
        plus: A number to subtract from the stored ones.
    """

    whole: mmap.mmap
    entry: Entry
    order: np.ndarray | None = None
    plus: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape after reordering."""
        shape = self.entry.shape
        if self.order is None:
            return shape
        return (len(self.order), shape[-1]) if len(shape) > 1 else (len(self.order),)

    @property
    def block(self) -> Block:
        return self.entry.block

    def numbers(self) -> LazyTensor:
        """Return the numbers, dequantized to float32 if quantized, else in their own dtype."""
        block, shape = self.block, self.shape
        dtype = np.dtype(np.float32) if block.dtype is None else block.dtype
        if self.plus:
            dtype = np.dtype(np.float32)

        def change(rows: np.ndarray) -> np.ndarray:
            if self.plus:
                return block.dequantized(rows) - np.float32(self.plus)
            if block.dtype is None:
                return block.dequantized(rows)
            return np.ascontiguousarray(rows).view(block.dtype)

        def read() -> np.ndarray:
            array = aligned(shape, dtype)
            flat, done = array.reshape(self._rows, -1), 0
            for part in self._raw(ROWS):
                numbers = change(part)
                flat[done : done + len(numbers)] = numbers
                done += len(numbers)
            return array

        def parts(rows: int) -> Iterator[np.ndarray]:
            return (change(part) for part in self._raw(rows))

        if block.dtype is not None and self.order is None and not self.plus:
            lying = mapped_at(self.whole, self.entry.begin, dtype, shape)
            if self.entry.begin % ALIGNMENT == 0:  # XLA can use it without a copy
                return lying
            return dataclasses.replace(lying, read=read)
        apart = parts if len(shape) > 1 else None
        return LazyTensor(dtype, shape, read, self._lying.release, apart)

    def leaf(self) -> tuple[Format, dict[str, LazyTensor]] | None:
        """Return the format and the pieces of an exact leaf, or None if there is none."""
        kept = LEAVES.get(self.block.name)
        if kept is None or len(self.shape) < 2 or self.plus:
            return None
        expected = kept.format.expected(self.shape)
        return kept.format, {name: self._piece(kept, name, *expected[name]) for name in expected}

    def _piece(self, kept: Kept, name: str, shape: Shape, dtype: Any) -> LazyTensor:
        size, held = tuple(n or 0 for n in shape), np.dtype(dtype)
        empty = kept.empty if name.endswith(".data") else 0

        def read() -> np.ndarray:
            array = aligned(size, held)
            rows, done = array.reshape(self._rows, -1), 0
            if held.itemsize == 1:
                rows = rows.view(np.uint8)
            for raw in self._raw(ROWS):
                blocks = np.ascontiguousarray(raw).reshape(-1, self.block.nbytes)
                made = kept.parts[name](blocks)  # per block; often a view, so copied only once
                made = made.reshape(len(raw), -1, made.shape[1])
                into = rows[done : done + len(raw)].reshape(len(raw), -1, made.shape[2])
                into[:, : made.shape[1]], into[:, made.shape[1] :] = made, empty
                done += len(raw)
            return array

        return LazyTensor(held, size, read, self._lying.release)

    @property
    def _rows(self) -> int:
        """The number of rows; a vector is one row, or one row per number if it has an order."""
        shape = self.shape
        if len(shape) > 1:
            return int(np.prod(shape[:-1]))
        return shape[0] if self.order is not None else 1

    @property
    def _lying(self) -> LazyTensor:
        """Its bytes `[R, row bytes]`, in stored order."""
        shape = self.entry.shape
        if len(shape) == 1 and self.order is not None:
            shape = (*shape, 1)  # each number is a row
        rows = int(np.prod(shape[:-1]))
        size = (rows, self.block.row_bytes(shape[-1]))
        return mapped_at(self.whole, self.entry.begin, np.uint8, size)

    def _raw(self, rows: int) -> Iterator[np.ndarray]:
        """Yield its bytes in blocks of rows, in order; pages are released before the next block."""
        lying = self._lying
        if self.order is None:
            yield from lying.blocks(rows)
            return
        whole = lying.read()
        for begin in range(0, len(self.order), rows):
            yield whole[self.order[begin : begin + rows]]
        lying.release()


def blocks_of(kind: Integer, data: np.ndarray, scale: np.ndarray, columns: int) -> np.ndarray:
    """Pack a leaf's pieces into rows of Q8_0 or Q4_0 `[R, row bytes]`, without rounding."""
    assert kind in (_EIGHT, _FOUR)
    count, rows = columns // SMALL, len(data)
    codes = np.ascontiguousarray(data).view(np.uint8).reshape(rows, up(columns, CHUNK) // SMALL, -1)
    scales = np.ascontiguousarray(scale).view(np.uint8).reshape(rows, -1, 2)
    made = np.concatenate([scales[:, :count], codes[:, :count]], axis=2)
    return made.reshape(rows, -1)
