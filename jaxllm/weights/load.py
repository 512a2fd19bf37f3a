"""Loads a parameter from a file in its stored format: block by block if that is another one.

A matrix that is kept unchanged is not copied. For any other tensor, memory holds only the result
and the block of rows that is being converted.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops.compile_cache import return_freed_memory
from jaxllm.weights.formats import Weight, parse_format
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import Params, Placement, put
from jaxllm.weights.safetensors import first_non_finite
from jaxllm.weights.types.arrays import DTYPES
from jaxllm.weights.types.base import BLOCK_ROWS

SMALL_TENSOR = 1 << 16  # bytes; nothing is gained by giving back what converting it took


class NotLocal:
    """Placeholder for a parameter of which this process has no part, until all are loaded."""


class ParamPlacer:
    """Places parameters as they are read, unsharded, where `place` says."""

    def __init__(self, place: Placement | None = None) -> None:
        self._place = place

    def is_local(self, path: str) -> bool:
        """Return whether this process has a part of the parameter at `path`, and so reads it."""
        return True

    def place_weight(self, path: str, weight: Weight) -> Weight:
        """Put the parameter at `path` in its place."""
        return put(weight, self._place, path)

    def place_adapter(self, path: str, weight: Weight) -> Weight:
        """Put an adapter in its place, beside a weight that is already placed."""
        return weight

    def finish(self, params: Params) -> Params:
        """Complete the parameters after the last one was placed."""
        return params

    def load_tensor(
        self,
        path: str,
        tensor: LazyTensor,
        read: Callable[[LazyTensor], Weight],
        sliceable_axes: tuple[int, ...],
    ) -> Weight:
        """Put in its place what `read` makes of a tensor.

        Args:
            sliceable_axes: the axes along which slicing commutes with `read`
                (`Format.sliceable_axes`).
        """
        return self.place_weight(path, read(tensor))


def read_weight(
    path: str,
    tensor: LazyTensor,
    formats: Sequence[str],
    complaints: list[str],
    *,
    passed: bool = False,
    search: Callable[[str, np.ndarray], None] | None = None,
) -> Weight:
    """Read the tensor in the last of `formats`, converted through those before it.

    Args:
        path: its name in complaints.
        formats: as `Precision.format_chain` returns them.
        complaints: gets a message for NaN or infinity, and for numbers that overflow a narrower
            dtype.
        passed: whether the stored numbers are known to be finite; converted numbers are checked
            nevertheless.
        search: gets the path and a matrix that is kept unchanged, instead of a search for NaN here.
    """
    name = formats[-1]
    unchanged = name == tensor.dtype.name and name in DTYPES
    # A mapped vector would keep up to 2 MB of its file in memory, with huge pages.
    if unchanged and tensor.ndim > 1:
        array = tensor.read()
        if search is not None:
            search(path, array)
        elif not passed:
            report_non_finite(path, array, first_non_finite(array), 0, complaints)
        return jax.device_put(array, may_alias=True)
    dtypes = [np.dtype(DTYPES[n]) for n in formats if n in DTYPES]
    leaf: Weight = parse_format(name).quantize_blocks(
        tensor.shape,
        lambda: _read_blocks(path, tensor, dtypes, complaints, passed=passed and unchanged),
    )
    if tensor.nbytes > SMALL_TENSOR:
        return_freed_memory()  # blocks of temporary arrays
    return leaf


def _read_blocks(
    path: str,
    tensor: LazyTensor,
    dtypes: Sequence[np.dtype],
    complaints: list[str],
    *,
    passed: bool,
) -> Iterator[np.ndarray]:
    """Yield blocks of the tensor's rows in the last of `dtypes`; float64 becomes float32 first.

    passed: whether the stored numbers are known to be finite.
    """
    done = 0
    for block in tensor.blocks(BLOCK_ROWS):
        bad = None if passed else first_non_finite(block)
        report_non_finite(path, block, bad, done, complaints)
        done += block.size
        if block.dtype == np.float64:
            block = block.astype(np.float32)
        for dtype in dtypes:
            if dtype == np.float32:
                break  # the caller widens them
            narrower = jnp.finfo(dtype).max < jnp.finfo(block.dtype).max
            block = np.asarray(jax.device_put(block, may_alias=True).astype(dtype))
            if narrower and bad is None and first_non_finite(block) is not None:
                _add_once(complaints, f"{path} overflows {dtype} (largest {jnp.finfo(dtype).max})")
        yield block


def report_non_finite(
    path: str, block: np.ndarray, bad: int | None, first: int, complaints: list[str]
) -> None:
    """Report, once, a number that is not finite. `first` is the index of the block's first."""
    if bad is not None and not any(text.startswith(f"{path} holds ") for text in complaints):
        complaints.append(f"{path} holds {block.reshape(-1)[bad]} at index {first + bad}")


def _add_once(complaints: list[str], text: str) -> None:
    """Add a complaint once: blocks may be read twice."""
    if text not in complaints:
        complaints.append(text)
