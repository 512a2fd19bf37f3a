"""The fake-quantized weight, and surrogate gradients of rounding."""

from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.errors import ConfigError
from jaxllm.weights.linear import round_to_int8
from jaxllm.weights.types.arrays import matmul
from jaxllm.weights.types.base import (
    INPUT_BLOCK,
    LinearFn,
    WeightBase,
    group_slice,
    nan_out_of_range,
    round_up,
)
from jaxllm.weights.types.bitpack import CHUNK
from jaxllm.weights.types.int_weight import IntFormat, IntWeight
from jaxllm.weights.types.wrapper import WeightWrapper


@jax.custom_jvp
def with_derivative(value: jax.Array, surrogate: jax.Array) -> jax.Array:
    """Return `value` with the derivative of `surrogate`, an array of the same shape and dtype."""
    return value


@with_derivative.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[1]


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def fake_quantize(
    x: jax.Array, scale: jax.Array, zero: jax.Array, levels: tuple[int, int], factor: float
) -> jax.Array:
    """Return `(clip(round(x / scale) + zero, levels) - zero) * scale`, float32. Its derivative is

    for x: 1 where the code was not clipped, else 0 (straight-through; Bengio et al. 2013);
    for scale: `round(x / scale) - x / scale` there, else the clipped code minus `zero`, all times
    `factor` (LSQ, Esser et al. 2020, equations 2 and 3). The mask is that of PyTorch's
    `_fake_quantize_learnable_per_channel_affine`: clipping is tested after rounding.

    scale, zero: must broadcast with x. A scale of 0 is replaced by 1.
    """
    return (jnp.clip(_unclipped_code(x, scale, zero), *levels) - zero.astype(jnp.float32)) * scale


@fake_quantize.defjvp
def _(levels: tuple[int, int], factor: float, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x, scale, zero), (dx, dscale, _) = primals, tangents
    wide, middle = _unclipped_code(x, scale, zero), zero.astype(jnp.float32)
    code = jnp.clip(wide, *levels)
    inside = code == wide
    slope = code - middle - jnp.where(inside, _divide_scale(x, scale), 0.0)
    passed = jnp.where(inside, dx.astype(jnp.float32), 0.0)
    return fake_quantize(x, scale, zero, levels, factor), passed + slope * (dscale * factor)


def _divide_scale(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) / jnp.where(scale == 0, 1.0, scale)


