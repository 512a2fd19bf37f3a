"""Quantization to GGUF's K types: blocks of 256 columns (`super_blocks`).

A block has a float16 scale (Q4_K and Q5_K: another for minima), which is multiplied by a
small integer per run of columns. Like ggml, it searches each run's scale: it tries steps near the
range of the run, fits scale and minimum to the codes of each by least squares, and keeps the one
with the least squared error, weighted by magnitude.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_CHUNK_SIZE = 512  # blocks per chunk; with fewer, threads wait for Python's lock
_MIN_MAGNITUDE = np.float32(1e-15)  # runs with smaller magnitudes become zeros


def _by_chunks(quantize: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that quantizes chunks of blocks on several threads."""

    def quantize_chunk(chunk: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return quantize(chunk)

    @functools.wraps(quantize)
    def quantize_all(blocks: np.ndarray) -> np.ndarray:
        begins = range(0, max(len(blocks), 1), _CHUNK_SIZE)
        chunks = (blocks[begin : begin + _CHUNK_SIZE] for begin in begins)
        with ThreadPoolExecutor() as threads:  # NumPy releases the GIL
            return np.concatenate([*threads.map(quantize_chunk, chunks)])

    return quantize_all


@_by_chunks
def quantize_q4_k(blocks: np.ndarray) -> np.ndarray:
    """Return blocks float32 `[n, 256]` as Q4_K's bytes `[n, 144]`."""
    head, codes = _quantize_affine(blocks, 15, np.arange(-1.0, 1.05, 0.1))
    return np.concatenate([head, _pack_pairs(codes)], axis=1)


@_by_chunks
def quantize_q5_k(blocks: np.ndarray) -> np.ndarray:
    """Return blocks float32 `[n, 256]` as Q5_K's bytes `[n, 176]`."""
    head, codes = _quantize_affine(blocks, 31, np.arange(-0.5, 1.05, 0.1))
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0]  # bit r belongs to run r
    return np.concatenate([head, fifth, _pack_pairs(codes & 15)], axis=1)


def _pack_pairs(codes: np.ndarray) -> np.ndarray:
    """Pack 4-bit codes `[n, 8, 32]` to bytes: runs 2 i (low) and 2 i + 1 share 32 bytes."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(len(codes), -1)


def _quantize_affine(
    blocks: np.ndarray, max_code: int, trials: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize to scales' bytes `[n, 16]` and codes uint8 `[n, 8, 32]`, 0 to `max_code`.

    Args:
        blocks: float32 `[n, 256]`.
        max_code: The largest code.
        trials: Additions to `max_code`; the search tries the step range / (most + addition) for
            each.
    """
    x = blocks.reshape(-1, 32)
    weight = np.sqrt(np.einsum("ni,ni->n", x, x) / np.float32(32))[:, None] + np.abs(x)
    scale, minimum = _search_affine(x, weight, max_code, trials)
    wide, scales = _quantize_six_bits(scale.reshape(-1, 8))
    wide_minimum, minima = _quantize_six_bits(minimum.reshape(-1, 8))
    step = (wide * scales).reshape(-1, 1)
    offset = (wide_minimum * minima).reshape(-1, 1)
    codes = np.rint((x + offset) * _inverse(step)).clip(0, max_code).astype(np.uint8)
    halves = [half.astype(np.float16).view(np.uint8) for half in (wide, wide_minimum)]
    head = np.concatenate([*halves, _pack_scales(scales, minima)], axis=1)
    return head, codes.reshape(-1, 8, 32)


