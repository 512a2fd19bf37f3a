"""Quantized weights: integers with scales, by row or by group, symmetric or with a zero point."""

import dataclasses
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.ops import native, pallas
from jaxllm.weights.leaves.arrays import DTYPES, product
from jaxllm.weights.leaves.leaf import (
    ROWS,
    Blocks,
    Leaf,
    Shape,
    collected,
    on_device,
    or_nan,
    up,
)

CHUNK = 128  # columns of a row are stored in whole chunks; the kernels walk by them
HALF = 16  # a byte holds columns i (low four bits) and i + 16 (high) of each 32
GROUPS = (32, 64, 128)
FEW = 16  # more rows of bfloat16 take weights rounded to bfloat16, in plain JAX


class QTensor(Leaf, struct.PyTreeNode):
    """`weight[o, i] = (q[o, i] - zero[o, g]) * scale[o, g]`, with g = i // group.

    bits 8: `data` is int8 `[..., O, I']`, q from -127 to 127, no zero point. bits 4: `data` is
    uint8 `[..., O, I' / 2]`, q from 0 to 15: byte 16 b + j of a row holds columns 32 b + j (low
    four bits) and 32 b + j + 16 (high). I' is `columns` rounded up to whole chunks of 128; what is
    added is zero.

    scale: float32 or float16 `[..., O, G]`, G = I' / group, or 1 where `group` is None: one scale a
    row. May be negative. zero: uint8 `[..., O, G]`, or None: 8 for 4 bits, 0 for 8. columns: I.
    """

    rounds_inputs = True
    has_kernels = True

    data: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    bits: int = struct.field(pytree_node=False)
    group: int | None = struct.field(pytree_node=False)
    columns: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.columns)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.float32)

    @property
    def format(self) -> str:
        scale = "float16" if self.scale.dtype == jnp.float16 else "float32"
        return Integer(self.bits, self.group, self.zero is not None, scale).name

    def integers(self) -> jax.Array:
        """q less its zero point: int8 `[..., O, I']`."""
        if self.bits == 8:
            return self.data
        byte = self.data.reshape(*self.data.shape[:-1], -1, HALF)
        q = jnp.stack([byte & 15, byte >> 4], axis=-2).astype(jnp.int8)
        q = q.reshape(*self.data.shape[:-1], 2 * self.data.shape[-1])
        if self.zero is None:
            return q - 8
        size = q.shape[-1] // self.zero.shape[-1]
        return q - jnp.repeat(self.zero.astype(jnp.int8), size, axis=-1)

    def dense(self, dtype: Any = None) -> jax.Array:
        """The weights themselves, computed in float32."""
        weights: jax.Array = self._dense(dtype)
        return weights

    @partial(jax.jit, static_argnums=1)  # where nothing around it is compiled, it is, as a whole
    def _dense(self, dtype: Any) -> jax.Array:
        q, scale = self.integers(), self.scale.astype(jnp.float32)
        grouped = q.reshape(*scale.shape, q.shape[-1] // scale.shape[-1]).astype(jnp.float32)
        weight = (grouped * scale[..., None]).reshape(q.shape)[..., : self.columns]
        return weight.astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda x: x.at[index.reshape(-1)].get(mode="clip"), self)
        return or_nan(part.dense(), index, self.data.shape[0])

    def product(self, x_RI: jax.Array) -> jax.Array:
        if x_RI.shape[0] == 1:
            return _summed(x_RI, self)
        many = x_RI.dtype == jnp.bfloat16 and x_RI.shape[0] > FEW
        return product(x_RI, self.dense(jnp.bfloat16 if many else jnp.float32))

    def fits_gpu(self, x_RI: jax.Array) -> bool:
        return pallas.fits(x_RI, self.data)

    def gpu_product(self, x_RI: jax.Array) -> jax.Array:
        return pallas.multiply(
            x_RI, self.data, self.scale, self.zero, bits=self.bits, group=self.group
        )

    def matrix(self) -> native.Matrix:
        kind = native.Kind.INT8 if self.bits == 8 else native.Kind.INT4
        return native.Matrix(kind, jax.tree.leaves(self), self.group)

    def widened(self, dtype: Any) -> tuple[native.Matrix, jax.Array | None]:
        if self.group is not None or dtype != jnp.bfloat16:
            return self.matrix(), None
        # Integers are exact in bfloat16, and so are powers of two times them; without those, a sum
        # could overflow before it is scaled.
        scale_O, power = jnp.frexp(self.scale[:, 0].astype(jnp.float32))
        powers = self.replace(scale=jnp.ldexp(jnp.float32(1), power)[:, None])
        return powers.matrix(), scale_O

    def pieces(self) -> dict[str, jax.Array]:
        parts = {".data": self.data, ".scale": self.scale, ".zero": self.zero}
        return {name: part for name, part in parts.items() if part is not None}


