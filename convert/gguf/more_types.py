"""Types of tensors that are read and not written, each as int8 codes with a scale per run.

From ggml's `ggml-common.h` and `ggml-quants.c`. The tables of the IQ types have at most 256 values
of 8 bits, and the grids of IQ1 to IQ3, which have no formula, are those of the package `gguf`. A
code times its run's scale (Q2_K: plus an offset), in float32, is bit for bit what ggml computes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.weights.types.mxfp4 import LEVELS
from jaxllm.weights.types.super_blocks import half_at

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)

Read = Callable[[np.ndarray], np.ndarray]


class MoreType(NamedTuple):
    """A type: the fields of a `TensorType`, and `run`, the columns that share a scale."""

    type_id: int
    name: str
    columns: int
    nbytes: int
    run: int  # 16 or 32
    read_codes: Read
    read_scales: Read
    read_offsets: Read | None = None

    @property
    def bytes_per_weight(self) -> float:
        """In memory: a code and its share of the run's float32 scale; float32 with offsets."""
        return 4 if self.read_offsets else 1 + 4 / self.run


def _words(blocks: np.ndarray, begin: int, end: int, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, begin:end]).view(dtype)


def _shifted(values: np.ndarray, shifts: Any, mask: int) -> np.ndarray:
    """Return `(values >> shift) & mask` for each shift, as a new last axis."""
    return values[..., None] >> np.array(shifts, values.dtype) & values.dtype.type(mask)


def table_codes(table: np.ndarray, begin: int, group: int) -> Read:
    """Return a reader of 4-bit indices: of each `group` bytes all low nibbles, then the high."""

    def read(blocks: np.ndarray) -> np.ndarray:
        qs = blocks[:, begin:].reshape(len(blocks), -1, group)
        return table[np.concatenate([qs & 15, qs >> 4], axis=2)].reshape(len(blocks), -1)

    return read


def _two_bits(qs: np.ndarray) -> np.ndarray:
    """Unpack 64 bytes to 256 codes: of each 32 bytes the lowest two bits, then the next."""
    halves = qs.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return halves.reshape(-1, 256).view(np.int8)


def _q3_k_codes(blocks: np.ndarray) -> np.ndarray:
    high = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _two_bits(blocks[:, 32:96]) - ((1 - high) << 2).reshape(-1, 256).view(np.int8)


def _q3_k_scales(blocks: np.ndarray) -> np.ndarray:
    packed = blocks[:, 96:108]
    low = _shifted(packed[:, :8], [0, 4], 15).swapaxes(1, 2).reshape(-1, 16)
    high = _shifted(packed[:, 8:], [0, 2, 4, 6], 3).swapaxes(1, 2).reshape(-1, 16)
    return half_at(blocks, 108) * ((low | high << 4).view(np.int8) - np.int8(32))


def _iq4_xs_scales(blocks: np.ndarray) -> np.ndarray:
    low = _shifted(blocks[:, 4:8], [0, 4], 15).reshape(-1, 8)
    high = _shifted(_words(blocks, 2, 4, np.uint16)[:, 0], range(0, 16, 2), 3)
    return half_at(blocks, 0) * ((low | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32))


def _nvfp4_scales(blocks: np.ndarray) -> np.ndarray:
    """Read four numbers of 4 bits of exponent and 3 of mantissa, without a sign; 127 is zero."""
    byte = blocks[:, :4]
    exponent = (byte >> 3 & 15).astype(np.int32)
    mantissa = ((byte & 7) + 8 * (exponent > 0)).astype(np.float32)
    return np.where(byte == 127, np.float32(0), np.ldexp(mantissa, exponent.clip(1) - 11))


