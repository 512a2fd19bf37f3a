"""A parameter from a file, in the format that it is kept in: block by block where that is another.

Of a tensor that is kept as it lies nothing is copied. Of any other there is never more in memory
than what has been made of it and the block of rows that is being changed.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.weights.files import first_non_finite
from jaxllm.weights.formats import Weight, parse
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.leaves.arrays import DTYPES
from jaxllm.weights.leaves.leaf import ROWS
from jaxllm.weights.paths import Params, Place, put


class Elsewhere:
    """In the place of a parameter of which this process has nothing, until all have come."""


class Whole:
    """Where parameters go as they are read: each of them whole, where `place` says."""

    def __init__(self, place: Place | None = None) -> None:
        self._place = place

    def here(self, path: str) -> bool:
        """Whether this process has anything of the parameter at `path`; others read what it has
        not.
        """
        return True

    def leaf(self, path: str, weight: Weight) -> Weight:
        """The parameter at `path`, where it is to be."""
        return put(weight, self._place, path)

    def beside(self, path: str, weight: Weight) -> Weight:
        """The same of one that has come, now that something may stand beside it (an adapter)."""
        return weight

    def finished(self, params: Params) -> Params:
        """All parameters, when the last has come."""
        return params

    def tensor(
        self,
        path: str,
        tensor: LazyTensor,
        read: Callable[[LazyTensor], Weight],
        apart: tuple[int, ...],
    ) -> Weight:
        """The same of what `read` makes of a tensor. apart: the axes along which it makes of a part
        of it the part of what it makes of all of it (`formats.apart`).
        """
        return self.leaf(path, read(tensor))


def read_leaf(
    path: str, tensor: LazyTensor, formats: Sequence[str], complaints: list[str]
) -> Weight:
    """The tensor in the last of `formats`, after those before it (`Precision.formats_at`).

    complaints: what is wrong with its numbers is added: NaN or infinity, or too large for a
    narrower format. path: the name in them.
    """
    name = formats[-1]
    if name == tensor.dtype.name and name in DTYPES:
        array = tensor.read()
        bad = tensor.found() if tensor.found else first_non_finite(array)
        _complain(path, array, bad, 0, complaints)
        return jax.device_put(array, may_alias=True)
    dtypes = [np.dtype(DTYPES[n]) for n in formats if n in DTYPES]
    leaf: Weight = parse(name).collect(
        tensor.shape, lambda: _numbers(path, tensor, dtypes, complaints)
    )
    return leaf


def _numbers(
    path: str, tensor: LazyTensor, dtypes: Sequence[np.dtype], complaints: list[str]
) -> Iterator[np.ndarray]:
    """Blocks of its rows in the last of `dtypes`; what is float64 becomes float32 first."""
    done = 0
    for block in tensor.blocks(ROWS):
        bad = first_non_finite(block)
        _complain(path, block, bad, done, complaints)
        done += block.size
        if block.dtype == np.float64:
            block = block.astype(np.float32)
        for dtype in dtypes:
            if dtype == np.float32:
                break  # what takes the numbers widens them
            narrower = jnp.finfo(dtype).max < jnp.finfo(block.dtype).max
            block = np.asarray(jax.device_put(block, may_alias=True).astype(dtype))
            if narrower and bad is None and first_non_finite(block) is not None:
                _once(complaints, f"{path} overflows {dtype} (largest {jnp.finfo(dtype).max})")
        yield block


def _complain(
    path: str, block: np.ndarray, bad: int | None, first: int, complaints: list[str]
) -> None:
    """Say, once, that a number is not finite. first: the index of the block's first."""
    if bad is not None and not any(text.startswith(f"{path} holds ") for text in complaints):
        complaints.append(f"{path} holds {block.reshape(-1)[bad]} at index {first + bad}")


def _once(complaints: list[str], text: str) -> None:
    """Blocks may be read twice."""
    if text not in complaints:
        complaints.append(text)
