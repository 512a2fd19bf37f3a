"""Sparsity: a fraction of zeros, or N:M (N of M adjacent weights in a row are kept)."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.recipe import Argument, RuleOptions, Shapes, match_paths
from jaxllm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """fraction: share of weights to zero. pattern: (N, M), to keep at most N of each M columns of a
    row; None for any pattern."""

    fraction: float
    pattern: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"{self.fraction:.4g}" if self.pattern is None else "{}:{}".format(*self.pattern)

    def check(self, columns: int, where: str) -> None:
        """Raise ConfigError if rows of `columns` cannot be split into groups of M."""
        if self.pattern is not None and columns % self.pattern[1]:
            raise ConfigError(f"{where} has {columns} columns: not a multiple of {self.pattern[1]}")


def parse(text: str) -> Sparsity:
    """Parse `50%`, `0.5` (zero half) or `2:4` (keep two of each four). Raises ConfigError."""
    if match := re.fullmatch(r"(\d{1,3}):(\d{1,3})", text):
        n, m = int(match[1]), int(match[2])
        if 0 < n < m and m in (2, 4, 8, 16, 32, 64):
            return Sparsity(1 - n / m, (n, m))
        raise ConfigError(f"N:M must have 0 < N < M, and M a power of two up to 64: got {text!r}")
    try:
        return Sparsity(parse_share(text))
    except ConfigError as error:
        raise ConfigError(f"sparsity must be N:M such as 2:4, or a share: {error}") from None


def check_pattern(shapes: Shapes, argument: str, options: RuleOptions) -> None:
    """Raise ConfigError if the rows of a matrix cannot be split into groups of M."""
    sparsity = parse(argument)
    for path in match_paths(shapes, options.on, argument):
        sparsity.check(shapes[path][-1], path)


def parse_share(text: str) -> float:
    """Parse a share such as `25%` or `0.25`. Raises ConfigError unless it is between 0 and 1."""
    number = text.removesuffix("%")
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", number):
        share = float(number) / (100 if text.endswith("%") else 1)
        if 0 < share < 1:
            return share
    raise ConfigError(f"share must be between 0 and 100%, such as 25% or 0.25: got {text!r:.40}")


def lowest_mask(score_OI: np.ndarray, sparsity: Sparsity, *, rows: bool) -> np.ndarray:
    """Return a mask of the lowest scores, bool `[O, I]`, with exactly the sparsity's count.

    rows: select int(I * fraction) of each row, else int(O * I * fraction) of the matrix. A pattern
    selects within its groups instead. Ties go to the first.
    """
    if sparsity.pattern is not None:
        n, m = sparsity.pattern
        groups = jnp.asarray(score_OI.reshape(-1, m))
        return np.asarray(lowest_in_groups(groups, m - n)).reshape(score_OI.shape)
    flat = score_OI if rows else score_OI.reshape(1, -1)
    count = int(flat.shape[1] * sparsity.fraction)
    mask = np.zeros(flat.shape, bool)
    if count:
        bound = np.partition(flat, count - 1, axis=1)[:, count - 1 : count]
        below, equal = flat < bound, flat == bound
        left = count - below.sum(axis=1, keepdims=True)
        mask = below | (equal & (np.cumsum(equal, axis=1) <= left))
    return mask.reshape(score_OI.shape)


def zero_lowest(
    array: jax.Array, score_OI: np.ndarray, sparsity: Sparsity, *, rows: bool
) -> jax.Array:
    """Return the array with zeros where `lowest_mask` selects the scores."""
    mask_OI = lowest_mask(score_OI, sparsity, rows=rows)
    return jnp.where(jnp.asarray(mask_OI), jnp.zeros((), array.dtype), array)


@jax.jit
def lowest_in_groups(score_NM: jax.Array, count: int | jax.Array) -> jax.Array:
    """Return a mask of the `count` lowest of each M scores, bool `[N, M]`; ties go to the first.

    Compares all pairs instead of sorting, since M is small. NaN counts as highest.
    """
    score_NM = jnp.where(jnp.isnan(score_NM), jnp.inf, score_NM)
    place_1M = jnp.arange(score_NM.shape[1])[None]

    def count_lower(place: jax.Array, rank_NM: jax.Array) -> jax.Array:
        other_N1 = jax.lax.dynamic_slice_in_dim(score_NM, place, 1, 1)
        lower_NM = (other_N1 < score_NM) | ((other_N1 == score_NM) & (place < place_1M))
        return rank_NM + lower_NM.astype(jnp.uint8)

    begin_NM = jnp.zeros(score_NM.shape, jnp.uint8)
    rank_NM = jax.lax.fori_loop(0, score_NM.shape[1], count_lower, begin_NM)
    return rank_NM < jnp.asarray(count, jnp.uint8)


PATTERN = Argument("N:M|SHARE%", parse)  # of a line of a recipe
