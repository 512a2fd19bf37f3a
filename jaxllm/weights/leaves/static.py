"""Integer weights whose inputs are rounded to int8 on a grid that was found beforehand.

The product is of integers with integers: with input codes q, `x' = step (q - zero)` and
`x' @ w.T = step (q @ w.T - zero sum_i w_i)`, where the sums of the weight's rows are known.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.leaves.integers import Integer, QTensor
from jaxllm.weights.leaves.leaf import Blocks, Format, Leaf, Linear, Shape, on_device

KIND = "static/"
LEAST, MOST = -127, 127  # codes of inputs: what the kernels multiply


class Static(Leaf, struct.PyTreeNode):
    """A matrix `[O, I]` that multiplies its inputs as integers (W8A8, static quantization).

    weight: 8 bits without a zero point. step: float32 scalar, positive. zero: int32 scalar, the
    code of 0. sum: float32 `[O]`, of each row of the weight.
    """

    composed = True

    weight: QTensor
    step: jax.Array
    zero: jax.Array
    sum: jax.Array

    @classmethod
    def of(cls, weight: QTensor, step: Any, zero: Any) -> "Static":
        """Of a weight and a grid for its inputs."""
        total_O = weight.dense().sum(-1)
        return cls(weight, jnp.asarray(step, jnp.float32), jnp.asarray(zero, jnp.int32), total_O)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    @property
    def format(self) -> str:
        return f"{KIND}{self.weight.format}"

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

    def pieces(self) -> dict[str, jax.Array]:
        inner = {f".weight{name}": piece for name, piece in self.weight.pieces().items()}
        return {".step": self.step, ".zero": self.zero, ".sum": self.sum, **inner}


@dataclasses.dataclass(frozen=True)
class StaticFormat:
    """The format of `Static`; inner: that of its weight."""

    inner: Integer

    @property
    def name(self) -> str:
        return f"{KIND}{self.inner.name}"

    @property
    def exact_in(self) -> str:
        return self.inner.exact_in

    def make(self, array: jax.Array) -> NoReturn:
        raise ConfigError(
            f"{self.name}: weights do not say what their inputs are like; calibration does, as"
            " jaxllm compress has it (activations: static)"
        )

    def collect(self, shape: tuple[int, ...], blocks: Blocks) -> NoReturn:
        self.make(jnp.empty(0))

    def expected(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        inner = {f".weight{name}": piece for name, piece in self.inner.expected(shape).items()}
        return {
            ".step": ((), np.float32),
            ".zero": ((), np.int32),
            ".sum": (shape[:-1], np.float32),
            **inner,
        }

    def assemble(
        self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]
    ) -> Static:
        step, zero, total_O = (pieces[name] for name in (".step", ".zero", ".sum"))
        if not (np.isfinite(step) and step > 0 and LEAST <= zero <= MOST):
            raise CheckpointError(f"{path} has no grid for its inputs: step {step}, zero {zero}")
        if not np.isfinite(total_O).all():
            raise CheckpointError(f"{path}.sum holds NaN or infinity")
        inner = {name: pieces[f".weight{name}"] for name in self.inner.expected(shape)}
        device = on_device({"step": step, "zero": zero, "sum": total_O})
        return Static(self.inner.assemble(f"{path}.weight", shape, inner), **device)


def parse(name: str, inner: Callable[[str], Format]) -> StaticFormat | None:
    """`static/int8`, `static/int8-g64`; None for other names.

    Raises ConfigError for what is not of 8 bits without a zero point.
    """
    if not name.startswith(KIND):
        return None
    if "/" in name.removeprefix(KIND):
        raise ConfigError(f"{name:.40}: what has static inputs is of integers")
    stored = inner(name.removeprefix(KIND))
    if not fits(stored):
        raise ConfigError(f"{name:.40}: inputs are rounded for int8 without a zero point alone")
    assert isinstance(stored, Integer)
    return StaticFormat(stored)


def fits(format: Format) -> bool:
    """Whether weights of a format can have their inputs rounded so."""
    return isinstance(format, Integer) and format.bits == 8 and not format.zero_point
