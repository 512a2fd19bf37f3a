"""Integer weights with scales, per row or per group, symmetric or with a zero point."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.ops import native, pallas
from jaxllm.weights.leaves import digits
from jaxllm.weights.leaves.affine import Affine, rounded
from jaxllm.weights.leaves.arrays import DTYPES, product
from jaxllm.weights.leaves.digits import CHUNK, HALF
from jaxllm.weights.leaves.leaf import (
    Blocks,
    Leaf,
    Shape,
    check_finite,
    collected,
    joined,
    on_borders,
    on_device,
    or_nan,
    rows_of,
    up,
)

GROUPS = (32, 64, 128)
FEW = 16  # in plain JAX, more rows of bfloat16 multiply weights rounded to bfloat16


class QTensor(Leaf, struct.PyTreeNode):
    """`weight[o, i] = (q[o, i] - zero[o, g]) * scale[o, g]`, with g = i // group.

    I' is I rounded up to whole chunks of 128 columns; the padding stands for zero. Native kernels
    support 8 bits without a zero point, and 4 bits; fewer bits are unpacked to 4 in the product.
    """

    rounds_inputs = True

    # 8 bits: q itself, int8 [..., O, I'] (never -128 if we quantize, but files may have it), or
    # uint8 with a zero point. 4, 3 and 2 bits: q from 0 to 2^bits - 1, packed as in `digits`, uint8
    # [..., O, I' bits / 8].
    data: jax.Array
    scale: jax.Array  # float32 or float16 [..., O, G], G = I' / group or 1; may be negative
    zero: jax.Array | None  # uint8 [..., O, G]; None: 2^(bits - 1), and 0 for 8 bits
    bits: int = struct.field(pytree_node=False)
    group: int | None = struct.field(pytree_node=False)  # None: one scale per row
    columns: int = struct.field(pytree_node=False)  # I

    @property
    def has_kernels(self) -> bool:
        return self.bits < 8 or self.zero is None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.columns)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.float32)

    @property
    def kind(self) -> "Integer":
        """Its format."""
        scale = "float16" if self.scale.dtype == jnp.float16 else "float32"
        return Integer(self.bits, self.group, self.zero is not None, scale)

    @property
    def format(self) -> str:
        return self.kind.name

    @property
    def codes(self) -> jax.Array:
        """The codes q, `[..., O, I']`."""
        return digits.unpacked(self.data, self.bits)

    def integers(self) -> jax.Array:
        """Return q less its zero point: int8 `[..., O, I']`, int16 for 8 bits with a zero point."""
        if self.zero is None:
            return self.codes.astype(jnp.int8) - jnp.int8(self.kind.middle)
        kept, size = jnp.int16 if self.bits == 8 else jnp.int8, self.kind.size(self.columns)
        return self.codes.astype(kept) - jnp.repeat(self.zero.astype(kept), size, axis=-1)

    def dense(self, dtype: Any = None) -> jax.Array:
        """Return the weights, computed in float32."""
        weights: jax.Array = self._dense(dtype)
        return weights

    @partial(jax.jit, static_argnums=1)  # fused also when the caller is not compiled
    def _dense(self, dtype: Any) -> jax.Array:
        q, scale = self.integers(), self.scale.astype(jnp.float32)
        grouped = q.reshape(*scale.shape, q.shape[-1] // scale.shape[-1]).astype(jnp.float32)
        weight = (grouped * scale[..., None]).reshape(q.shape)[..., : self.columns]
        return weight.astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda x: x.at[index.reshape(-1)].get(mode="clip"), self)
        return or_nan(part.dense(), index, self.data.shape[0])

    def product(self, x_RI: jax.Array) -> jax.Array:
        if x_RI.dtype == jnp.int8:
            x_RI = jnp.maximum(x_RI, -127)  # as in the kernels, which negate inputs
            if self.bits == 8 and self.group is None and self.zero is None:
                return _exact(x_RI, self)
        if x_RI.shape[0] == 1:
            return _summed(x_RI, self)
        many = x_RI.dtype == jnp.bfloat16 and x_RI.shape[0] > FEW
        return product(x_RI, self.dense(jnp.bfloat16 if many else jnp.float32))

    def fits_gpu(self, x_RI: jax.Array) -> bool:
        known = self.bits == 4 or (self.bits == 8 and self.zero is None)
        return known and pallas.fits(x_RI, self.data)

    def gpu_product(self, x_RI: jax.Array) -> jax.Array:
        return pallas.multiply(
            x_RI, self.data, self.scale, self.zero, bits=self.bits, group=self.group
        )

    def matrix(self) -> native.Matrix:
        if self.bits == 8:
            return native.Matrix(native.Kind.INT8, jax.tree.leaves(self), self.group)
        data = digits.in_four_bits(self.data, self.bits)
        if self.zero is None and self.bits < 4:  # the kernels' zero is 8, in both codes of a byte
            data = data + jnp.uint8(0x11 * (8 - self.kind.middle))
        return native.Matrix(native.Kind.INT4, jax.tree.leaves(self.replace(data=data)), self.group)

    def widened(self, dtype: Any) -> tuple[native.Matrix, jax.Array | None]:
        if self.group is not None or dtype != jnp.bfloat16:
            return self.matrix(), None
        # Integers are exact in bfloat16, and so are powers of two times them; without those, a sum
        # could overflow before it is scaled.
        scale_O, power = jnp.frexp(self.scale[:, 0].astype(jnp.float32))
        powers = self.replace(scale=jnp.ldexp(jnp.float32(1), power)[:, None])
        return powers.matrix(), scale_O

    def with_rows(self, index: np.ndarray) -> "QTensor":
        return rows_of(self, index)

    def with_columns(self, begin: int, end: int) -> "QTensor":
        if self.group is not None:
            on_borders(self.format, begin, end, self.columns, self.group)
        whole = not begin % CHUNK and (not end % CHUNK or end == self.columns)
        until = up(end, CHUNK) if whole else end  # with the padding of the last chunk
        scale, zero = (self._of_columns(x, begin, until) for x in (self.scale, self.zero))
        if not whole:
            return self.kind.of(self.codes[..., begin:end], scale, zero)
        lie = slice(begin * self.bits // 8, until * self.bits // 8)
        return QTensor(self.data[..., lie], scale, zero, self.bits, self.group, end - begin)

    def with_more(self, after: Sequence["QTensor"], axis: int) -> "QTensor":
        parts = [self, *after]
        if axis == 0:
            return joined(parts)
        codes = joined([x.codes[..., : x.columns] for x in parts], 1)
        if self.group is None:
            return self.kind.of(codes, self.scale, self.zero)
        scale = joined([x.own_groups(x.scale) for x in parts], 1)
        zero = None if self.zero is None else joined([x.own_groups(x.zero) for x in parts], 1)
        return self.kind.of(codes, scale, zero)

    def own_groups(self, x_OG: Any) -> Any:
        """Drop the groups `[..., O, G]` that only pad the last chunk."""
        return self._of_columns(x_OG, 0, self.columns)

    def _of_columns(self, x_OG: Any, begin: int, end: int) -> Any:
        if x_OG is None or self.group is None:
            return x_OG
        return x_OG[..., begin // self.group : -(-end // self.group)]

    def pieces(self) -> dict[str, jax.Array]:
        parts = {".data": self.data, ".scale": self.scale, ".zero": self.zero}
        return {name: part for name, part in parts.items() if part is not None}


@dataclasses.dataclass(frozen=True)
class Integer(Affine):
    """Integers with scales, as a weight format: see `QTensor`."""

    def of(self, codes: jax.Array, scale: jax.Array, zero: jax.Array | None = None) -> QTensor:
        """Return the weight with codes `[..., O, I]`, and scales and zero points `[..., O, G]`.

        Nothing is rounded but scales to their dtype.
        """
        columns, width = codes.shape[-1], up(codes.shape[-1], CHUNK)
        size = self.size(columns)

        def wide(x: jax.Array, to: int, value: int) -> jax.Array:
            rows = [(0, 0)] * (x.ndim - 1)
            return jnp.pad(x, [*rows, (0, to - x.shape[-1])], constant_values=value)

        scale = wide(scale.astype(jnp.dtype(self.scale)), width // size, 0)
        codes = codes.astype(self.code_dtype)
        if not self.zero_point:
            data = digits.packed(wide(codes, width, self.middle), self.bits)
            return QTensor(data, scale, None, self.bits, self.group, columns)
        assert zero is not None
        zero = wide(zero.astype(jnp.uint8), width // size, 0)
        added = jnp.arange(width) >= columns
        added = added.reshape(*[1] * (codes.ndim - 1), width)
        filler = jnp.repeat(zero, size, axis=-1)  # the padding stands for zero
        data = digits.packed(jnp.where(added, filler, wide(codes, width, 0)), self.bits)
        return QTensor(data, scale, zero, self.bits, self.group, columns)

    @property
    def name(self) -> str:
        group = f"-g{self.group}" if self.group else ""
        half = "-f16" if self.scale == "float16" else ""
        return f"int{self.bits}{group}{'-zp' if self.zero_point else ''}{half}"

    @property
    def exact_in(self) -> str:
        return "float32"

    def make(self, array: jax.Array) -> QTensor:
        """Round to nearest, a block of rows at a time.

        Raises:
            ConfigError: for a matrix without columns, which has no scale.
        """
        self._check(array.shape)
        rows_OI = array.reshape(-1, array.shape[-1])
        pieces = (x.reshape(*array.shape[:-1], x.shape[-1]) for x in rounded(rows_OI, self))
        data, scale, zero = pieces
        kept = zero if self.zero_point else None
        return QTensor(data, scale, kept, self.bits, self.group, array.shape[-1])

    def collect(self, shape: tuple[int, ...], blocks: Blocks) -> QTensor:
        self._check(shape)

        def make(block: np.ndarray) -> tuple[jax.Array, ...]:
            made = rounded(jax.device_put(block, may_alias=True), self)
            return made if self.zero_point else made[:2]

        return self.of_pieces(shape, on_device(collected(self._pieces(shape), blocks(), make)))

    def expected(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        return dict(self._pieces(shape))

    def _pieces(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Any]]:
        *rows, columns = shape
        width = up(columns, CHUNK)
        groups = (*rows, width // (self.group or width))
        found: dict[str, tuple[tuple[int, ...], Any]] = {
            ".data": ((*rows, width * self.bits // 8), self.code_dtype),
            ".scale": (groups, DTYPES[self.scale]),
        }
        return {**found, ".zero": (groups, np.uint8)} if self.zero_point else found

    def _check(self, shape: tuple[int, ...]) -> None:
        if not shape[-1]:
            raise ConfigError(f"{self.name} requires a matrix with columns, got shape {shape}")

    def of_pieces(self, shape: tuple[int, ...], pieces: Mapping[str, Any]) -> QTensor:
        scale, zero = pieces[".scale"], pieces.get(".zero")
        return QTensor(pieces[".data"], scale, zero, self.bits, self.group, shape[-1])

    def assemble(
        self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]
    ) -> QTensor:
        zero = pieces.get(".zero")
        check_finite(path, pieces, ".scale")
        if zero is not None and zero.max(initial=0) > self.levels[1]:
            raise CheckpointError(
                f"{path}.zero holds {zero.max()}: zero points must be at most {self.levels[1]}"
            )
        return self.of_pieces(shape, on_device(pieces))


def parse(name: str) -> Integer | None:
    """Parse `int8`, `int8-g64`, `int4-g64`, `int3-g64`, `int2-g64`, with `-zp` or `-f16` too.

    Returns None for other names.

    Raises:
        ConfigError: for an unsupported group size.
    """
    found = re.fullmatch(r"int([8432])(?:-g(\d+))?(-zp)?(-f16)?", name)
    if not found:
        return None
    bits = int(found[1])
    group = int(found[2]) if found[2] else (None if bits == 8 else 64)
    if group not in (*GROUPS, None):
        raise ConfigError(f"{name}: group size must be 32, 64 or 128 columns, got {group}")
    return Integer(bits, group, bool(found[3]), "float16" if found[4] else "float32")


def _exact(x_RI: jax.Array, weight: QTensor) -> jax.Array:
    """Multiply 8-bit integers and inputs from -127 to 127: integer sums, scaled once."""
    data_OI = weight.data[:, : weight.columns]
    whole_RO = jax.lax.dot_general(
        x_RI, data_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return whole_RO.astype(jnp.float32) * weight.scale.astype(jnp.float32).reshape(1, -1)


def _summed(x_1I: jax.Array, weight: QTensor) -> jax.Array:
    """Multiply one row with the stored bytes, scaled before the sum, which XLA:CPU fuses."""
    size, zero, scale = weight.kind.size(weight.columns), weight.zero, weight.scale
    width = weight.data.shape[1] * 8 // weight.bits
    x_1I = jnp.pad(x_1I.astype(jnp.float32), ((0, 0), (0, width - x_1I.shape[1])))
    size = size if weight.bits == 8 else size // 2  # bytes of a group

    def wide(x_OG: jax.Array) -> jax.Array:
        return jnp.repeat(x_OG.astype(jnp.float32), size, axis=1)

    middle = jnp.float32(weight.kind.middle) if zero is None else wide(zero)
    scale = wide(scale)
    if weight.bits == 8:
        return ((weight.data.astype(jnp.float32) - middle) * scale * x_1I).sum(axis=1)[None]
    data = weight.data
    if weight.bits < 4:  # not fused with the sum, which would take XLA:CPU twice as long
        data = jax.lax.optimization_barrier(digits.in_four_bits(data, weight.bits))
    low, high = (half.reshape(1, -1) for half in jnp.moveaxis(x_1I.reshape(-1, 2, HALF), 1, 0))
    product = ((data & 15).astype(jnp.float32) - middle) * scale * low
    product += ((data >> 4).astype(jnp.float32) - middle) * scale * high
    return product.sum(axis=1)[None]
