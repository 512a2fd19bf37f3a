"""Padding and bucketing: round lengths up to a few sizes, so that few programs are compiled."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def next_power_of_two(n: int, minimum: int = 1) -> int:
    """Return the smallest power of two that is at least `n`, or `minimum` if that is larger."""
    return max(minimum, 1 << max(n - 1, 0).bit_length())


def bucket_size(tokens: int) -> int:
    """Return the cache capacity for this many tokens: a power of two of at least 512."""
    return next_power_of_two(tokens, 512)


def pad_rows(
    rows: Sequence[Sequence[int] | np.ndarray],
    *,
    width: int | None = None,
    fill: int = 0,
    left: bool = False,
    dtype: Any = np.int32,
) -> np.ndarray:
    """Return rows of any lengths as one array `[B, T]`, padded on the right or on the left.

    width: T; by default the length of the longest row.
    """
    width = max(map(len, rows), default=0) if width is None else width
    padded = np.full((len(rows), width), fill, dtype)
    for row, values in zip(padded, rows, strict=True):
        row[width - len(values) if left else 0 :][: len(values)] = values
    return padded


def pad_texts(
    texts: Sequence[Sequence[int] | np.ndarray], *, width: int | None = None, left: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids, padded with 0, and positions, padded with -1: int32 `[B, T]`."""
    places = [range(len(text)) for text in texts]
    return (
        pad_rows(texts, width=width, left=left),
        pad_rows(places, width=width, left=left, fill=-1),
    )
