"""Tensors that are read when they are wanted: in files, in memory, or made of others.

What reads, converts or quantizes passes these on, so that one block at a time is in memory.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

ROWS = 512  # of a tensor that are read at a time, where some of their columns are wanted


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is wanted: `read()` gives an array of `shape` and `dtype`.

    release: says that what was read has been copied, so that its memory may go. parts: `blocks` of
    a tensor of which less than the whole can be read; cut: `rows` of one. found: waits for what
    `first_non_finite` says of it, where that has been begun elsewhere.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    release: Callable[[], None] = lambda: None
    parts: Callable[[int], Iterator[np.ndarray]] | None = None
    found: Callable[[], int | None] | None = None
    cut: Callable[[int, int], "LazyTensor"] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, array: np.ndarray) -> "LazyTensor":
        """One that is in memory already."""
        return cls(array.dtype, array.shape, lambda: array)

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """`[..., I]` as blocks `[n, I]` of `rows` rows, the last of fewer, to be read in turn.

        A block's memory may go when the next is asked for: copy what is to stay.
        """
        if self.parts is not None:
            return self.parts(rows)
        whole = self.read()
        flat = whole.reshape(-1, self.columns) if whole.size else whole.reshape(0, self.columns)
        return (flat[begin : begin + rows] for begin in range(0, len(flat), rows))

    @property
    def columns(self) -> int:
        """I, the length of a row."""
        return self.shape[-1] if self.shape else 1

    def astype(self, dtype: np.dtype) -> "LazyTensor":
        """The same numbers in another format, converted when read."""
        return self if dtype == self.dtype else self.changed(dtype, lambda x, _: x.astype(dtype))

    def changed(
        self, dtype: np.dtype, change: Callable[[np.ndarray, int], np.ndarray]
    ) -> "LazyTensor":
        """The same shape with the numbers that `change(part, first)` makes of what is read.

        first: the flat index of the part's first number.
        """

        def parts(rows: int) -> Iterator[np.ndarray]:
            first = 0
            for block in self.blocks(rows):
                yield change(block, first)
                first += block.size

        return LazyTensor(dtype, self.shape, lambda: change(self.read(), 0), self.release, parts)

    def rows(self, begin: int, end: int) -> "LazyTensor":
        """Those along the first axis, from `begin` to before `end`."""
        if self.cut is not None:
            return self.cut(begin, end)
        shape = (end - begin, *self.shape[1:])
        return LazyTensor(self.dtype, shape, lambda: self.read()[begin:end], self.release)

    def columns_from(self, begin: int, end: int) -> "LazyTensor":
        """Those along the last axis, from `begin` to before `end`."""
        shape = (*self.shape[:-1], end - begin)

        def parts(rows: int) -> Iterator[np.ndarray]:
            return (block[:, begin:end] for block in self.blocks(rows))

        def read() -> np.ndarray:
            if self.parts is None:
                return self.read()[..., begin:end]
            return np.concatenate([*parts(ROWS)]).reshape(shape)

        return LazyTensor(self.dtype, shape, read, self.release, parts)

    def taken(self, index: np.ndarray) -> "LazyTensor":
        """Rows along the first axis by number."""
        shape = (len(index), *self.shape[1:])
        return LazyTensor(self.dtype, shape, lambda: self.read()[index], self.release)

    def transposed(self) -> "LazyTensor":
        """The matrix transposed, in row-major order, when read."""
        return LazyTensor(self.dtype, self.shape[::-1], lambda: np.ascontiguousarray(self.read().T))


def joined(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """One below the other along the first axis; of one format, and one shape but for that axis."""
    if len(tensors) == 1:
        return tensors[0]
    shape = (sum(t.shape[0] for t in tensors), *tensors[0].shape[1:])
    return _one_by_one(tensors, shape, lambda: np.concatenate([t.read() for t in tensors]))


def stacked(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Tensors of one format and shape as one, with an axis before theirs."""
    shape = (len(tensors), *tensors[0].shape)
    whole = _one_by_one(tensors, shape, lambda: np.stack([t.read() for t in tensors]))
    return dataclasses.replace(whole, cut=lambda begin, end: stacked(tensors[begin:end]))


def _one_by_one(
    tensors: Sequence[LazyTensor], shape: tuple[int, ...], read: Callable[[], np.ndarray]
) -> LazyTensor:
    """The tensor that several make, whose rows are theirs one after the other."""

    def parts(rows: int) -> Iterator[np.ndarray]:
        for tensor in tensors:
            yield from tensor.blocks(rows)

    def release() -> None:
        for tensor in tensors:
            tensor.release()

    # What has one axis is one row, and its parts would be shorter ones.
    return LazyTensor(tensors[0].dtype, shape, read, release, parts if len(shape) > 1 else None)
