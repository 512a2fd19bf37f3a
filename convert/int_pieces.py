"""Pieces of integer leaves from the integers, scales and zero points of a checkpoint."""

from collections.abc import Callable

import numpy as np

from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.types import bitpack
from jaxllm.weights.types.base import round_up
from jaxllm.weights.types.int_weight import IntFormat

Read = Callable[[], np.ndarray]
SCALE_DTYPES = ("float16", "bfloat16", "float32")


def make_pieces(
    kind: IntFormat, shape: tuple[int, int], group: int, codes: Read, scales: Read, zeros: Read
) -> dict[str, LazyTensor]:
    """Return the pieces of a leaf `[O, I]`, computed when they are read.

    Args:
        group: The columns that share a scale in the checkpoint.
        codes: Reads the unsigned integers, uint8 `[O, I]`.
        scales, zeros: Read a number for each of the checkpoint's groups, `[O or 1, G]`.
    """
    (rows, columns), expected = shape, kind.array_specs(shape)
    size = kind.group_size(columns)
    count = -(-columns // size)

    def repeat_groups(numbers: np.ndarray, name: str) -> np.ndarray:
        """Repeat the values of the checkpoint's groups for ours; padding groups are 0."""
        padded = np.zeros([n or 0 for n in expected[name][0]], expected[name][1])
        padded[:, :count] = np.repeat(numbers, -(-group // size), axis=1)[:, :count]
        return padded

    def read_data() -> np.ndarray:
        numbers = codes()
        if kind.code_dtype == np.int8:  # code 128 becomes 0
            numbers = (numbers ^ np.uint8(128)).view(np.int8)
        padded = np.full((rows, round_up(columns, bitpack.CHUNK)), kind.zero_code, numbers.dtype)
        if kind.zero_point:  # pad with the code of zero
            padded = np.repeat(repeat_groups(zeros(), ".zero"), size, axis=1)
        padded[:, :columns] = numbers
        packed: np.ndarray = bitpack.pack_codes(padded, kind.bits)
        return packed

    reads = {
        ".data": read_data,
        ".scale": lambda: repeat_groups(scales(), ".scale"),
        ".zero": lambda: repeat_groups(zeros(), ".zero"),
    }
    return {
        name: LazyTensor(np.dtype(dtype), tuple(n or 0 for n in form), reads[name])
        for name, (form, dtype) in expected.items()
    }
