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
from jaxllm.weights.leaves.integers import Integer, QTensor
from jaxllm.weights.leaves.leaf import Format, Linear, Shape, check_finite
from jaxllm.weights.leaves.wrapped import Wrapped, WrappedFormat, inner_of

KIND = "static/"
LEAST, MOST = -127, 127  # input codes that the kernels can multiply


class Static(Wrapped, struct.PyTreeNode):
    """A matrix `[O, I]` that multiplies int8 inputs."""

    kind = KIND

    weight: QTensor  # 8 bits without a zero point
    step: jax.Array  # float32 scalar, positive
    zero: jax.Array  # int32 scalar, the code of 0
    sum: jax.Array  # float32 [O], the row sums of the weight

    @classmethod
    def of(cls, weight: QTensor, step: Any, zero: Any) -> "Static":
        """Return the weight with an input grid."""
        total_O = weight.dense().sum(-1)
        return cls(weight, jnp.asarray(step, jnp.float32), jnp.asarray(zero, jnp.int32), total_O)

    def dense(self, dtype: Any = None) -> jax.Array:
        return self.weight.dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        return self.weight.take(index)

    def codes(self, x: jax.Array) -> jax.Array:
        """Return the nearest input codes, int8 (half to even)."""
        steps = jnp.round(x.astype(jnp.float32) / self.step) + self.zero.astype(jnp.float32)
        return jnp.clip(steps, LEAST, MOST).astype(jnp.int8)

    def rounded(self, x: jax.Array) -> jax.Array:
        """Return the quantized inputs as float32."""
        steps = self.codes(x).astype(jnp.float32) - self.zero.astype(jnp.float32)
        return steps * self.step

    def product(self, x_RI: jax.Array) -> jax.Array:
        return self.weight.product(self.rounded(x_RI))

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        product_RO = linear(self.codes(x_RI), self.weight)
        return (product_RO - (self.zero.astype(jnp.float32) * self.sum)[None]) * self.step

    def with_rows(self, index: np.ndarray) -> "Static":
        return self.replace(weight=self.weight.with_rows(index), sum=self.sum[..., index])

    def with_columns(self, begin: int, end: int) -> "Static":
        return Static.of(self.weight.with_columns(begin, end), self.step, self.zero)

    def with_more(self, after: Sequence["Static"], axis: int) -> "Static":
        weight = self.weight.with_more([x.weight for x in after], axis)
        if axis:
            return Static.of(weight, self.step, self.zero)
        sums = [x.sum for x in (self, *after)]
        return self.replace(weight=weight, sum=jnp.concatenate(sums, axis=-1))

    def beside(self) -> dict[str, jax.Array]:
        return {".step": self.step, ".zero": self.zero, ".sum": self.sum}


class StaticFormat(WrappedFormat):
    """The format of `Static`."""

    kind = KIND
    lacking = (
        "cannot be made without calibration of its inputs; use jaxllm compress with activations:"
        " static"
    )

    def beside(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        return {
            ".step": ((), np.float32),
            ".zero": ((), np.int32),
            ".sum": (shape[:-1], np.float32),
        }

    def around(self, weight: Any, pieces: Mapping[str, Any]) -> Static:
        return Static(weight, **{name: pieces[f".{name}"] for name in ("step", "zero", "sum")})

    def check(self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]) -> None:
        step, zero = pieces[".step"], pieces[".zero"]
        if not (np.isfinite(step) and step > 0 and LEAST <= zero <= MOST):
            raise CheckpointError(f"{path} has an invalid input grid: step {step}, zero {zero}")
        check_finite(path, pieces, ".sum")


def parse(name: str, inner: Callable[[str], Format]) -> StaticFormat | None:
    """Parse `static/int8` and `static/int8-g64`; None for other names.

    Raises:
        ConfigError: for any other inner format than 8 bits without a zero point.
    """
    stored = inner_of(name, KIND, inner)
    if stored is None:
        return None
    if not fits(stored):
        raise ConfigError(f"{name:.40}: format after {KIND} must be int8 without a zero point")
    return StaticFormat(stored)


def fits(format: Format) -> bool:
    """Return whether weights of this format can have int8 inputs on a static grid."""
    return isinstance(format, Integer) and format.bits == 8 and not format.zero_point