def _search_affine(
    x: np.ndarray, weight: np.ndarray, max_code: int, trials: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return non-negative scales and minima `[n]` of runs `x` `[n, 32]`.

    A code c stands for `scale c - minimum`. The weighted squared error is `sum(weight x^2) - gain`,
    so the search maximizes the gain.
    """
    low, high = np.minimum(x.min(axis=1), 0), x.max(axis=1)
    weighted = weight * x
    sum_w, sum_x = weight.sum(axis=1), weighted.sum(axis=1)
    best = np.full(len(x), -np.inf, np.float32)
    scale, minimum = np.zeros_like(low), -low
    span, above = high - low, x - low[:, None]
    for more in trials:
        codes = above * (np.float32(max_code + more) / span)[:, None]
        np.minimum(np.rint(codes, out=codes), np.float32(max_code), out=codes)
        coded = weight * codes
        sum_l, sum_l2 = coded.sum(axis=1), np.einsum("ni,ni->n", coded, codes)
        sum_xl = np.einsum("ni,ni->n", weighted, codes)
        spread = sum_w * sum_l2 - sum_l * sum_l
        slope = (sum_w * sum_xl - sum_x * sum_l) / spread
        base = (sum_l2 * sum_x - sum_l * sum_xl) / spread
        alone = (base > 0) | ~(spread > 0)  # a negative minimum is invalid: fit the scale alone
        slope = np.where(alone, sum_xl / sum_l2, slope)
        base = np.where(alone, np.float32(0), base)
        gain = slope * sum_xl + base * sum_x  # of the fitted scale and minimum
        better = gain > best
        best = np.where(better, gain, best)
        scale, minimum = np.where(better, slope, scale), np.where(better, -base, minimum)
    flat = ~(span > 0)  # all numbers of the run are equal, and not positive
    return np.where(flat, np.float32(0), scale), np.where(flat, -low, minimum)


def _quantize_six_bits(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize `[n, 8]` to integers 0 to 63 with a float16 scale `[n, 1]`, returned as float32."""
    largest = numbers.max(axis=1, keepdims=True)
    codes = np.rint(numbers * (np.float32(63) * _inverse(largest))).clip(0, 63).astype(np.uint8)
    half = (largest / np.float32(63)).astype(np.float16)
    return half.astype(np.float32), codes


def _pack_scales(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Pack 8 scales and 8 minima of 6 bits into 12 bytes."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | minima[:, 4:] << 4], axis=1)


@_by_chunks
def quantize_q6_k(blocks: np.ndarray) -> np.ndarray:
    """Return blocks float32 `[n, 256]` as Q6_K's bytes `[n, 210]`."""
    x = blocks.reshape(-1, 16)
    scale = _search_symmetric(x).reshape(-1, 16)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    half = (largest / np.float32(-128)).astype(np.float16)
    scales = np.rint(scale * (np.float32(-128) * _inverse(largest))).clip(-128, 127).astype(np.int8)
    step = (half.astype(np.float32) * scales).reshape(-1, 1)
    codes = np.rint(x * _inverse(step)).clip(-32, 31).astype(np.int8).view(np.uint8) + np.uint8(32)
    quarters = codes.reshape(-1, 2, 4, 32)  # per half: 2 pairs share nibbles, 4 the upper bits
    low, high = quarters & 15, quarters >> 4
    nibbles = low[:, :, :2] | low[:, :, 2:] << 4
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [nibbles, upper, scales.view(np.uint8), half.view(np.uint8)]
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1)


def _search_symmetric(x: np.ndarray) -> np.ndarray:
    """Return scales `[n]` of runs `[n, 16]` for codes -32 to 31; weights are the numbers squared.

    The number of largest magnitude gets a code near -32, since the positive side ends at 31.
    """
    end = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    weight = x * x
    weighted = weight * x
    best, scale = np.full(len(x), -np.inf, np.float32), np.zeros(len(x), np.float32)
    for more in np.arange(-9, 10):
        codes = np.rint(x * (-np.float32(32 + more / 10) / end)).clip(-32, 31)
        sum_xl = np.einsum("ni,ni->n", weighted, codes)
        sum_l2 = np.einsum("ni,ni->n", weight * codes, codes)
        slope = sum_xl / sum_l2
        better = slope * sum_xl > best
        best = np.where(better, slope * sum_xl, best)
        scale = np.where(better, slope, scale)
    return np.where(np.abs(end[:, 0]) > _MIN_MAGNITUDE, scale, np.float32(0))


def _inverse(step: np.ndarray) -> np.ndarray:
    return np.where(step == 0, np.float32(0), np.float32(1) / step)


QUANTIZERS = {"Q4_K": quantize_q4_k, "Q5_K": quantize_q5_k, "Q6_K": quantize_q6_k}
