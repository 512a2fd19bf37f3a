"""Observers of activations or weights, which find the range that integers should cover.

An observer is a small pytree: call `state = observe(state, x)` for each array of a stream, then
`state.range()` returns the range for `ranges.parameters`. All of it works inside `jit` and
`lax.scan`. NaN and infinity are excluded from ranges and counted; `check` raises if there were any.
`histograms` has the histogram observer.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.compress.observe.ranges import (
    TENSOR,
    Levels,
    Parameters,
    Per,
    Range,
    parameters,
    rounded,
)
from jaxllm.errors import ConfigError, NonFiniteError
from jaxllm.whole import whole

MOST = 1 << 30  # largest count of NaN and infinities: adding another array cannot overflow


class Observer(struct.PyTreeNode):
    """Base class of observers.

    non_finite_P: int32, number of NaN and infinities seen, saturating near `MOST`.
    """

    non_finite_P: jax.Array

    def after(self, x: jax.Array, real: jax.Array) -> Any:
        """Return the state after x. real: bool, of x's shape, which elements to observe."""
        raise NotImplementedError


State = TypeVar("State", bound=Observer)


class Extremes(Observer):
    """Minimum and maximum, of all arrays or as a moving average.

    low_P, high_P: float32; inf and -inf before any value. averaging: the constant c of
    `low += c * (the array's minimum - low)`, which starts at the first array's; None for the
    minimum of all arrays.
    """

    low_P: jax.Array
    high_P: jax.Array
    per: Per = struct.field(pytree_node=False)
    averaging: float | None = struct.field(pytree_node=False)

    def range(self) -> Range:
        return Range(self.low_P, self.high_P)

    def after(self, x: jax.Array, real: jax.Array) -> "Extremes":
        (x, shared), (real, _) = self.per.split(x), self.per.split(real)
        met, bad_P = finite(x, real, shared)
        low_P = jnp.where(met, x, jnp.inf).min(shared)
        high_P = jnp.where(met, x, -jnp.inf).max(shared)
        if self.averaging is not None:
            low_P = _averaged(self.low_P, low_P, self.averaging)
            high_P = _averaged(self.high_P, high_P, self.averaging)
        return self.replace(
            low_P=jnp.minimum(low_P, self.low_P) if self.averaging is None else low_P,
            high_P=jnp.maximum(high_P, self.high_P) if self.averaging is None else high_P,
            non_finite_P=counted(self.non_finite_P, bad_P),
        )


class Grid(Observer):
    """Grid search over shrinking ranges by rounding error, in a second pass over the stream.

    low_P, high_P: the range of the first pass. error_KP: float32, the sum of
    `|x - rounded x| ** power` for range k, which is `1 - k / steps` times the full one.
    """

    low_P: jax.Array
    high_P: jax.Array
    error_KP: jax.Array
    per: Per = struct.field(pytree_node=False)
    levels: Levels = struct.field(pytree_node=False)
    symmetric: bool = struct.field(pytree_node=False)
    power: float = struct.field(pytree_node=False)
    steps: int = struct.field(pytree_node=False)

    def range(self) -> Range:
        """Return the range with the least error, the widest of several."""
        shrunk_P = 1 - self.error_KP.argmin(0).astype(jnp.float32) / self.steps
        return Range(shrunk_P * self.low_P, shrunk_P * self.high_P)

    def after(self, x: jax.Array, real: jax.Array) -> "Grid":
        (x, shared), (real, _) = self.per.split(x), self.per.split(real)
        met, bad_P = finite(x, real, shared)
        x = jnp.where(met, x, 0.0)

        def error(k: jax.Array) -> jax.Array:
            shrunk = 1 - k.astype(jnp.float32) / self.steps
            wanted = Range(shrunk * self.low_P, shrunk * self.high_P)
            found = parameters(wanted, self.levels, symmetric=self.symmetric)
            given = Parameters(*(jnp.expand_dims(value_P, shared) for value_P in found))
            return (jnp.abs(rounded(x, given, self.levels) - x) ** self.power).sum(shared)

        error_KP = jax.lax.map(error, jnp.arange(self.error_KP.shape[0]))
        return self.replace(
            error_KP=self.error_KP + error_KP,
            non_finite_P=counted(self.non_finite_P, bad_P),
        )