def _tq1_0_codes(blocks: np.ndarray) -> np.ndarray:
    """Five digits to the base 3 are a byte: its first digits are those of a fraction of 256."""
    parts = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    trits = [
        (
            (blocks[:, None, begin:end] * np.array([3**n for n in range(count)], np.uint8)[:, None])
            .astype(np.uint16) * 3 >> 8
        ).reshape(len(blocks), -1)
        for begin, end, count in parts
    ]  # fmt: skip
    return np.concatenate(trits, axis=1).astype(np.int8) - np.int8(1)


@cache
def _grid(name: str, multiple: int) -> np.ndarray:
    """Return a grid of the package `gguf`, times `multiple`, int8 `[entries, 4 or 8]`."""
    try:
        from gguf import quants
    except ImportError:
        raise CheckpointError(
            f"tensors of type {name} take the tables of the package gguf: pip install gguf"
        ) from None
    kind = getattr(quants, name)
    kind.init_grid()
    grid: np.ndarray = kind.grid.reshape(kind.grid_shape) * multiple
    return grid.astype(np.int8)


def _look_up(
    name: str, index: np.ndarray, signs: np.ndarray | None, multiple: int = 1
) -> np.ndarray:
    """Return codes `[n, 256]`: entries of a grid, negative where bits of `signs` are set."""
    codes = _grid(name, multiple)[index].reshape(len(index), -1)
    if signs is None:
        return codes
    negative = np.unpackbits(
        np.ascontiguousarray(signs).reshape(len(index), -1), axis=1, bitorder="little"
    )
    return np.where(negative, -codes, codes)


def _signs(words: np.ndarray) -> np.ndarray:
    """Return the four times 7 sign bits of words, each with an eighth."""
    return _even(_shifted(words, [0, 7, 14, 21], 127))


def _even(signs: np.ndarray) -> np.ndarray:
    """Return 7 bits with an eighth that makes the number of ones even."""
    bits = np.unpackbits(signs.astype(np.uint8)[..., None], axis=-1).sum(-1) & 1
    return (signs | bits << 7).astype(np.uint8)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    return _shifted(packed, [0, 4], 15).reshape(len(packed), -1).astype(np.float32)


def _iq2_xxs_codes(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 2, 66, np.uint32).reshape(-1, 8, 2)
    index = _words(blocks, 2, 66, np.uint8).reshape(-1, 8, 8)[..., :4]
    return _look_up("IQ2_XXS", index.reshape(-1, 32), _signs(words[..., 1]))


def _iq2_xxs_scales(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 2, 66, np.uint32).reshape(-1, 8, 2)
    return (
        half_at(blocks, 0)
        * (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32))
        * np.float32(0.25)
    )


def _iq2_xs_codes(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 2, 66, np.uint16)
    return _look_up("IQ2_XS", words & 511, _even(words >> 9))


def _iq2_scales(begin: int) -> Read:
    def read(blocks: np.ndarray) -> np.ndarray:
        more = _nibbles(blocks[:, begin : begin + 8])
        return half_at(blocks, 0) * (np.float32(0.5) + more) * np.float32(0.25)

    return read


def _iq2_s_codes(blocks: np.ndarray) -> np.ndarray:
    high = _shifted(blocks[:, 66:74], [0, 2, 4, 6], 3).reshape(-1, 32).astype(np.uint16)
    return _look_up("IQ2_S", blocks[:, 2:34] | high << 8, blocks[:, 34:66])


def _iq3_xxs_codes(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 66, 98, np.uint32)
    return _look_up("IQ3_XXS", blocks[:, 2:66], _signs(words))


def _iq3_xxs_scales(blocks: np.ndarray) -> np.ndarray:
    more = (_words(blocks, 66, 98, np.uint32) >> 28).astype(np.float32)
    return half_at(blocks, 0) * (np.float32(0.5) + more) * np.float32(0.5)


def _iq3_s_codes(blocks: np.ndarray) -> np.ndarray:
    high = _shifted(blocks[:, 66:74], range(8), 1).reshape(-1, 64).astype(np.uint16)
    return _look_up("IQ3_S", blocks[:, 2:66] | high << 8, blocks[:, 74:106])


