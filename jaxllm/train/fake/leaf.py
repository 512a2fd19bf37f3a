"""The fake-quantized weight of quantization-aware training."""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.errors import ConfigError
from jaxllm.train.fake.gradient import rounded, valued
from jaxllm.weights.leaves.arrays import as_leaf, product
from jaxllm.weights.leaves.digits import CHUNK
from jaxllm.weights.leaves.integers import Integer, QTensor
from jaxllm.weights.leaves.leaf import Linear, on_borders, or_nan, up
from jaxllm.weights.leaves.static import LEAST, MOST, Static
from jaxllm.weights.leaves.wrapped import Wrapped
from jaxllm.weights.linear import round_to_int8


class Grid(struct.PyTreeNode):
    """Scale and zero point of a linear's inputs, float32 and int32 scalars (`leaves.static`)."""

    step: jax.Array
    zero: jax.Array


class Fake(Wrapped, struct.PyTreeNode):
    """A float weight `[..., O, I]` whose products are those of `to.make(weight)`, bit for bit.

    Its gradients are those of a product with the rounded weights and rounded inputs; rounding
    passes them through (`gradient.rounded`).

    Attributes:
      scale: learned scales, float32 `[..., O, G]`; None: computed from the weight, no gradient.
      zero: fixed zero points, uint8 `[..., O, G]`, if `to` has them and scales are learned.
      grid: scale and zero point of the inputs, if they are quantized statically (`Static`).
      step: the scale of `grid`, if it is learned.
      starts: the first training step that rounds, int32 scalar; None: the first of all.
      on: whether to round in this step, a bool scalar; None: yes.
      to: the integer format.
      dynamic: whether the model quantizes inputs dynamically (`Precision.int8_inputs`).
    """

    kind = "fake/"
    nests = True
    alike = ("scale", "zero")
    trained = ("weight", "scale", "step")

    weight: jax.Array
    scale: jax.Array | None
    zero: jax.Array | None
    grid: Grid | None
    step: jax.Array | None
    starts: jax.Array | None = None
    on: jax.Array | None = None
    to: Integer = struct.field(pytree_node=False, kw_only=True)
    dynamic: bool = struct.field(pytree_node=False, default=False)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.float32)

    @property
    def format(self) -> str:
        return f"{self.kind}{'static/' if self.grid is not None else ''}{self.to.name}"

    def pieces(self) -> NoReturn:
        raise ConfigError(f"a {self.format} weight cannot be saved: convert it to integers first")

    def check_columns(self, begin: int, end: int) -> None:
        columns = self.weight.shape[-1]
        size = CHUNK if self.scale is not None else self.to.size(columns)
        on_borders(self.format, begin, end, columns, size)

    def training(self, key: jax.Array, step: jax.Array) -> "Fake":
        return self if self.starts is None else self.replace(on=step >= self.starts)

    def integers(self) -> QTensor:
        """Return the quantized weight, without gradients."""
        if self.scale is None:
            return self.to.make(jax.lax.stop_gradient(self.weight))
        w_OGg, scale, zero = jax.lax.stop_gradient(self._grouped())
        codes = self.to.codes(w_OGg, scale, zero)
        codes = codes.reshape(*codes.shape[:-2], -1)[..., : self.weight.shape[-1]]
        return self.to.of(codes, jax.lax.stop_gradient(self.scale), self.zero)

    def converted(self) -> QTensor | Static:
        """Return the weight for inference."""
        return self._around(self.integers())

    def dense(self, dtype: Any = None) -> jax.Array:
        """Return the rounded weights, whether `on` is set or not."""
        weights: jax.Array = valued(self.integers().dense(), self._rounded())
        return weights.astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        count = self.weight.shape[0]
        row_N = index.reshape(-1)
        parts = {
            name: None if x is None else x.at[row_N].get(mode="clip")
            for name, x in (("weight", self.weight), ("scale", self.scale), ("zero", self.zero))
        }
        some = self.replace(**parts, grid=None, step=None)
        # From codes, as in `QTensor.take`. Without the barrier XLA may fuse the scaling with a
        # later addition and round only once.
        rows = valued(jax.lax.optimization_barrier(some.integers()).dense(), some._rounded())
        if self.on is not None:
            rows = jnp.where(self.on, rows, some.weight.astype(jnp.float32))
        return or_nan(rows, index, count)

    def product(self, x_RI: jax.Array) -> jax.Array:
        return self.through(x_RI, lambda x, weight: as_leaf(weight).product(x))

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        if self.on is None:
            return self._multiplied(x_RI, linear)
        return jax.lax.cond(
            self.on,
            lambda: self._multiplied(x_RI, linear),
            lambda: linear(x_RI, self.weight),
        )

    def _multiplied(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        # A barrier, as if the integers were arguments: the bits of a product depend on what XLA
        # fuses it with.
        leaf = jax.lax.optimization_barrier(self.integers())
        y_RO = linear(jax.lax.stop_gradient(x_RI), jax.lax.stop_gradient(self._around(leaf)))

        @jax.checkpoint  # rounding again costs less than storing the rounded weights
        def meaning(x_RI: jax.Array, leaf: Fake) -> jax.Array:
            return product(leaf._inputs(x_RI), leaf._rounded())

        return valued(y_RO, meaning(x_RI, self))

    def _around(self, weight: QTensor) -> QTensor | Static:
        if self.grid is None:
            return weight
        return Static.of(weight, self._step(self.grid), self.grid.zero)

    def _step(self, grid: Grid) -> jax.Array:
        return grid.step if self.step is None else self.step

    def _inputs(self, x_RI: jax.Array) -> jax.Array:
        """Return the inputs as quantized for the product, with straight-through gradients."""
        if self.grid is not None:
            step, zero = (x.reshape(1, 1) for x in (self._step(self.grid), self.grid.zero))
            return rounded(x_RI, step, zero, (LEAST, MOST), (x_RI.shape[1] * MOST) ** -0.5)
        if self.dynamic:
            return valued(round_to_int8(x_RI), x_RI.astype(jnp.float32))
        return x_RI

    def _grouped(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the weight in groups `[..., O, G, g]`, and scales, zero points `[..., O, G, 1]`.

        Scales are rounded to their storage dtype and returned in float32.
        """
        columns, kept = self.weight.shape[-1], jnp.dtype(self.to.scale)
        size = self.to.size(columns)
        added = [(0, 0)] * (self.weight.ndim - 1) + [(0, up(columns, CHUNK) - columns)]
        w_OI = jnp.pad(self.weight, added)
        w_OGg = w_OI.reshape(*w_OI.shape[:-1], -1, size)
        if self.scale is None:
            scale, zero = self.to.grid(jax.lax.stop_gradient(w_OGg))
            return w_OGg, scale.astype(jnp.float32)[..., None], zero[..., None]
        scale = valued(self.scale.astype(kept).astype(jnp.float32), self.scale)
        middle = jnp.full(scale.shape, self.to.middle, jnp.uint8)
        zero = middle if self.zero is None else self.zero
        return w_OGg, scale[..., None], zero[..., None]

    def _rounded(self) -> jax.Array:
        """Return the rounded weights, float32 `[..., O, I]`, with straight-through gradients.

        The gradient of a scale is multiplied by 1 / sqrt(group size * largest level) (LSQ, section
        2.2).
        """
        w_OGg, scale, zero = self._grouped()
        most = self.to.levels[1] - (0 if self.to.zero_point else self.to.middle)
        factor = (w_OGg.shape[-1] * most) ** -0.5
        values = rounded(w_OGg, scale, zero, self.to.levels, factor)
        return values.reshape(*values.shape[:-2], -1)[..., : self.weight.shape[-1]]
