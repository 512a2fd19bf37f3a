"""The numbers in GGUF's blocks of 256 columns (ggml's Q4_K, Q5_K, Q6_K; `ggml-common.h`).

A block is runs of 32 columns, of Q6_K 16. A code c of a run stands for `c scale + offset`, computed
in float32; scales and offsets are exact products of a float16 and a small integer. All functions
take blocks uint8 `[n, nbytes]`, of NumPy or JAX, and return the same kind.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

ReadBlocks = Callable[[Any], Any]


class SuperBlocks(NamedTuple):
    """How blocks of a type are read.

    Attributes:
        read_codes: `[n, 256]`, uint8 from 0 on, of Q6_K int8 from -32 to 31.
        read_scales: Of each run, float32 `[n, runs]`.
        read_offsets: Likewise; None: there are none.
        halves: Where the float16 numbers are, in bytes.
    """

    nbytes: int
    read_codes: ReadBlocks
    read_scales: ReadBlocks
    read_offsets: ReadBlocks | None
    halves: slice


def half_at(blocks: Any, begin: int) -> Any:
    """Return a float16 of each block, as float32 `[n, 1]`."""
    return blocks[:, begin : begin + 2].copy().view(np.float16).astype(np.float32)


def _unpack_six_bits(blocks: Any) -> tuple[Any, Any]:
    """Return 8 scales and 8 minima of 12 bytes, uint8 `[n, 8]` each."""
    concat = blocks.__array_namespace__().concat
    first, second, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = concat([first & 63, (high & 15) | (first >> 6 << 4)], axis=1)
    minima = concat([second & 63, (high >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


def _read_scales(blocks: Any) -> Any:
    return _unpack_six_bits(blocks)[0].astype(np.float32) * half_at(blocks, 0)


def _read_offsets(blocks: Any) -> Any:
    return -(_unpack_six_bits(blocks)[1].astype(np.float32) * half_at(blocks, 2))


def _unpack_runs(qs: Any) -> Any:
    """Unpack 128 bytes to 8 runs of 32 4-bit codes `[n, 8, 32]`, per 32 bytes low nibbles first."""
    bytes_ = qs.reshape(-1, 4, 1, 32)
    concat = qs.__array_namespace__().concat
    return concat([bytes_ & 15, bytes_ >> 4], axis=2).reshape(-1, 8, 32)


def _read_q4_k(blocks: Any) -> Any:
    return _unpack_runs(blocks[:, 16:]).reshape(-1, 256)


def _read_q5_k(blocks: Any) -> Any:
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]  # bit r of byte i: of code i of run r
    fifth = (blocks[:, None, 16:48] >> shifts & 1) << 4
    return (_unpack_runs(blocks[:, 48:]) | fifth).reshape(-1, 256)


def _read_q6_k(blocks: Any) -> Any:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = blocks.__array_namespace__().concat([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    return ((low | high << 4).reshape(-1, 256) - np.uint8(32)).view(np.int8)


def _read_q6_k_scales(blocks: Any) -> Any:
    return blocks[:, 192:208].copy().view(np.int8).astype(np.float32) * half_at(blocks, 208)


SUPER_BLOCKS = {
    "Q4_K": SuperBlocks(144, _read_q4_k, _read_scales, _read_offsets, slice(4)),
    "Q5_K": SuperBlocks(176, _read_q5_k, _read_scales, _read_offsets, slice(4)),
    "Q6_K": SuperBlocks(210, _read_q6_k, _read_q6_k_scales, None, slice(208, 210)),
}
