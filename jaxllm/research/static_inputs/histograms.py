"""Histogram observer: a histogram of a stream of unknown range, and ranges derived from it.

It reproduces the arithmetic of torch.ao.quantization's HistogramObserver, so the ranges agree. One
histogram covers a whole tensor; `jax.vmap` makes one per channel.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.research.static_inputs.observers import Observer, Range
from jaxllm.runtime.validation import check_int

SUBBINS = 16  # parts of a bin when the range grows
SEARCH_STEPS = 100_000  # search steps: each moves one end by 1e-5 of the mass

Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


class HistogramObserver(Observer):
    """Counts of values in B bins of equal width from `low` to `high`.

    count_B: float32, integral until the range grows and bins are redistributed. low, high: float32,
    smallest and largest value seen; inf, -inf before any. If both are equal, the bins reach from
    one less to one more.
    """

    low: jax.Array
    high: jax.Array
    count_B: jax.Array

    def update(self, x: jax.Array) -> "HistogramObserver":
        x_n = x.reshape(-1)
        finite_n, non_finite = self.count_non_finite(x_n)
        low = jnp.minimum(self.low, jnp.where(finite_n, x_n, jnp.inf).min())
        high = jnp.maximum(self.high, jnp.where(finite_n, x_n, -jnp.inf).max())
        bins = self.count_B.shape[0]
        index_n = _bin(jnp.where(finite_n, x_n, low), low, high, bins)
        new_B = jnp.zeros(bins, jnp.int32).at[index_n].add(finite_n.astype(jnp.int32))
        grown = (self.low <= self.high) & ((low < self.low) | (high > self.high))
        old_B = jax.lax.cond(grown, self._redistribute, lambda *_: self.count_B, low, high)
        return self.replace(
            low=low,
            high=high,
            count_B=old_B + new_B.astype(jnp.float32),
            non_finite=non_finite,
        )

    def _redistribute(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """Redistribute the counts over a wider range: parts of bins move by their centers."""
        bins = self.count_B.shape[0]
        width = (self.high - self.low) / (bins * SUBBINS)
        middle_M = _linspace(self.low, self.high, bins * SUBBINS)[:-1] + 0.5 * width
        edge_E = _linspace(low, high, bins)
        index_M = jnp.searchsorted(edge_E, middle_M, side="right") - 1
        part_M = jnp.repeat(self.count_B / SUBBINS, SUBBINS)
        spread_B = jnp.zeros(bins).at[jnp.clip(index_M, 0, bins - 1)].add(part_M)
        single_B = jnp.zeros(bins).at[_bin(self.low, low, high, bins)].add(self.count_B.sum())
        return jnp.where(self.low == self.high, single_B, spread_B)

    def percentile_range(self, percent: jax.Array | float) -> Range:
        """Return the central range with `percent` of the values.

        Exact to a bin's width, since values in a bin count as uniform. Usual: 99.9, 99.99, 99.999.
        Raises ConfigError unless `percent` is above 0 and at most 100.
        """
        if not isinstance(percent, jax.Array) and not 0 < percent <= 100:
            raise ConfigError(f"percentile must be above 0 and at most 100: got {percent!r}")
        return _percentile_range(self, jnp.asarray(percent, jnp.float32))

    def min_error_range(self, count: int) -> Range:
        """Return the range whose rounding to `count` levels has a small expected squared error.

        torch's search over bins: starting with all, move the end that drops more bins for the same
        mass inwards, until the error grows. Raises ConfigError for fewer than two levels.
        """
        return _min_error_range(self, check_int("levels", count, 2, None, ConfigError))


def histogram(bins: int = 2048) -> HistogramObserver:
    """Return an empty histogram. Raises ConfigError for fewer than one bin."""
    bins = check_int("bins", bins, 1, None, ConfigError)
    return HistogramObserver(
        non_finite=jnp.int32(0),
        low=jnp.full((), jnp.inf, jnp.float32),
        high=jnp.full((), -jnp.inf, jnp.float32),
        count_B=jnp.zeros(bins, jnp.float32),
    )


@jax.jit
def _percentile_range(state: HistogramObserver, percent: jax.Array) -> Range:
    mass_E = jnp.concatenate([jnp.zeros(1), jnp.cumsum(state.count_B)])
    outside = (1 - percent / 100) / 2
    edge_E = _linspace(*_bin_limits(state.low, state.high), state.count_B.shape[0])
    cut = mass_E[-1] * jnp.stack([outside, 1 - outside])
    low, high = jnp.clip(jnp.interp(cut, mass_E, edge_E), state.low, state.high)
    met = state.low <= state.high
    return Range(jnp.where(met, low, state.low), jnp.where(met, high, state.high))


@partial(jax.jit, static_argnums=1)
def _min_error_range(state: HistogramObserver, count: int) -> Range:
    bins = state.count_B.shape[0]
    mass_B = jnp.cumsum(state.count_B)
    step_K = np.arange(SEARCH_STEPS + 1) / SEARCH_STEPS
    inside_K = jnp.asarray(step_K, jnp.float32) * mass_B[-1]
    left_K = jnp.searchsorted(mass_B, inside_K, side="left")
    outside_K = jnp.asarray(1 - step_K, jnp.float32) * mass_B[-1]
    right_K = jnp.searchsorted(mass_B, outside_K, side="right") - 1

    def keep_searching(carry: Carry) -> jax.Array:
        i, j, *_, done = carry
        return ~done & (i + j < SEARCH_STEPS)

    def move(carry: Carry) -> Carry:
        i, j, start, end, least, _ = carry
        left = jnp.clip(left_K[i + 1], start, end)
        right = jnp.clip(right_K[j + 1], start, end)
        moves_left = (left - start) > (end - right)
        to = jnp.where(moves_left, left, start), jnp.where(moves_left, end, right)
        same = (to[0] == start) & (to[1] == end)
        error = jax.lax.cond(same, lambda *_: least, partial(_expected_error, state, count), *to)
        done = error > least
        start, end = (jnp.where(done, a, b) for a, b in zip((start, end), to, strict=True))
        least = jnp.where(done, least, error)
        one = moves_left.astype(jnp.int32)
        return i + one, j + 1 - one, start, end, least, done

    ends = jnp.int32(0), jnp.int32(bins - 1)
    begin = jnp.int32(0), jnp.int32(0), *ends, jnp.float32(jnp.inf), jnp.bool(False)
    _, _, start, end, _, _ = jax.lax.while_loop(keep_searching, move, begin)
    width = (state.high - state.low) / bins
    met = state.low <= state.high
    low, high = (state.low + width * n.astype(jnp.float32) for n in (start, end + 1))
    return Range(jnp.where(met, low, state.low), jnp.where(met, high, state.high))


def _expected_error(
    state: HistogramObserver, count: int, start: jax.Array, end: jax.Array
) -> jax.Array:
    """Return the expected squared error with `count` levels over bins `start` to `end`.

    A level covers an interval of equal length around it, the first and last also everything beyond
    them; values in a bin count as uniform. Computed as in torch: the integral over a bin within one
    level is the upper part of its first level, plus the lower part of its last, minus a whole one.
    """
    bins = state.count_B.shape[0]
    width = (state.high - state.low) / bins
    level = width * (end - start + 1).astype(jnp.float32) / count
    begin_B = (jnp.arange(bins) - start).astype(jnp.float32) * width
    first_B = jnp.clip(jnp.floor(begin_B / level), 0, count - 1)
    last_B = jnp.clip(jnp.floor((begin_B + width) / level), 0, count - 1)
    from_B = begin_B - (first_B + 0.5) * level
    to_B = begin_B + width - (last_B * level + level / 2)

    def integral(a: jax.Array, b: jax.Array) -> jax.Array:
        return (b * b * b - a * a * a) / 3

    whole_level = integral(-level / 2, level / 2)
    norm_B = integral(from_B, level / 2) + integral(-level / 2, to_B)
    norm_B += (last_B - first_B - 1) * whole_level
    return jnp.where(level == 0, 0.0, (state.count_B / width * norm_B).sum())


def _bin_limits(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the limits of the bins; like torch.histc, widen the range of a single value."""
    single = (low == high).astype(jnp.float32)
    return low - single, high + single


def _bin(x: jax.Array, low: jax.Array, high: jax.Array, bins: int) -> jax.Array:
    """Return the bin of each value, in the arithmetic of torch.histc."""
    low, high = _bin_limits(low, high)
    return jnp.clip(((x - low) * bins / (high - low)).astype(jnp.int32), 0, bins - 1)


def _linspace(low: jax.Array, high: jax.Array, parts: int) -> jax.Array:
    """Return `parts + 1` points from low to high, in the arithmetic of torch.linspace."""
    k, step = jnp.arange(parts + 1).astype(jnp.float32), (high - low) / parts
    return jnp.where(k < (parts + 1) // 2, low + step * k, high - step * (parts - k))