def _unclipped_code(x: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the code before clipping, as a float."""
    return jnp.round(_divide_scale(x, scale)) + zero.astype(jnp.float32)


class FakeQuantWeight(WeightWrapper, struct.PyTreeNode):
    """A float weight `[..., O, I]` whose products are those of its integers, bit for bit.

    Its gradients are those of a product with the rounded weights and rounded inputs; rounding
    passes them through (`gradient.fake_quantize`).

    Attributes:
        scale: learned scales, float32 `[..., O, G]`; None: computed from the weight, no gradient.
        zero: fixed zero points, uint8 `[..., O, G]`, if `target_format` has them and scales are
            learned.
        start_step: the first training step that rounds, int32 scalar; None: the first of all.
        is_active: whether to round in this step, a bool scalar; None: yes.
        target_format: the integer format.
        dynamic_inputs: whether the model quantizes inputs dynamically (`Precision.int8_inputs`).
    """

    format_prefix = "fake/"
    allows_composite = True
    sliced_fields = ("scale", "zero")
    trainable_fields = ("weight", "scale")

    weight: jax.Array
    scale: jax.Array | None
    zero: jax.Array | None
    start_step: jax.Array | None = None
    is_active: jax.Array | None = None
    target_format: IntFormat = struct.field(pytree_node=False, kw_only=True)
    dynamic_inputs: bool = struct.field(pytree_node=False, default=False)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.float32)

    @property
    def format(self) -> str:
        return f"{self.format_prefix}{self.target_format.name}"

    def arrays(self) -> NoReturn:
        raise ConfigError(f"a {self.format} weight cannot be saved: convert it to integers first")

    def check_columns(self, begin: int, end: int) -> None:
        columns = self.weight.shape[-1]
        size = CHUNK if self.scale is not None else self.target_format.group_size(columns)
        group_slice(self.format, begin, end, columns, size)

    def for_training_step(self, key: jax.Array, step: jax.Array) -> "FakeQuantWeight":
        return self if self.start_step is None else self.replace(is_active=step >= self.start_step)

    def quantize(self) -> IntWeight:
        """Return the quantized weight, without gradients."""
        if self.scale is None:
            return self.target_format.quantize(jax.lax.stop_gradient(self.weight))
        w_OGg, scale, zero = jax.lax.stop_gradient(self._split_groups())
        codes = self.target_format.to_codes(w_OGg, scale, zero)
        codes = codes.reshape(*codes.shape[:-2], -1)[..., : self.weight.shape[-1]]
        return self.target_format.from_codes(codes, jax.lax.stop_gradient(self.scale), self.zero)

    def to_inference(self) -> WeightBase:
        """Return the weight for inference, without gradients."""
        return self.quantize()

    def to_dense(self, dtype: Any = None) -> jax.Array:
        """Return the rounded weights, whether `is_active` is set or not."""
        weights: jax.Array = with_derivative(self.quantize().to_dense(), self._fake_quantize())
        return weights.astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        count = self.weight.shape[0]
        row_N = index.reshape(-1)
        parts = {
            name: None if x is None else x.at[row_N].get(mode="clip")
            for name, x in (("weight", self.weight), ("scale", self.scale), ("zero", self.zero))
        }
        some = self.replace(**parts)
        # From codes, as in `IntWeight.take`. Without the barrier XLA may fuse the scaling with a
        # later addition and round only once.
        rows = with_derivative(
            jax.lax.optimization_barrier(some.quantize()).to_dense(), some._fake_quantize()
        )
        if self.is_active is not None:
            rows = jnp.where(self.is_active, rows, some.weight.astype(jnp.float32))
        return nan_out_of_range(rows, index, count)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        if self.is_active is None:
            return self._matmul(x_RI, linear)
        return jax.lax.cond(
            self.is_active,
            lambda: self._matmul(x_RI, linear),
            lambda: linear(x_RI, self.weight),
        )

    def _matmul(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        # A barrier, as if the integers were arguments: the bits of a product depend on what XLA
        # fuses it with.
        leaf = jax.lax.optimization_barrier(self.to_inference())
        y_RO = linear(jax.lax.stop_gradient(x_RI), jax.lax.stop_gradient(leaf))

        @jax.checkpoint  # rounding again costs less than storing the rounded weights
        def surrogate(x_RI: jax.Array, leaf: FakeQuantWeight) -> jax.Array:
            return matmul(leaf.fake_quantize_inputs(x_RI), leaf._fake_quantize())

        return with_derivative(y_RO, surrogate(x_RI, self))

    def fake_quantize_inputs(self, x_RI: jax.Array) -> jax.Array:
        """Return the inputs as quantized for the product, with straight-through gradients."""
        if self.dynamic_inputs:
            rounded_RI = round_to_int8(x_RI, self.target_format.group or INPUT_BLOCK)
            return with_derivative(rounded_RI, x_RI.astype(jnp.float32))
        return x_RI

    def _split_groups(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the weight in groups `[..., O, G, g]`, and scales, zero points `[..., O, G, 1]`.

        Scales are rounded to their storage dtype and returned in float32.
        """
        columns, dtype = self.weight.shape[-1], jnp.dtype(self.target_format.scale_dtype)
        size = self.target_format.group_size(columns)
        added = [(0, 0)] * (self.weight.ndim - 1) + [(0, round_up(columns, CHUNK) - columns)]
        w_OI = jnp.pad(self.weight, added)
        w_OGg = w_OI.reshape(*w_OI.shape[:-1], -1, size)
        if self.scale is None:
            scale, zero = self.target_format.choose_grid(jax.lax.stop_gradient(w_OGg))
            return w_OGg, scale.astype(jnp.float32)[..., None], zero[..., None]
        scale = with_derivative(self.scale.astype(dtype).astype(jnp.float32), self.scale)
        middle = jnp.full(scale.shape, self.target_format.zero_code, jnp.uint8)
        zero = middle if self.zero is None else self.zero
        return w_OGg, scale[..., None], zero[..., None]

    def _fake_quantize(self) -> jax.Array:
        """Return the rounded weights, float32 `[..., O, I]`, with straight-through gradients.

        The gradient of a scale is multiplied by 1 / sqrt(group size * largest level) (LSQ, section
        2.2).
        """
        w_OGg, scale, zero = self._split_groups()
        format = self.target_format
        most = format.code_range[1] - (0 if format.zero_point else format.zero_code)
        factor = (w_OGg.shape[-1] * most) ** -0.5
        values = fake_quantize(w_OGg, scale, zero, self.target_format.code_range, factor)
        return values.reshape(*values.shape[:-2], -1)[..., : self.weight.shape[-1]]
