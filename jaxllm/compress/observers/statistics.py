"""Observers of activations or weights, which find the range that integers should cover.

An observer is a small pytree: call `state = observe(state, x)` for each array of a stream, then
`state.range()` returns the range for `ranges.find_qparams`. All of it works inside `jit` and
`lax.scan`. NaN and infinity are excluded from ranges and counted; `check_finite` raises if there
were any. `histograms` has the histogram observer.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.compress.observers.qparams import (
    TENSOR,
    Granularity,
    QParams,
    QRange,
    Range,
    fake_quantize,
    find_qparams,
)
from jaxllm.errors import ConfigError, NonFiniteError
from jaxllm.runtime.validation import check_int

MAX_COUNT = 1 << 30  # largest count of NaN and infinities: adding another array cannot overflow


class Observer(struct.PyTreeNode):
    """Base class of observers.

    non_finite_P: int32, number of NaN and infinities seen, saturating near `MAX_COUNT`.
    """

    non_finite_P: jax.Array

    def update(self, x: jax.Array, mask: jax.Array) -> Any:
        """Return the state after x. real: bool, of x's shape, which elements to observe."""
        raise NotImplementedError


State = TypeVar("State", bound=Observer)


class MinMaxObserver(Observer):
    """Minimum and maximum, of all arrays or as a moving average.

    low_P, high_P: float32; inf and -inf before any value. averaging: the constant c of
    `low += c * (the array's minimum - low)`, which starts at the first array's; None for the
    minimum of all arrays.
    """

    low_P: jax.Array
    high_P: jax.Array
    granularity: Granularity = struct.field(pytree_node=False)
    averaging_constant: float | None = struct.field(pytree_node=False)

    def range(self) -> Range:
        return Range(self.low_P, self.high_P)

    def update(self, x: jax.Array, mask: jax.Array) -> "MinMaxObserver":
        (x, shared), (mask, _) = self.granularity.split(x), self.granularity.split(mask)
        met, bad_P = finite_mask(x, mask, shared)
        low_P = jnp.where(met, x, jnp.inf).min(shared)
        high_P = jnp.where(met, x, -jnp.inf).max(shared)
        if self.averaging_constant is not None:
            low_P = _update_average(self.low_P, low_P, self.averaging_constant)
            high_P = _update_average(self.high_P, high_P, self.averaging_constant)
        return self.replace(
            low_P=jnp.minimum(low_P, self.low_P) if self.averaging_constant is None else low_P,
            high_P=jnp.maximum(high_P, self.high_P) if self.averaging_constant is None else high_P,
            non_finite_P=add_saturating(self.non_finite_P, bad_P),
        )


class GridObserver(Observer):
    """Grid search over shrinking ranges by rounding error, in a second pass over the stream.

    low_P, high_P: the range of the first pass. error_KP: float32, the sum of
    `|x - rounded x| ** power` for range k, which is `1 - k / steps` times the full one.
    """

    low_P: jax.Array
    high_P: jax.Array
    error_KP: jax.Array
    granularity: Granularity = struct.field(pytree_node=False)
    qrange: QRange = struct.field(pytree_node=False)
    symmetric: bool = struct.field(pytree_node=False)
    power: float = struct.field(pytree_node=False)
    steps: int = struct.field(pytree_node=False)

    def range(self) -> Range:
        """Return the range with the least error, the widest of several."""
        shrunk_P = 1 - self.error_KP.argmin(0).astype(jnp.float32) / self.steps
        return Range(shrunk_P * self.low_P, shrunk_P * self.high_P)

    def update(self, x: jax.Array, mask: jax.Array) -> "GridObserver":
        (x, shared), (mask, _) = self.granularity.split(x), self.granularity.split(mask)
        met, bad_P = finite_mask(x, mask, shared)
        x = jnp.where(met, x, 0.0)

        def error(k: jax.Array) -> jax.Array:
            shrunk = 1 - k.astype(jnp.float32) / self.steps
            wanted = Range(shrunk * self.low_P, shrunk * self.high_P)
            found = find_qparams(wanted, self.qrange, symmetric=self.symmetric)
            given = QParams(*(jnp.expand_dims(value_P, shared) for value_P in found))
            return (jnp.abs(fake_quantize(x, given, self.qrange) - x) ** self.power).sum(shared)

        error_KP = jax.lax.map(error, jnp.arange(self.error_KP.shape[0]))
        return self.replace(
            error_KP=self.error_KP + error_KP,
            non_finite_P=add_saturating(self.non_finite_P, bad_P),
        )


