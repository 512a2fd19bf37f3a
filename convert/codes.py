"""Integers as GPTQ and AWQ files pack them into int32 words, as one number each.

GPTQ (AutoGPTQ's `QuantLinear.pack`) packs along an axis of the words, the first number in the
lowest bits and every next one above it; of 3 bits a number may begin in one word and end in the
next, 32 of them in three words. AWQ (AutoAWQ's `WQLinear_GEMM`) packs eight numbers of 4 bits along
the last axis, columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up.
"""

import numpy as np

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word columns 0, 1, ... 7 are


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """GPTQ's int32 `[R, W]` as uint8 `[R, 32 W / bits]`, packed along the last axis."""
    rows = len(words)
    byte: np.ndarray = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return byte
    if bits == 3:  # three bytes hold eight numbers
        each = byte.reshape(rows, -1, 3).astype(np.uint32)
        byte = each[..., 0] | (each[..., 1] << 8) | (each[..., 2] << 16)
    shifts = np.arange(0, 24 if bits == 3 else 8, bits, dtype=byte.dtype)
    numbers = (byte[..., None] >> shifts) & byte.dtype.type(2**bits - 1)
    return numbers.astype(np.uint8, copy=False).reshape(rows, -1)


def unpacked_awq(words: np.ndarray) -> np.ndarray:
    """AWQ's int32 `[R, W]` as uint8 `[R, 8 W]`."""
    numbers = unpacked(words, 4).reshape(len(words), -1, 8)
    return numbers[..., _AWQ_PLACES].reshape(len(words), -1)
