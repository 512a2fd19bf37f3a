"""Observers: find the range of values that integers should cover, and its scale and zero point.

`x` is encoded as `q = clip(round(x / scale) + zero, minimum, maximum)` and decoded as
`(q - zero) * scale`. Zero is always representable.

An observer is a small pytree: call `state = observe(state, x)` for each array of a stream, then
`state.range()` returns the range for `find_qparams`. All of it works inside `jit` and `lax.scan`;
`jax.vmap` makes one observer per channel or row. NaN and infinity are excluded from ranges and
counted; `check_finite` raises if there were any. `histograms` has the histogram observer.
"""

from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import NonFiniteError

MAX_COUNT = 1 << 30  # largest count of NaN and infinities: adding another array cannot overflow
GRID_STEPS, GRID_RANGES, GRID_POWER = 100, 80, 2.4  # of the grid search, as in GPTQ's `quant.py`
MIN_SCALE = float(np.finfo(np.float32).eps)  # smallest scale, as in torch.ao


class Range(NamedTuple):
    """The smallest and largest value to represent, float32 scalars; inf, -inf for none."""

    low: jax.Array
    high: jax.Array


class QRange(NamedTuple):
    """The smallest and largest integer."""

    minimum: int
    maximum: int


class QParams(NamedTuple):
    """scale: float32, positive. zero: zero point, int32."""

    scale: jax.Array
    zero: jax.Array


@partial(jax.jit, static_argnames=("qrange", "symmetric"))
def find_qparams(bounds: Range, qrange: QRange, *, symmetric: bool) -> QParams:
    """Return scale and zero point such that the integers `qrange` cover the range and 0.

    As torch.ao.quantization's observers. Affine: `scale = (high - low) / (maximum - minimum)`.
    Symmetric: the zero point is 0 and `scale = max(-low, high) / ((maximum - minimum) / 2)`. A
    scale is at least `MIN_SCALE`, and 1 for an empty range.
    """
    steps = float(qrange.maximum - qrange.minimum)
    low, high = jnp.minimum(bounds.low, 0.0), jnp.maximum(bounds.high, 0.0)
    is_empty = bounds.low > bounds.high
    if symmetric:
        scale = jnp.maximum(jnp.maximum(-low, high) / (steps / 2), MIN_SCALE)
        zero = jnp.zeros_like(scale)
    else:
        scale = jnp.maximum((high - low) / steps, MIN_SCALE)
        zero = jnp.clip(qrange.minimum - jnp.round(low / scale), qrange.minimum, qrange.maximum)
    return QParams(jnp.where(is_empty, 1.0, scale), jnp.where(is_empty, 0, zero).astype(jnp.int32))


@partial(jax.jit, static_argnames="qrange")
def quantize(x: jax.Array, qparams: QParams, qrange: QRange) -> jax.Array:
    """Quantize x to int32 codes; `qparams` must broadcast against x.

    Divides by the scale as `weights.types.int_weight` does: multiplying by the inverse would change
    one code in a thousand.
    """
    steps = jnp.round(x.astype(jnp.float32) / qparams.scale) + qparams.zero.astype(jnp.float32)
    return jnp.clip(steps, qrange.minimum, qrange.maximum).astype(jnp.int32)


@partial(jax.jit, static_argnames="qrange")
def fake_quantize(x: jax.Array, qparams: QParams, qrange: QRange) -> jax.Array:
    """Quantize and dequantize x, float32."""
    return (quantize(x, qparams, qrange) - qparams.zero).astype(jnp.float32) * qparams.scale


