"""Affine quantization parameters: granularity, and the scale and zero point of a range.

`x` is encoded as `q = clip(round(x / scale) + zero, least, most)` and decoded as
`(q - zero) * scale`. Zero is always representable.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.runtime.validation import check_int

MIN_SCALE = float(np.finfo(np.float32).eps)  # smallest scale, as in torch.ao


@dataclasses.dataclass(frozen=True)
class Granularity:
    """Granularity of scales: which elements of an array share one.

    axes: a scale for each index along these axes (ascending; may count from the end). group: number
    of consecutive indices of the last of them that share a scale. `Granularity()` is one scale per
    tensor; `Granularity((0,))` one per row of a weight `[O, I]`, `Granularity((0, 1), 64)` one per
    64 columns of a row; `Granularity((-1,))` one per channel of activations `[..., D]`.
    """

    axes: tuple[int, ...] = ()
    group: int | None = None

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return P, the shape of the scales for an array of `scales_shape`.

        Raises ConfigError for a missing axis, or a group that does not divide the last axis.
        """
        kept = tuple(shape[axis] for axis in self._axes(shape))
        if self.group is None:
            return kept
        if not kept or self.group < 1 or kept[-1] % self.group:
            raise ConfigError(f"group of {self.group} does not divide axes {self.axes} of {shape}")
        return (*kept[:-1], kept[-1] // self.group)

    def split(self, x: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
        """Reshape x so that groups are an axis, and return the axes that share a scale.

        Reducing over these axes gives shape P; no data moves.
        """
        self.scales_shape(x.shape)
        kept, shape = self._axes(x.shape), list(x.shape)
        shared = [axis for axis in range(x.ndim) if axis not in kept]
        if self.group is not None:
            last = kept[-1]
            shape[last : last + 1] = [shape[last] // self.group, self.group]
            shared = sorted([last + 1, *(axis + (axis > last) for axis in shared)])
        return x.reshape(shape), tuple(shared)

    def broadcast(self, values_P: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Reshape values `[*P]` to broadcast against an array of `scales_shape`."""
        axes = self._axes(shape)
        if self.group is not None:
            values_P = jnp.repeat(values_P, self.group, axis=-1)
        return values_P.reshape([n if axis in axes else 1 for axis, n in enumerate(shape)])

    def _axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axes = tuple(axis % len(shape) if shape else axis for axis in self.axes)
        there = all(-len(shape) <= axis < len(shape) for axis in self.axes)
        if not there or list(axes) != sorted(set(axes)):
            raise ConfigError(f"axes {self.axes} are not ascending axes of an array {shape}")
        return axes


TENSOR = Granularity()
CHANNEL = Granularity((-1,))
ROW = Granularity((0,))


class Range(NamedTuple):
    """The smallest and largest value to represent, float32 `[*P]`; inf, -inf for none."""

    low: jax.Array
    high: jax.Array


class QRange(NamedTuple):
    """The smallest and largest integer."""

    minimum: int
    maximum: int


class QParams(NamedTuple):
    """scale: float32 `[*P]`, positive. zero: zero point, int32 `[*P]`."""

    scale: jax.Array
    zero: jax.Array


def integer_range(bits: int, *, symmetric: bool) -> QRange:
    """Return the integer range for a number of bits: -128 to 127 for 8; -127 to 127 if symmetric.

    Raises ConfigError unless there are 2 to 16 bits.
    """
    half = 1 << (check_int("bits", bits, 2, 16, ConfigError) - 1)
    return QRange(1 - half if symmetric else -half, half - 1)


@partial(jax.jit, static_argnames=("qrange", "symmetric"))
def find_qparams(bounds: Range, qrange: QRange, *, symmetric: bool) -> QParams:
    """Return scales and zero points such that the integers `qrange` cover the range and 0.

    As torch.ao.quantization's observers. Affine: `scale = (high - low) / (most - least)`.
    Symmetric: the zero point is 0 and `scale = max(-low, high) / ((most - least) / 2)`. A scale is
    at least `MIN_SCALE`, and 1 for an empty range.
    """
    steps = float(qrange.maximum - qrange.minimum)
    low, high = jnp.minimum(bounds.low, 0.0), jnp.maximum(bounds.high, 0.0)
    met = bounds.low <= bounds.high
    if symmetric:
        scale = jnp.maximum(jnp.maximum(-low, high) / (steps / 2), MIN_SCALE)
        zero = jnp.zeros_like(scale)
    else:
        scale = jnp.maximum((high - low) / steps, MIN_SCALE)
        zero = jnp.clip(qrange.minimum - jnp.round(low / scale), qrange.minimum, qrange.maximum)
    return QParams(jnp.where(met, scale, 1.0), jnp.where(met, zero, 0).astype(jnp.int32))


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