def min_max(shape: tuple[int, ...], granularity: Granularity = TENSOR) -> MinMaxObserver:
    """Return an observer of minimum and maximum (torch's MinMaxObserver).

    shape: of the arrays; only the axes of `granularity` must agree. Raises what `Granularity.shape`
        raises.
    """
    return _make_min_max(shape, granularity, None)


def moving_average(
    shape: tuple[int, ...], granularity: Granularity = TENSOR, *, constant: float = 0.01
) -> MinMaxObserver:
    """Return an observer of moving averages (torch's MovingAverageMinMaxObserver).

    constant: torch's `averaging_constant`. Raises ConfigError unless it is above 0 and at most 1,
    and what `Granularity.shape` raises.
    """
    if not 0 < constant <= 1:
        raise ConfigError(f"averaging constant must be above 0 and at most 1: got {constant}")
    return _make_min_max(shape, granularity, float(constant))


def grid_search(
    bounds: Range,
    qrange: QRange,
    *,
    symmetric: bool,
    granularity: Granularity = TENSOR,
    steps: int = 100,
    shrink: float = 0.8,
    power: float = 2.4,
) -> GridObserver:
    """Return an observer that searches the range with the least rounding error.

    It tries `int(steps * shrink)` ranges by the error `|x - rounded x| ** power`, as GPTQ's
    `quant.py`, with its defaults. found: the widest range, from another observer with the same
    `granularity`.

    Raises ConfigError unless there is a step and `shrink` is above 0 and at most 1.
    """
    check_int("steps", steps, 1, None, ConfigError)
    if not 0 < shrink <= 1 or not int(steps * shrink):
        raise ConfigError(f"shrink must be at most 1 and leave one of {steps} steps: got {shrink}")
    low_P, high_P = jnp.minimum(bounds.low, 0.0), jnp.maximum(bounds.high, 0.0)
    return GridObserver(
        non_finite_P=jnp.zeros(low_P.shape, jnp.int32),
        low_P=low_P,
        high_P=high_P,
        error_KP=jnp.zeros((int(steps * shrink), *low_P.shape), jnp.float32),
        granularity=granularity,
        qrange=qrange,
        symmetric=symmetric,
        power=power,
        steps=steps,
    )


@jax.jit
def observe(state: State, x: jax.Array, mask: jax.Array | None = None) -> State:
    """Return the state after one more array.

    mask: bool, which elements to observe, by default all; broadcasts against x from the left (such
    as `[B, T]` for activations `[B, T, D]`).
    """
    if not x.size:
        return state
    mask = jnp.ones((), bool) if mask is None else mask
    mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
    after: State = state.update(x.astype(jnp.float32), jnp.broadcast_to(mask, x.shape))
    return after


def check_finite(state: Observer, path: str) -> None:
    """Raise NonFiniteError, naming `path`, if NaN or infinity was observed."""
    bad_P = np.asarray(state.non_finite_P)
    if bad_P.any():
        first = tuple(map(int, np.argwhere(bad_P)[0]))
        where = f", the first in {'x'.join(map(str, bad_P.shape))} at {first}" if first else ""
        raise NonFiniteError(
            f"{path}: {int(bad_P.astype(np.int64).sum()):,} NaN or infinite numbers were"
            f" observed{where}"
        )


def finite_mask(
    x: jax.Array, mask: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return a mask of the finite `mask` elements, and the count of others, int32 `[*P]`."""
    sound = jnp.isfinite(x)
    return sound & mask, (~sound & mask).sum(axes, dtype=jnp.int32)


def add_saturating(before_P: jax.Array, more_P: jax.Array) -> jax.Array:
    """Add counts, saturating instead of overflowing."""
    return jnp.minimum(before_P, MAX_COUNT) + jnp.minimum(more_P, MAX_COUNT)


def _make_min_max(
    shape: tuple[int, ...], granularity: Granularity, averaging_constant: float | None
) -> MinMaxObserver:
    P = granularity.scales_shape(shape)
    return MinMaxObserver(
        non_finite_P=jnp.zeros(P, jnp.int32),
        low_P=jnp.full(P, jnp.inf, jnp.float32),
        high_P=jnp.full(P, -jnp.inf, jnp.float32),
        granularity=granularity,
        averaging_constant=averaging_constant,
    )


def _update_average(old_P: jax.Array, new_P: jax.Array, constant: float) -> jax.Array:
    """Return `old + constant * (new - old)`; if one of them is not finite, the other."""
    mean_P = old_P + constant * (new_P - old_P)
    met_P = jnp.where(jnp.isfinite(old_P), mean_P, new_P)
    return jnp.where(jnp.isfinite(new_P), met_P, old_P)