class Observer(struct.PyTreeNode):
    """Base class of observers.

    non_finite: int32, number of NaN and infinities seen, saturating near `MAX_COUNT`.
    """

    non_finite: jax.Array

    def update(self, x: jax.Array) -> Any:
        """Return the state after the float32 array x."""
        raise NotImplementedError

    def count_non_finite(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a mask of the finite elements, and `non_finite` with the others added."""
        finite = jnp.isfinite(x)
        more = (~finite).sum(dtype=jnp.int32)
        return finite, jnp.minimum(self.non_finite, MAX_COUNT) + jnp.minimum(more, MAX_COUNT)


State = TypeVar("State", bound=Observer)


class MinMaxObserver(Observer):
    """Minimum and maximum, of all arrays or as a moving average (torch's MinMaxObserver and
    MovingAverageMinMaxObserver).

    low, high: float32; inf and -inf before any value. averaging_constant: the constant c of
    `low += c * (the array's minimum - low)`, which starts at the first array's; None for the
    minimum of all arrays.
    """

    low: jax.Array
    high: jax.Array
    averaging_constant: float | None = struct.field(pytree_node=False)

    def range(self) -> Range:
        return Range(self.low, self.high)

    def update(self, x: jax.Array) -> "MinMaxObserver":
        finite, non_finite = self.count_non_finite(x)
        low = jnp.where(finite, x, jnp.inf).min()
        high = jnp.where(finite, x, -jnp.inf).max()
        if self.averaging_constant is None:
            low, high = jnp.minimum(low, self.low), jnp.maximum(high, self.high)
        else:
            low = _update_average(self.low, low, self.averaging_constant)
            high = _update_average(self.high, high, self.averaging_constant)
        return self.replace(low=low, high=high, non_finite=non_finite)


class GridObserver(Observer):
    """Grid search over shrinking ranges by rounding error, in a second pass over the stream.

    low, high: the range of the first pass. error_K: float32, the sum of
    `|x - rounded x| ** 2.4` for range k, which is `1 - k / GRID_STEPS` times the full one.
    """

    low: jax.Array
    high: jax.Array
    error_K: jax.Array
    qrange: QRange = struct.field(pytree_node=False)
    symmetric: bool = struct.field(pytree_node=False)

    def range(self) -> Range:
        """Return the range with the least error, the widest of several."""
        return self._shrink(self.error_K.argmin())

    def _shrink(self, k: jax.Array) -> Range:
        share = 1 - k.astype(jnp.float32) / GRID_STEPS
        return Range(share * self.low, share * self.high)

    def update(self, x: jax.Array) -> "GridObserver":
        finite, non_finite = self.count_non_finite(x)
        x = jnp.where(finite, x, 0.0)

        def error(k: jax.Array) -> jax.Array:
            qparams = find_qparams(self._shrink(k), self.qrange, symmetric=self.symmetric)
            return (jnp.abs(fake_quantize(x, qparams, self.qrange) - x) ** GRID_POWER).sum()

        return self.replace(
            error_K=self.error_K + jax.lax.map(error, jnp.arange(self.error_K.shape[0])),
            non_finite=non_finite,
        )


def min_max(averaging_constant: float | None = None) -> MinMaxObserver:
    """Return an observer of minimum and maximum, or of their moving averages."""
    low, high = jnp.float32(jnp.inf), jnp.float32(-jnp.inf)
    return MinMaxObserver(jnp.int32(0), low, high, averaging_constant)


def grid_search(bounds: Range, qrange: QRange, *, symmetric: bool) -> GridObserver:
    """Return an observer that searches the range with the least rounding error.

    It tries 80 ranges, as GPTQ's `quant.py` does. bounds: the widest range, from another observer.
    """
    return GridObserver(
        non_finite=jnp.int32(0),
        low=jnp.minimum(bounds.low, 0.0),
        high=jnp.maximum(bounds.high, 0.0),
        error_K=jnp.zeros(GRID_RANGES, jnp.float32),
        qrange=qrange,
        symmetric=symmetric,
    )


@jax.jit
def observe(state: State, x: jax.Array) -> State:
    """Return the state after one more array."""
    after: State = state.update(x.astype(jnp.float32)) if x.size else state
    return after


def check_finite(state: Observer, path: str) -> None:
    """Raise NonFiniteError, naming `path`, if NaN or infinity was observed."""
    if count := int(state.non_finite):
        raise NonFiniteError(f"{path}: {count:,} NaN or infinite numbers were observed")


def _update_average(old: jax.Array, new: jax.Array, constant: float) -> jax.Array:
    """Return `old + constant * (new - old)`; if one of them is not finite, the other."""
    mean = old + constant * (new - old)
    mean = jnp.where(jnp.isfinite(old), mean, new)
    return jnp.where(jnp.isfinite(new), mean, old)
