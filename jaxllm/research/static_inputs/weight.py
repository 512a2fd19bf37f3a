"""Integer weights whose inputs are quantized to int8 on a calibrated grid (static W8A8)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.types.base import ArraySpecs, Format, LinearFn, ReadBlocks, check_finite
from jaxllm.weights.types.int_weight import IntFormat, IntWeight
from jaxllm.weights.types.wrapper import WeightWrapper

PREFIX = "static/"
NAMES = ("static/int8",)
MIN_INPUT, MAX_INPUT = -127, 127  # codes of inputs that the kernels can multiply


class StaticWeight(WeightWrapper, struct.PyTreeNode):
    """An int8 weight for inputs on a grid.

    With input codes c the inputs are `step (c - zero)`, and the product is one of integers:
    `x @ w.T = step (c @ w.T - zero sum_i w_i)`.
    """

    format_prefix = PREFIX
    has_parts = False

    weight: IntWeight
    step: jax.Array  # float32 scalar, positive
    zero: jax.Array  # int32 scalar, the code of 0
    sum: jax.Array  # float32 [..., O], of the weight's rows

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return self.weight.to_dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        return self.weight.take(index)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        product_RO = linear(self.input_codes(x_RI), self.weight)
        zero_O = self.zero.astype(jnp.float32) * self.sum
        return (product_RO - zero_O[None]) * self.step

    def input_codes(self, x: jax.Array) -> jax.Array:
        """Return the nearest codes of inputs on the grid, int8 (half to even)."""
        steps = jnp.round(x.astype(jnp.float32) / self.step)
        codes = steps + self.zero.astype(jnp.float32)
        return jnp.clip(codes, MIN_INPUT, MAX_INPUT).astype(jnp.int8)

    def with_rows(self, index: np.ndarray) -> "StaticWeight":
        return self.replace(weight=self.weight.with_rows(index), sum=self.sum[..., index])

    def with_columns(self, begin: int, end: int) -> "StaticWeight":
        return add_input_grid(self.weight.with_columns(begin, end), self.step, self.zero)

    def concatenate(self, appended: Sequence["StaticWeight"], axis: int) -> "StaticWeight":
        weight = self.weight.concatenate([x.weight for x in appended], axis)
        if axis:
            return add_input_grid(weight, self.step, self.zero)
        sums = [x.sum for x in (self, *appended)]
        return self.replace(weight=weight, sum=jnp.concatenate(sums, axis=-1))


def add_input_grid(weight: IntWeight, step: Any, zero: Any) -> StaticWeight:
    """Return the weight for inputs that are quantized on a grid."""
    grid = jnp.asarray(step, jnp.float32), jnp.asarray(zero, jnp.int32)
    return StaticWeight(weight, *grid, weight.to_dense().sum(-1))


def supports_input_grid(format: Format) -> bool:
    """Return whether weights of this format can have int8 inputs on a grid."""
    if not isinstance(format, IntFormat):
        return False
    return format.is_plain and format.bits == 8 and not format.zero_point


@dataclasses.dataclass(frozen=True)
class StaticFormat(Format):
    """The format of `StaticWeight`."""

    inner: IntFormat

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.inner.name}"

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> NoReturn:
        raise ConfigError(
            f"{self.name} cannot be made without calibration of its inputs; use jaxllm compress"
            " with activations: static"
        )

    def array_specs(self, shape: tuple[int, ...]) -> ArraySpecs:
        inner = {f".weight{name}": spec for name, spec in self.inner.array_specs(shape).items()}
        grid: ArraySpecs = {".step": ((), np.float32), ".zero": ((), np.int32)}
        return inner | grid | {".sum": (shape[:-1], np.float32)}

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> StaticWeight:
        inner = self.inner.from_arrays(shape, _inner_arrays(arrays))
        return StaticWeight(inner, *(arrays[name] for name in (".step", ".zero", ".sum")))

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        self.inner.check_arrays(f"{path}.weight", shape, _inner_arrays(arrays))
        check_finite(path, arrays, ".sum")
        step, zero = arrays[".step"], arrays[".zero"]
        if not (np.isfinite(step) and step > 0 and MIN_INPUT <= zero <= MAX_INPUT):
            raise CheckpointError(f"{path} has an invalid input grid: step {step}, zero {zero}")


def _inner_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of the integer weight, under its own names."""
    prefix = ".weight"
    return {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}


def parse(name: str, parse_inner: Callable[[str], Format]) -> StaticFormat | None:
    """Parse `static/int8` and `static/int8-g64`; None for other names.

    Raises:
        ConfigError: for another inner format.
    """
    if not name.startswith(PREFIX):
        return None
    inner = parse_inner(name.removeprefix(PREFIX))
    if not (isinstance(inner, IntFormat) and supports_input_grid(inner)):
        raise ConfigError(f"{name:.40}: format after {PREFIX} must be int8 without a zero point")
    return StaticFormat(inner)