@dataclasses.dataclass(frozen=True)
class Integer:
    """Integers with scales: see `QTensor`. group None is one scale a row (8 bits only)."""

    bits: int
    group: int | None
    zero_point: bool = False
    scale: str = "float32"

    @property
    def name(self) -> str:
        group = f"-g{self.group}" if self.group else ""
        half = "-f16" if self.scale == "float16" else ""
        return f"int{self.bits}{group}{'-zp' if self.zero_point else ''}{half}"

    @property
    def exact_in(self) -> str:
        return "float32"

    def make(self, array: jax.Array) -> QTensor:
        """Rounded to the nearest, a block of rows at a time.

        Raises ConfigError for a matrix without columns, which has nothing that a scale could be of.
        """
        self._check(array.shape)
        rows_OI = array.reshape(-1, array.shape[-1])
        pieces = (x.reshape(*array.shape[:-1], x.shape[-1]) for x in _rounded(rows_OI, self))
        data, scale, zero = pieces
        kept = zero if self.zero_point else None
        return QTensor(data, scale, kept, self.bits, self.group, array.shape[-1])

    def collect(self, shape: tuple[int, ...], blocks: Blocks) -> QTensor:
        self._check(shape)

        def make(block: np.ndarray) -> tuple[jax.Array, ...]:
            made = _rounded(jax.device_put(block, may_alias=True), self)
            return made if self.zero_point else made[:2]

        return self._of(collected(self._pieces(shape), blocks(), make), shape[-1])

    def expected(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        return dict(self._pieces(shape))

    def _pieces(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Any]]:
        *rows, columns = shape
        width = up(columns, CHUNK)
        groups = (*rows, width // (self.group or width))
        found: dict[str, tuple[tuple[int, ...], Any]] = {
            ".data": ((*rows, width * self.bits // 8), np.uint8 if self.bits == 4 else np.int8),
            ".scale": (groups, DTYPES[self.scale]),
        }
        return {**found, ".zero": (groups, np.uint8)} if self.zero_point else found

    def _check(self, shape: tuple[int, ...]) -> None:
        if not shape[-1]:
            raise ConfigError(f"{self.name} needs columns to scale, the matrix is {shape}")

    def _of(self, pieces: Mapping[str, np.ndarray], columns: int) -> QTensor:
        device = on_device(pieces)
        scale, zero = device[".scale"], device.get(".zero")
        return QTensor(device[".data"], scale, zero, self.bits, self.group, columns)

    def assemble(
        self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]
    ) -> QTensor:
        zero = pieces.get(".zero")
        if not np.isfinite(pieces[".scale"].astype(np.float32)).all():
            raise CheckpointError(f"{path}.scale holds NaN or infinity")
        if zero is not None and zero.max(initial=0) > 15:
            raise CheckpointError(f"{path}.zero holds {zero.max()}: a zero point is at most 15")
        if self.bits == 8 and pieces[".data"].min(initial=0) < -127:
            raise CheckpointError(f"{path}.data holds -128: integers run from -127 to 127")
        return self._of(pieces, shape[-1])


def parse(name: str) -> Integer | None:
    """`int8`, `int8-g64`, `int4-g64`, `int4-g64-zp`, each also with `-f16`; None for other names.

    Raises ConfigError for a group or a zero point that there is not.
    """
    found = re.fullmatch(r"int(8|4)(?:-g(\d+))?(-zp)?(-f16)?", name)
    if not found:
        return None
    bits, zero_point = int(found[1]), bool(found[3])
    group = int(found[2]) if found[2] else (None if bits == 8 else 64)
    if group not in (*GROUPS, None):
        raise ConfigError(f"{name}: a group is of 32, 64 or 128 columns, got {group}")
    if zero_point and bits == 8:
        raise ConfigError(f"{name}: zero points are for 4 bits")
    return Integer(bits, group, zero_point, "float16" if found[4] else "float32")


def _summed(x_1I: jax.Array, weight: QTensor) -> jax.Array:
    """One row times integers: their bytes where they lie, scaled first, which XLA:CPU fuses."""
    data, size = weight.data, weight.data.shape[1] // weight.scale.shape[1]
    scale = jnp.repeat(weight.scale.astype(jnp.float32), size, axis=1)
    width = data.shape[1] * 8 // weight.bits
    x_1I = jnp.pad(x_1I.astype(jnp.float32), ((0, 0), (0, width - x_1I.shape[1])))
    if weight.bits == 8:
        return (data.astype(jnp.float32) * scale * x_1I).sum(axis=1)[None]
    low, high = (half.reshape(1, -1) for half in jnp.moveaxis(x_1I.reshape(-1, 2, HALF), 1, 0))
    zero = 8.0 if weight.zero is None else jnp.repeat(weight.zero.astype(jnp.float32), size, axis=1)
    product = ((data & 15).astype(jnp.float32) - zero) * scale * low
    product += ((data >> 4).astype(jnp.float32) - zero) * scale * high
    return product.sum(axis=1)[None]


@partial(jax.jit, static_argnums=1)
def _rounded(array: jax.Array, to: Integer) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, columns = array.shape
    width = up(columns, CHUNK)
    group = to.group or width

    def some(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        w = jnp.pad(w.astype(jnp.float32), ((0, 0), (0, width - columns)))
        q, scale, zero = _round_groups(w.reshape(w.shape[0], width // group, group), to)
        q = q.reshape(w.shape)
        if to.bits == 4:
            low, high = jnp.moveaxis(q.reshape(w.shape[0], width // 32, 2, HALF), 2, 0)
            q = (low | (high << 4)).reshape(w.shape[0], width // 2)
        return q, scale, zero

    blocks = rows // ROWS
    if not blocks:
        return some(array)

    def block(i: jax.Array) -> Any:
        return some(jax.lax.dynamic_slice_in_dim(array, i * ROWS, ROWS, 0))

    done = jax.lax.map(block, jnp.arange(blocks))
    done = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), done)
    if rows % ROWS:
        done = jax.tree.map(lambda *x: jnp.concatenate(x), done, some(array[blocks * ROWS :]))
    return done


def _round_groups(w_OGg: jax.Array, to: Integer) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Integers `[O, G, g]`, scales and zero points `[O, G]`; the scale is rounded first.

    Symmetric, 8 bits: the largest magnitude is 127 steps. Symmetric, 4 bits: it is -8 steps, which
    uses all 16 levels (as llama.cpp's Q4_0). With a zero point: 15 steps from least to largest.
    """
    kept = jnp.dtype(to.scale)

    def steps(scale: jax.Array) -> jax.Array:
        wide = scale.astype(jnp.float32)[:, :, None]
        return jnp.round(w_OGg / jnp.where(wide == 0, 1.0, wide))

    if to.zero_point:
        low, high = jnp.minimum(w_OGg.min(-1), 0), jnp.maximum(w_OGg.max(-1), 0)
        scale = ((high - low) / 15).astype(kept)
        wide = scale.astype(jnp.float32)
        zero = jnp.clip(jnp.round(-low / jnp.where(wide == 0, 1.0, wide)), 0, 15)
        q = jnp.clip(steps(scale) + zero[:, :, None], 0, 15)
        return q.astype(jnp.uint8), scale, zero.astype(jnp.uint8)
    none = jnp.zeros(w_OGg.shape[:2], jnp.uint8)
    if to.bits == 8:
        scale = (jnp.abs(w_OGg).max(-1) / 127).astype(kept)
        return jnp.clip(steps(scale), -127, 127).astype(jnp.int8), scale, none
    largest = jnp.abs(w_OGg).argmax(-1, keepdims=True)
    scale = (jnp.take_along_axis(w_OGg, largest, -1)[..., 0] / -8).astype(kept)
    return (jnp.clip(steps(scale), -8, 7) + 8).astype(jnp.uint8), scale, none
