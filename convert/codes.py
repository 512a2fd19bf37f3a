"""Integers as GPTQ and AWQ files pack them into int32 words, and as one number each.

GPTQ (AutoGPTQ's `QuantLinear.pack`) packs along an axis of the words, the first number in the
lowest bits and every next one above it; of 3 bits a number may begin in one word and end in the
next, 32 of them in three words. AWQ (AutoAWQ's `WQLinear_GEMM`) packs eight numbers of 4 bits along
the last axis, columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up.
"""

from collections.abc import Sequence

import numpy as np

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """GPTQ's int32 `[R, W]` as uint8 `[R, 32 W / bits]`, packed along the last axis."""
    byte = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return byte
    if bits != 3:
        return _apart(byte, bits, range(8 // bits))
    first, second, third = (byte[:, i::3].astype(np.uint32) for i in range(3))
    return _apart(first | second << 8 | third << 16, 3, range(8))


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """uint8 `[R, N]` as GPTQ's int32 `[R, N bits / 32]`, packed along the last axis."""
    if bits == 8:
        byte = np.ascontiguousarray(numbers)
    elif bits == 3:
        each = np.unpackbits(numbers[..., None], axis=-1, count=3, bitorder="little")
        byte = np.packbits(each.reshape(len(numbers), -1), axis=1, bitorder="little")
    else:
        share = 8 // bits
        byte = np.zeros((len(numbers), numbers.shape[1] // share), np.uint8)
        for place in range(share):
            byte |= numbers[:, place::share] << np.uint8(bits * place)
    return byte.view("<i4")


def unpacked_awq(words: np.ndarray) -> np.ndarray:
    """AWQ's int32 `[R, W]` as uint8 `[R, 8 W]`."""
    return _apart(np.ascontiguousarray(words, "<i4").view(np.uint32), 4, _AWQ_COLUMNS)


def _apart(packed: np.ndarray, bits: int, columns: Sequence[int]) -> np.ndarray:
    """Unsigned `[R, W]` of several numbers each as uint8 `[R, W len(columns)]`.

    columns: the place of each number among those of its word, from the lowest bits up.
    """
    numbers = np.empty((*packed.shape, len(columns)), np.uint8)
    for place, column in enumerate(columns):  # one place at a time: numpy is slow at short axes
        numbers[..., column] = (packed >> (bits * place)) & (2**bits - 1)
    return numbers.reshape(len(packed), -1)