def _iq3_s_scales(blocks: np.ndarray) -> np.ndarray:
    return half_at(blocks, 0) * (1 + 2 * _nibbles(blocks[:, 106:110]))


def _iq1_s_codes(blocks: np.ndarray) -> np.ndarray:
    """Grid entries -1, 0, 1 plus or minus an eighth: eight times that is whole."""
    qh = _words(blocks, 34, 50, np.uint16)
    index = blocks[:, 2:34] | _shifted(qh, [0, 3, 6, 9], 7).reshape(-1, 32) << 8
    shift = np.where(qh >> 15, -1, 1).astype(np.int8)
    return _look_up("IQ1_S", index, None, 8) + shift.repeat(32, axis=1)


def _iq1_s_scales(blocks: np.ndarray) -> np.ndarray:
    more = (_words(blocks, 34, 50, np.uint16) >> 12 & 7).astype(np.float32)
    return half_at(blocks, 0) * (2 * more + 1) / np.float32(8)


def _iq1_m_codes(blocks: np.ndarray) -> np.ndarray:
    high = _shifted(blocks[:, 32:48], [0, 4], 15).reshape(-1, 32).astype(np.uint16)
    shift = np.where(high >> 3, -1, 1).astype(np.int8)
    return _look_up("IQ1_M", blocks[:, :32] | (high & 7) << 8, None, 8) + shift.repeat(8, axis=1)


def _iq1_m_scales(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 48, 56, np.uint16)
    tops = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    half = np.bitwise_or.reduce(tops, axis=1).view(np.float16).astype(np.float32)
    more = _shifted(words, [0, 3, 6, 9], 7).reshape(-1, 16).astype(np.float32)
    return half[:, None] * (2 * more + 1) / np.float32(8)


MORE_TYPES = (
    MoreType(
        10, "Q2_K", 256, 84, 16,
        lambda b: _two_bits(b[:, 16:80]),
        lambda b: half_at(b, 80) * (b[:, :16] & 15),
        lambda b: -(half_at(b, 82) * (b[:, :16] >> 4)),
    ),
    MoreType(11, "Q3_K", 256, 110, 16, _q3_k_codes, _q3_k_scales),
    MoreType(20, "IQ4_NL", 32, 18, 32, table_codes(_IQ4, 2, 16), lambda b: half_at(b, 0)),
    MoreType(23, "IQ4_XS", 256, 136, 32, table_codes(_IQ4, 8, 16), _iq4_xs_scales),
    MoreType(40, "NVFP4", 64, 36, 16, table_codes(LEVELS, 4, 8), _nvfp4_scales),
    MoreType(34, "TQ1_0", 256, 54, 32, _tq1_0_codes, lambda b: half_at(b, 52).repeat(8, axis=1)),
    MoreType(
        35, "TQ2_0", 256, 66, 32,
        lambda b: _two_bits(b[:, :64]) - np.int8(1),
        lambda b: half_at(b, 64).repeat(8, axis=1),
    ),
    MoreType(16, "IQ2_XXS", 256, 66, 32, _iq2_xxs_codes, _iq2_xxs_scales),
    MoreType(17, "IQ2_XS", 256, 74, 16, _iq2_xs_codes, _iq2_scales(66)),
    MoreType(22, "IQ2_S", 256, 82, 16, _iq2_s_codes, _iq2_scales(74)),
    MoreType(18, "IQ3_XXS", 256, 98, 32, _iq3_xxs_codes, _iq3_xxs_scales),
    MoreType(21, "IQ3_S", 256, 110, 32, _iq3_s_codes, _iq3_s_scales),
    MoreType(19, "IQ1_S", 256, 50, 32, _iq1_s_codes, _iq1_s_scales),
    MoreType(29, "IQ1_M", 256, 56, 16, _iq1_m_codes, _iq1_m_scales),
)  # fmt: skip