def min_max(shape: tuple[int, ...], per: Per = TENSOR) -> Extremes:
    """Return an observer of minimum and maximum (torch's MinMaxObserver).

    shape: of the arrays; only the axes of `per` must agree. Raises what `Per.shape` raises.
    """
    return _extremes(shape, per, None)


def moving_average(
    shape: tuple[int, ...], per: Per = TENSOR, *, constant: float = 0.01
) -> Extremes:
    """Return an observer of moving averages (torch's MovingAverageMinMaxObserver).

    constant: torch's `averaging_constant`. Raises ConfigError unless it is above 0 and at most 1,
    and what `Per.shape` raises.
    """
    if not 0 < constant <= 1:
        raise ConfigError(f"averaging constant must be above 0 and at most 1: got {constant}")
    return _extremes(shape, per, float(constant))


def grid(
    found: Range,
    levels: Levels,
    *,
    symmetric: bool,
    per: Per = TENSOR,
    steps: int = 100,
    shrink: float = 0.8,
    power: float = 2.4,
) -> Grid:
    """Return an observer that searches the range with the least rounding error.

    It tries `int(steps * shrink)` ranges by the error `|x - rounded x| ** power`, as GPTQ's
    `quant.py`, with its defaults. found: the widest range, from another observer with the same
    `per`.

    Raises ConfigError unless there is a step and `shrink` is above 0 and at most 1.
    """
    whole("steps", steps, 1, None, ConfigError)
    if not 0 < shrink <= 1 or not int(steps * shrink):
        raise ConfigError(f"shrink must be at most 1 and leave one of {steps} steps: got {shrink}")
    low_P, high_P = jnp.minimum(found.low, 0.0), jnp.maximum(found.high, 0.0)
    return Grid(
        non_finite_P=jnp.zeros(low_P.shape, jnp.int32),
        low_P=low_P,
        high_P=high_P,
        error_KP=jnp.zeros((int(steps * shrink), *low_P.shape), jnp.float32),
        per=per,
        levels=levels,
        symmetric=symmetric,
        power=power,
        steps=steps,
    )


@jax.jit
def observe(state: State, x: jax.Array, real: jax.Array | None = None) -> State:
    """Return the state after one more array.

    real: bool, which elements to observe, by default all; broadcasts against x from the left (such
    as `[B, T]` for activations `[B, T, D]`).
    """
    if not x.size:
        return state
    real = jnp.ones((), bool) if real is None else real
    real = real.reshape(*real.shape, *[1] * (x.ndim - real.ndim))
    after: State = state.after(x.astype(jnp.float32), jnp.broadcast_to(real, x.shape))
    return after


def check(state: Observer, path: str) -> None:
    """Raise NonFiniteError, naming `path`, if NaN or infinity was observed."""
    bad_P = np.asarray(state.non_finite_P)
    if bad_P.any():
        first = tuple(map(int, np.argwhere(bad_P)[0]))
        where = f", the first in {'x'.join(map(str, bad_P.shape))} at {first}" if first else ""
        raise NonFiniteError(
            f"{path}: {int(bad_P.astype(np.int64).sum()):,} NaN or infinite numbers were"
            f" observed{where}"
        )


def finite(x: jax.Array, real: jax.Array, shared: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return a mask of the finite `real` elements, and the count of others, int32 `[*P]`."""
    sound = jnp.isfinite(x)
    return sound & real, (~sound & real).sum(shared, dtype=jnp.int32)


def counted(before_P: jax.Array, more_P: jax.Array) -> jax.Array:
    """Add counts, saturating instead of overflowing."""
    return jnp.minimum(before_P, MOST) + jnp.minimum(more_P, MOST)


def _extremes(shape: tuple[int, ...], per: Per, averaging: float | None) -> Extremes:
    P = per.shape(shape)
    return Extremes(
        non_finite_P=jnp.zeros(P, jnp.int32),
        low_P=jnp.full(P, jnp.inf, jnp.float32),
        high_P=jnp.full(P, -jnp.inf, jnp.float32),
        per=per,
        averaging=averaging,
    )


def _averaged(old_P: jax.Array, new_P: jax.Array, constant: float) -> jax.Array:
    """Return `old + constant * (new - old)`; if one of them is not finite, the other."""
    mean_P = old_P + constant * (new_P - old_P)
    met_P = jnp.where(jnp.isfinite(old_P), mean_P, new_P)
    return jnp.where(jnp.isfinite(new_P), met_P, old_P)
