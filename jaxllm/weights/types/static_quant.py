"""Integer weights whose inputs are quantized to int8 on a calibrated grid (static W8A8).

The product is integer: with input codes q, `x' = step (q - zero)` and
`x' @ w.T = step (q @ w.T - zero sum_i w_i)`, where the row sums of the weight are stored.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.types.base import Format, LinearFn, PartialShape, check_finite
from jaxllm.weights.types.int_quant import IntFormat, QTensor
from jaxllm.weights.types.wrapper import WeightWrapper, WrapperFormat, parse_inner

PREFIX = "static/"
MIN_CODE, MAX_CODE = -127, 127  # input codes that the kernels can multiply


class StaticQuantWeight(WeightWrapper, struct.PyTreeNode):
    """A matrix `[O, I]` that multiplies int8 inputs."""

    format_prefix = PREFIX

    weight: QTensor  # 8 bits without a zero point
    step: jax.Array  # float32 scalar, positive
    zero: jax.Array  # int32 scalar, the code of 0
    sum: jax.Array  # float32 [O], the row sums of the weight

    @classmethod
    def from_grid(cls, weight: QTensor, step: Any, zero: Any) -> "StaticQuantWeight":
        """Return the weight with an input grid."""
        total_O = weight.to_dense().sum(-1)
        return cls(weight, jnp.asarray(step, jnp.float32), jnp.asarray(zero, jnp.int32), total_O)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return self.weight.to_dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        return self.weight.take(index)

    def input_codes(self, x: jax.Array) -> jax.Array:
        """Return the nearest input codes, int8 (half to even)."""
        steps = jnp.round(x.astype(jnp.float32) / self.step) + self.zero.astype(jnp.float32)
        return jnp.clip(steps, MIN_CODE, MAX_CODE).astype(jnp.int8)

    def round_inputs(self, x: jax.Array) -> jax.Array:
        """Return the quantized inputs as float32."""
        steps = self.input_codes(x).astype(jnp.float32) - self.zero.astype(jnp.float32)
        return steps * self.step

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        return self.weight.matmul(self.round_inputs(x_RI))

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        product_RO = linear(self.input_codes(x_RI), self.weight)
        return (product_RO - (self.zero.astype(jnp.float32) * self.sum)[None]) * self.step

    def with_rows(self, index: np.ndarray) -> "StaticQuantWeight":
        return self.replace(weight=self.weight.with_rows(index), sum=self.sum[..., index])

    def with_columns(self, begin: int, end: int) -> "StaticQuantWeight":
        return StaticQuantWeight.from_grid(
            self.weight.with_columns(begin, end), self.step, self.zero
        )

    def concatenate(
        self, appended: Sequence["StaticQuantWeight"], axis: int
    ) -> "StaticQuantWeight":
        weight = self.weight.concatenate([x.weight for x in appended], axis)
        if axis:
            return StaticQuantWeight.from_grid(weight, self.step, self.zero)
        sums = [x.sum for x in (self, *appended)]
        return self.replace(weight=weight, sum=jnp.concatenate(sums, axis=-1))

    def extra_arrays(self) -> dict[str, jax.Array]:
        return {".step": self.step, ".zero": self.zero, ".sum": self.sum}


class StaticQuantFormat(WrapperFormat):
    """The format of `StaticQuantWeight`."""

    format_prefix = PREFIX
    missing_info = (
        "cannot be made without calibration of its inputs; use jaxllm compress with activations:"
        " static"
    )

    def extra_specs(self, shape: tuple[int, ...]) -> dict[str, tuple[PartialShape, Any]]:
        return {
            ".step": ((), np.float32),
            ".zero": ((), np.int32),
            ".sum": (shape[:-1], np.float32),
        }

    def wrap(self, weight: Any, arrays: Mapping[str, Any]) -> StaticQuantWeight:
        return StaticQuantWeight(
            weight, **{name: arrays[f".{name}"] for name in ("step", "zero", "sum")}
        )

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        step, zero = arrays[".step"], arrays[".zero"]
        if not (np.isfinite(step) and step > 0 and MIN_CODE <= zero <= MAX_CODE):
            raise CheckpointError(f"{path} has an invalid input grid: step {step}, zero {zero}")
        check_finite(path, arrays, ".sum")


def parse(name: str, inner: Callable[[str], Format]) -> StaticQuantFormat | None:
    """Parse `static/int8` and `static/int8-g64`; None for other names.

    Raises:
        ConfigError: for any other inner format than 8 bits without a zero point.
    """
    stored = parse_inner(name, PREFIX, inner)
    if stored is None:
        return None
    if not supports_static(stored):
        raise ConfigError(f"{name:.40}: format after {PREFIX} must be int8 without a zero point")
    return StaticQuantFormat(stored)


def supports_static(format: Format) -> bool:
    """Return whether weights of this format can have int8 inputs on a static grid."""
    return isinstance(format, IntFormat) and format.bits == 8 and not format.zero_point
