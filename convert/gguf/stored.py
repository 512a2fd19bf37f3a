"""A tensor of a GGUF file as lazy tensors: its numbers, or the pieces of a leaf of the same ones.

What is quantized with a float16 scale for each 32 columns, symmetric about 0, is a leaf of ours as
it is: Q8_0 and Q5_0 in 8 bits, Q4_0 in 4, whose bytes are even the same. Q5_0 has codes of 5 bits,
for which there is no kernel, so it takes 8. All others become float32, which is exact. Q4_1, Q5_1
and the K types but Q6_K take a number of any size from what a code is times, where our zero points
are whole steps; Q6_K has a scale for each 16 columns, and our groups are of 32 and more.
"""

import dataclasses
import mmap
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxllm.weights.files import ALIGNMENT, LazyTensor, aligned, mapped_at
from jaxllm.weights.leaves.digits import CHUNK
from jaxllm.weights.leaves.integers import Integer
from jaxllm.weights.leaves.leaf import ROWS, up

from .blocks import SMALL, Block
from .header import Entry

_HALF = np.dtype(np.float16)
_EIGHT, _FOUR = Integer(8, SMALL, scale="float16"), Integer(4, SMALL, scale="float16")
LEAVES: Mapping[str, Integer] = {"Q8_0": _EIGHT, "Q5_0": _EIGHT, "Q4_0": _FOUR}
_EMPTY = {"Q8_0": 0, "Q5_0": 0, "Q4_0": 0x88}  # the bytes of codes that stand for zero


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor where it lies. order: of its rows, for each that is wanted the number of one there;
    None: as they are. plus: what its numbers have too much.
    """

    whole: mmap.mmap
    entry: Entry
    order: np.ndarray | None = None
    plus: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        shape = self.entry.shape
        if self.order is None:
            return shape
        return (len(self.order), shape[-1]) if len(shape) > 1 else (len(self.order),)

    @property
    def block(self) -> Block:
        return self.entry.block

    def numbers(self) -> LazyTensor:
        """Its numbers, in the format that it has them in, or in float32."""
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
            if self.entry.begin % ALIGNMENT == 0:  # XLA can use it as it lies
                return lying
            return dataclasses.replace(lying, read=read)
        apart = parts if len(shape) > 1 else None
        return LazyTensor(dtype, shape, read, self._lying.release, apart)

    def leaf(self) -> tuple[Integer, dict[str, LazyTensor]] | None:
        """The format of a leaf that holds the same numbers, and its pieces; None: there is none."""
        kind = LEAVES.get(self.block.name)
        if kind is None or len(self.shape) < 2 or self.plus:
            return None
        (data, held), (scale, _) = kind.expected(self.shape).values()
        sizes = [tuple(n or 0 for n in size) for size in (data, scale)]

        def codes() -> np.ndarray:
            array = aligned(sizes[0], np.uint8)
            self._fill(array, _EMPTY[self.block.name], self._codes)
            return array.view(held)

        def scales() -> np.ndarray:
            array = aligned(sizes[1], _HALF)
            self._fill(array, 0, lambda blocks: np.ascontiguousarray(blocks[..., :2]).view(_HALF))
            return array

        release = self._lying.release
        return kind, {
            ".data": LazyTensor(np.dtype(held), sizes[0], codes, release),
            ".scale": LazyTensor(_HALF, sizes[1], scales, release),
        }

    def _codes(self, blocks: np.ndarray) -> np.ndarray:
        """The bytes of a leaf's codes, of blocks `[n, B, nbytes]`."""
        if self.block.name != "Q5_0":
            return blocks[..., 2:]
        low, bits = blocks[..., 6:], np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
        codes = np.concatenate([low & 15, low >> 4], axis=-1) | bits << 4
        return codes - np.uint8(16)  # modulo 256: an int8's bytes

    def _fill(
        self, array: np.ndarray, empty: int, part: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Rows of an array, from what `part` makes of blocks; what columns it has more is empty."""
        flat, done = array.reshape(self._rows, -1), 0
        for raw in self._raw(ROWS):
            made = part(raw.reshape(len(raw), -1, self.block.nbytes)).reshape(len(raw), -1)
            flat[done : done + len(raw), : made.shape[1]] = made
            flat[done : done + len(raw), made.shape[1] :] = empty
            done += len(raw)

    @property
    def _rows(self) -> int:
        """How many rows of whole blocks; a vector is one, or one a number where they have order."""
        shape = self.shape
        if len(shape) > 1:
            return int(np.prod(shape[:-1]))
        return shape[0] if self.order is not None else 1

    @property
    def _lying(self) -> LazyTensor:
        """Its bytes `[R, row bytes]`, rows as they lie."""
        shape = self.entry.shape
        if len(shape) == 1 and self.order is not None:
            shape = (*shape, 1)  # a vector of numbers, each a row
        rows = int(np.prod(shape[:-1]))
        size = (rows, self.block.row_bytes(shape[-1]))
        return mapped_at(self.whole, self.entry.begin, np.uint8, size)

    def _raw(self, rows: int) -> Iterator[np.ndarray]:
        """Its bytes, so many rows at a time, in order; pages go when the next are asked for."""
        lying = self._lying
        if self.order is None:
            yield from lying.blocks(rows)
            return
        whole = lying.read()
        for begin in range(0, len(self.order), rows):
            yield whole[self.order[begin : begin + rows]]
        lying.release()


def blocks_of(kind: Integer, data: np.ndarray, scale: np.ndarray, columns: int) -> np.ndarray:
    """The rows of Q8_0 or Q4_0 `[R, row bytes]` that a leaf's pieces are, without a change."""
    assert kind in (_EIGHT, _FOUR)
    count, rows = columns // SMALL, len(data)
    codes = np.ascontiguousarray(data).view(np.uint8).reshape(rows, up(columns, CHUNK) // SMALL, -1)
    scales = np.ascontiguousarray(scale).view(np.uint8).reshape(rows, -1, 2)
    made = np.concatenate([scales[:, :count], codes[:, :count]], axis=2)
    return made.reshape(rows, -1)
