"""Packing and unpacking of integers in the int32 words of GPTQ and AWQ files.

GPTQ (AutoGPTQ's `QuantLinear.pack`) packs along an axis, the first number in the lowest bits. Three
words hold 32 numbers of 3 bits, so such a number may straddle two words. AWQ (AutoAWQ's
`WQLinear_GEMM`) packs eight numbers of 4 bits along the last axis, columns 0, 2, 4, 6, 1, 3, 5, 7
from the lowest bits up.
"""

from collections.abc import Sequence

import numpy as np

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_gptq(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack GPTQ's int32 `[R, W]` along the last axis to uint8 `[R, 32 W / bits]`."""
    byte = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return byte
    if bits != 3:
        return _unpack_words(byte, bits, range(8 // bits))
    first, second, third = (byte[:, i::3].astype(np.uint32) for i in range(3))
    return _unpack_words(first | second << 8 | third << 16, 3, range(8))


def pack_gptq(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 `[R, N]` along the last axis into GPTQ's int32 `[R, N bits / 32]`."""
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


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Unpack AWQ's int32 `[R, W]` to uint8 `[R, 8 W]`."""
    return _unpack_words(np.ascontiguousarray(words, "<i4").view(np.uint32), 4, _AWQ_COLUMNS)


def _unpack_words(words: np.ndarray, bits: int, columns: Sequence[int]) -> np.ndarray:
    """Unpack unsigned words `[R, W]` to uint8 `[R, W len(columns)]`.

    columns: The column of each number within its word, from the lowest bits up.
    """
    numbers = np.empty((*words.shape, len(columns)), np.uint8)
    for place, column in enumerate(columns):  # a loop, since numpy is slow on short axes
        numbers[..., column] = (words >> (bits * place)) & (2**bits - 1)
    return numbers.reshape(len(words), -1)
