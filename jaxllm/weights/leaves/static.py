"""Integer weights whose inputs are rounded to int8 on a grid that was found beforehand.

The product is of integers with integers: with input codes q, `x' = step (q - zero)` and
`x' @ w.T = step (q @ w.T - zero sum_i w_i)`, where the sums of the weight's rows are known.
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
LEAST, MOST = -127, 127  # codes of inputs: what the kernels multiply


class Static(Wrapped, struct.PyTreeNode):
    """A matrix `[O, I]` that multiplies its inputs as integers (W8A8, static quantization).

    weight: 8 bits without a zero point. step: float32 scalar, positive. zero: int32 scalar, the
    code of 0. sum: float32 `[O]`, of each row of the weight.
    """

    kind = KIND

    weight: QTensor
    step: jax.Array
    zero: jax.Array
    sum: jax.Array

    @classmethod
    def of(cls, weight: QTensor, step: Any, zero: Any) -> "Static":
        """Of a weight and a grid for its inputs."""
        total_O = weight.dense().sum(-1)
        return cls(weight, jnp.asarray(step, jnp.float32), jnp.asarray(zero, jnp.int32), total_O)

    def dense(self, dtype: Any = None) -> jax.Array:
        return self.weight.dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        return self.weight.take(index)

    def codes(self, x: jax.Array) -> jax.Array:
        """The nearest codes of inputs, int8 (half to even)."""
        steps = jnp.round(x.astype(jnp.float32) / self.step) + self.zero.astype(jnp.float32)
        return jnp.clip(steps, LEAST, MOST).astype(jnp.int8)

    def rounded(self, x: jax.Array) -> jax.Array:
        """What inputs are rounded to, float32."""
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
        "weights do not say what their inputs are like; calibration does, as jaxllm compress has it"
        " (activations: static)"
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
            raise CheckpointError(f"{path} has no grid for its inputs: step {step}, zero {zero}")
        check_finite(path, pieces, ".sum")


def parse(name: str, inner: Callable[[str], Format]) -> StaticFormat | None:
    """`static/int8`, `static/int8-g64`; None for other names.

    Raises ConfigError for what is not of 8 bits without a zero point.
    """
    stored = inner_of(name, KIND, inner)
    if stored is None:
        return None
    if not fits(stored):
        raise ConfigError(f"{name:.40}: inputs are rounded for int8 without a zero point alone")
    return StaticFormat(stored)


def fits(format: Format) -> bool:
    """Whether weights of a format can have their inputs rounded so."""
    return isinstance(format, Integer) and format.bits == 8 and not format.zero_point
