"""Integers for real numbers: what shares a scale, and the scale and zero point that a range has.

`x` is stood for by `q = clip(round(x / scale) + zero, least, most)`, which means
`(q - zero) * scale`. Zero is always one of the numbers that can be meant.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.whole import whole

EPS = float(np.finfo(np.float32).eps)  # the least scale that there is, as in torch.ao


@dataclasses.dataclass(frozen=True)
class Per:
    """What of an array has a scale of its own.

    axes: each index along these axes (ascending; may count from the end). group: of the last of
    them, so many consecutive indices together. `Per()` is one scale for all; `Per((0,))` one for
    each row of a weight `[O, I]`, `Per((0, 1), 64)` one for each 64 of its columns; `Per((-1,))`
    one for each channel of activations `[..., D]`.
    """

    axes: tuple[int, ...] = ()
    group: int | None = None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """P: the shape of the scales of an array of `shape`.

        Raises ConfigError for an axis that is not there and for a group that does not divide.
        """
        kept = tuple(shape[axis] for axis in self._axes(shape))
        if self.group is None:
            return kept
        if not kept or self.group < 1 or kept[-1] % self.group:
            raise ConfigError(f"groups of {self.group} do not divide axes {self.axes} of {shape}")
        return (*kept[:-1], kept[-1] // self.group)

    def split(self, x: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
        """x with groups in an axis of their own, and the axes over which a scale is shared.

        Reduced over these, it has shape P; nothing is moved.
        """
        self.shape(x.shape)
        kept, shape = self._axes(x.shape), list(x.shape)
        shared = [axis for axis in range(x.ndim) if axis not in kept]
        if self.group is not None:
            last = kept[-1]
            shape[last : last + 1] = [shape[last] // self.group, self.group]
            shared = sorted([last + 1, *(axis + (axis > last) for axis in shared)])
        return x.reshape(shape), tuple(shared)

    def spread(self, values_P: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Values `[*P]` so that they broadcast against an array of `shape`."""
        axes = self._axes(shape)
        if self.group is not None:
            values_P = jnp.repeat(values_P, self.group, axis=-1)
        return values_P.reshape([n if axis in axes else 1 for axis, n in enumerate(shape)])

    def _axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axes = tuple(axis % len(shape) if shape else axis for axis in self.axes)
        there = all(-len(shape) <= axis < len(shape) for axis in self.axes)
        if not there or list(axes) != sorted(set(axes)):
            raise ConfigError(f"{self.axes} are no ascending axes of an array {shape}")
        return axes


TENSOR = Per()
CHANNEL = Per((-1,))
ROW = Per((0,))


class Range(NamedTuple):
    """The least and the greatest number that are to be met, float32 `[*P]`; inf, -inf for none."""

    low: jax.Array
    high: jax.Array


class Levels(NamedTuple):
    """The least and the greatest integer."""

    least: int
    most: int


class Parameters(NamedTuple):
    """scale: float32 `[*P]`, positive. zero: int32 `[*P]`, the integer that means 0."""

    scale: jax.Array
    zero: jax.Array


def levels(bits: int, *, symmetric: bool) -> Levels:
    """The integers of so many bits: -128 to 127 for 8, but symmetric ones -127 to 127.

    Raises ConfigError unless there are 2 to 16 bits.
    """
    half = 1 << (whole("bits", bits, 2, 16, ConfigError) - 1)
    return Levels(1 - half if symmetric else -half, half - 1)


@partial(jax.jit, static_argnames=("to", "symmetric"))
def parameters(found: Range, to: Levels, *, symmetric: bool) -> Parameters:
    """Scales and zero points with which the integers `to` cover the range and 0.

    Those of torch.ao.quantization's observers. affine: `scale = (high - low) / (most - least)`.
    symmetric: the zero point is 0 and `scale = max(-low, high) / ((most - least) / 2)`. A scale is
    at least `EPS`; where nothing was met it is 1.
    """
    steps = float(to.most - to.least)
    low, high = jnp.minimum(found.low, 0.0), jnp.maximum(found.high, 0.0)
    met = found.low <= found.high
    if symmetric:
        scale = jnp.maximum(jnp.maximum(-low, high) / (steps / 2), EPS)
        zero = jnp.zeros_like(scale)
    else:
        scale = jnp.maximum((high - low) / steps, EPS)
        zero = jnp.clip(to.least - jnp.round(low / scale), to.least, to.most)
    return Parameters(jnp.where(met, scale, 1.0), jnp.where(met, zero, 0).astype(jnp.int32))


@partial(jax.jit, static_argnames="to")
def codes(x: jax.Array, given: Parameters, to: Levels) -> jax.Array:
    """The integers that stand for x, int32; the parameters broadcast against it.

    Divided by the scale, as `weights.leaves.integers` divides: times its inverse, one code in a
    thousand would be another.
    """
    steps = jnp.round(x.astype(jnp.float32) / given.scale) + given.zero.astype(jnp.float32)
    return jnp.clip(steps, to.least, to.most).astype(jnp.int32)


@partial(jax.jit, static_argnames="to")
def rounded(x: jax.Array, given: Parameters, to: Levels) -> jax.Array:
    """The numbers that the integers for x mean, float32."""
    return (codes(x, given, to) - given.zero).astype(jnp.float32) * given.scale
