"""Lazy tensors: read when needed, from files, from memory or computed from others.

Reading, conversion and quantization pass them on, so only one block at a time is in memory.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

BLOCK_ROWS = 512  # rows that are read at a time if only some of their columns are needed


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when needed: `read()` returns an array of `shape` and `dtype`."""

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    release: Callable[[], None] = lambda: None  # what was read is copied; its memory may be freed
    read_blocks: Callable[[int], Iterator[np.ndarray]] | None = (
        None  # `blocks`, if partial reads work
    )
    slice_rows: Callable[[int, int], "LazyTensor"] | None = None  # `rows`, if partial reads work

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def from_array(cls, array: np.ndarray) -> "LazyTensor":
        """Wrap an array that is in memory."""
        return cls(array.dtype, array.shape, lambda: array)

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """Yield `[..., I]` in order as blocks `[n, I]` of `rows` rows, the last one shorter.

        A block's memory may be freed when the next one is read: copy what you keep.
        """
        if self.read_blocks is not None:
            return self.read_blocks(rows)
        array = self.read()
        flat = array.reshape(-1, self.columns) if array.size else array.reshape(0, self.columns)
        return (flat[begin : begin + rows] for begin in range(0, len(flat), rows))

    @property
    def columns(self) -> int:
        """I, the length of a row."""
        return self.shape[-1] if self.shape else 1

    def astype(self, dtype: np.dtype) -> "LazyTensor":
        """Convert to another dtype, when read."""
        return self if dtype == self.dtype else self.map_blocks(dtype, lambda x, _: x.astype(dtype))

    def map_blocks(
        self, dtype: np.dtype, function: Callable[[np.ndarray, int], np.ndarray]
    ) -> "LazyTensor":
        """Apply `function(part, first)` to what is read; the shape stays.

        Args:
            function: gets an array and the flat index of its first number.
        """

        def parts(rows: int) -> Iterator[np.ndarray]:
            first = 0
            for block in self.blocks(rows):
                yield function(block, first)
                first += block.size

        return LazyTensor(dtype, self.shape, lambda: function(self.read(), 0), self.release, parts)

    def rows(self, begin: int, end: int) -> "LazyTensor":
        """Slice the first axis."""
        if self.slice_rows is not None:
            return self.slice_rows(begin, end)
        shape = (end - begin, *self.shape[1:])
        return LazyTensor(self.dtype, shape, lambda: self.read()[begin:end], self.release)

    def unstack(self) -> list["LazyTensor"]:
        """Return the tensors along the first axis, of which each is read alone."""

        def take(one: LazyTensor) -> LazyTensor:
            return LazyTensor(self.dtype, self.shape[1:], lambda: one.read()[0], one.release)

        return [take(self.rows(i, i + 1)) for i in range(self.shape[0])]

    def slice_columns(self, begin: int, end: int) -> "LazyTensor":
        """Slice the last axis."""
        shape = (*self.shape[:-1], end - begin)

        def parts(rows: int) -> Iterator[np.ndarray]:
            return (block[:, begin:end] for block in self.blocks(rows))

        def read() -> np.ndarray:
            if self.read_blocks is None:
                return self.read()[..., begin:end]
            return np.concatenate([*parts(BLOCK_ROWS)]).reshape(shape)

        return LazyTensor(self.dtype, shape, read, self.release, parts)

    def take_rows(self, index: np.ndarray) -> "LazyTensor":
        """Take rows along the first axis by index."""
        shape = (len(index), *self.shape[1:])
        return LazyTensor(self.dtype, shape, lambda: self.read()[index], self.release)

    def transpose(self) -> "LazyTensor":
        """Transpose a matrix, in row-major order, when read."""
        return LazyTensor(self.dtype, self.shape[::-1], lambda: np.ascontiguousarray(self.read().T))


def concat_tensors(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Concatenate along the first axis tensors of one dtype whose other axes are equal."""
    if len(tensors) == 1:
        return tensors[0]
    shape = (sum(t.shape[0] for t in tensors), *tensors[0].shape[1:])
    return _chain_blocks(tensors, shape, lambda: np.concatenate([t.read() for t in tensors]))


def stack_tensors(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Stack tensors of one dtype and shape along a new first axis."""
    shape = (len(tensors), *tensors[0].shape)
    whole = _chain_blocks(tensors, shape, lambda: np.stack([t.read() for t in tensors]))
    return dataclasses.replace(
        whole, slice_rows=lambda begin, end: stack_tensors(tensors[begin:end])
    )


def _chain_blocks(
    tensors: Sequence[LazyTensor], shape: tuple[int, ...], read: Callable[[], np.ndarray]
) -> LazyTensor:
    """Make one tensor of several, whose rows follow one another."""

    def parts(rows: int) -> Iterator[np.ndarray]:
        for tensor in tensors:
            yield from tensor.blocks(rows)

    def release() -> None:
        for tensor in tensors:
            tensor.release()

    # A tensor with one axis is one row, and its blocks would be shorter rows.
    return LazyTensor(tensors[0].dtype, shape, read, release, parts if len(shape) > 1 else None)
