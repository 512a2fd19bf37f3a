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
from jaxllm.weights.types import bitpack
from jaxllm.weights.types.affine import AffineQuantizer, quantize_rows
from jaxllm.weights.types.arrays import DTYPES, matmul
from jaxllm.weights.types.base import (
    PartialShape,
    ReadBlocks,
    WeightBase,
    check_finite,
    concat_matrices,
    fill_arrays,
    group_slice,
    nan_out_of_range,
    round_up,
    take_rows,
    to_device,
)
from jaxllm.weights.types.bitpack import CHUNK, HALF

GROUP_SIZES = (32, 64, 128)
MAX_F32_ROWS = 16  # in plain JAX, more rows of bfloat16 multiply weights rounded to bfloat16


class QTensor(WeightBase, struct.PyTreeNode):
    """`weight[o, i] = (q[o, i] - zero[o, g]) * scale[o, g]`, with g = i // group.

    I' is I rounded up to whole chunks of 128 columns; the padding stands for zero. Native kernels
    support 8 bits without a zero point, and 4 bits; fewer bits are unpacked to 4 in the product.
    """

    supports_int8_inputs = True

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
    def int_format(self) -> "IntFormat":
        """Its format."""
        scale = "float16" if self.scale.dtype == jnp.float16 else "float32"
        return IntFormat(self.bits, self.group, self.zero is not None, scale)

    @property
    def format(self) -> str:
        return self.int_format.name

    @property
    def codes(self) -> jax.Array:
        """The codes q, `[..., O, I']`."""
        return bitpack.unpack_codes(self.data, self.bits)

    def centered_codes(self) -> jax.Array:
        """Return q less its zero point: int8 `[..., O, I']`, int16 for 8 bits with a zero point."""
        if self.zero is None:
            return self.codes.astype(jnp.int8) - jnp.int8(self.int_format.zero_code)
        kept, size = (
            jnp.int16 if self.bits == 8 else jnp.int8,
            self.int_format.group_size(self.columns),
        )
        return self.codes.astype(kept) - jnp.repeat(self.zero.astype(kept), size, axis=-1)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        """Return the weights, computed in float32."""
        weights: jax.Array = self._dense(dtype)
        return weights

    @partial(jax.jit, static_argnums=1)  # fused also when the caller is not compiled
    def _dense(self, dtype: Any) -> jax.Array:
        q, scale = self.centered_codes(), self.scale.astype(jnp.float32)
        grouped = q.reshape(*scale.shape, q.shape[-1] // scale.shape[-1]).astype(jnp.float32)
        weight = (grouped * scale[..., None]).reshape(q.shape)[..., : self.columns]
        return weight.astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda x: jnp.asarray(x).at[index.reshape(-1)].get(mode="clip"), self)
        return nan_out_of_range(part.to_dense(), index, self.data.shape[0])

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        if x_RI.dtype == jnp.int8:
            x_RI = jnp.maximum(x_RI, -127)  # as in the kernels, which negate inputs
            if self.bits == 8 and self.group is None and self.zero is None:
                return _int8_matmul(x_RI, self)
        if x_RI.shape[0] == 1:
            return _row_matmul(x_RI, self)
        many = x_RI.dtype == jnp.bfloat16 and x_RI.shape[0] > MAX_F32_ROWS
        return matmul(x_RI, self.to_dense(jnp.bfloat16 if many else jnp.float32))

    def supports_gpu_kernel(self, x_RI: jax.Array) -> bool:
        known = self.bits == 4 or (self.bits == 8 and self.zero is None)
        return known and pallas.is_supported(x_RI, self.data)

    def gpu_matmul(self, x_RI: jax.Array) -> jax.Array:
        return pallas.multiply(
            x_RI, self.data, self.scale, self.zero, bits=self.bits, group=self.group
        )

    def native_matrix(self) -> native.Matrix:
        if self.bits == 8:
            return native.Matrix(native.Kind.INT8, jax.tree.leaves(self), self.group)
        data = bitpack.to_four_bits(self.data, self.bits)
        if self.zero is None and self.bits < 4:  # the kernels' zero is 8, in both codes of a byte
            data = data + jnp.uint8(0x11 * (8 - self.int_format.zero_code))
        return native.Matrix(native.Kind.INT4, jax.tree.leaves(self.replace(data=data)), self.group)

    def split_scale(self, dtype: Any) -> tuple[native.Matrix, jax.Array | None]:
        if self.group is not None or dtype != jnp.bfloat16:
            return self.native_matrix(), None
        # Integers are exact in bfloat16, and so are powers of two times them; without those, a sum
        # could overflow before it is scaled.
        scale_O, power = jnp.frexp(self.scale[:, 0].astype(jnp.float32))
        powers = self.replace(scale=jnp.ldexp(jnp.float32(1), power)[:, None])
        return powers.native_matrix(), scale_O

    def with_rows(self, index: np.ndarray) -> "QTensor":
        return take_rows(self, index)

    def with_columns(self, begin: int, end: int) -> "QTensor":
        if self.group is not None:
            group_slice(self.format, begin, end, self.columns, self.group)
        whole = not begin % CHUNK and (not end % CHUNK or end == self.columns)
        until = round_up(end, CHUNK) if whole else end  # with the padding of the last chunk
        scale, zero = (self._slice_groups(x, begin, until) for x in (self.scale, self.zero))
        if not whole:
            return self.int_format.from_codes(self.codes[..., begin:end], scale, zero)
        lie = slice(begin * self.bits // 8, until * self.bits // 8)
        return QTensor(self.data[..., lie], scale, zero, self.bits, self.group, end - begin)

    def concatenate(self, appended: Sequence["QTensor"], axis: int) -> "QTensor":
        parts = [self, *appended]
        if axis == 0:
            return concat_matrices(parts)
        codes = concat_matrices([x.codes[..., : x.columns] for x in parts], 1)
        if self.group is None:
            return self.int_format.from_codes(codes, self.scale, self.zero)
        scale = concat_matrices([x.unpadded_groups(x.scale) for x in parts], 1)
        zero = (
            None
            if self.zero is None
            else concat_matrices([x.unpadded_groups(x.zero) for x in parts], 1)
        )
        return self.int_format.from_codes(codes, scale, zero)

    def unpadded_groups(self, x_OG: Any) -> Any:
        """Drop the groups `[..., O, G]` that only pad the last chunk."""
        return self._slice_groups(x_OG, 0, self.columns)

    def _slice_groups(self, x_OG: Any, begin: int, end: int) -> Any:
        if x_OG is None or self.group is None:
            return x_OG
        return x_OG[..., begin // self.group : -(-end // self.group)]

    def arrays(self) -> dict[str, jax.Array]:
        parts = {".data": self.data, ".scale": self.scale, ".zero": self.zero}
        return {name: part for name, part in parts.items() if part is not None}


@dataclasses.dataclass(frozen=True)
class IntFormat(AffineQuantizer):
    """Integers with scales, as a weight format: see `QTensor`."""

    def from_codes(
        self, codes: jax.Array, scale: jax.Array, zero: jax.Array | None = None
    ) -> QTensor:
        """Return the weight with codes `[..., O, I]`, and scales and zero points `[..., O, G]`.

        Nothing is rounded but scales to their dtype.
        """
        columns, width = codes.shape[-1], round_up(codes.shape[-1], CHUNK)
        size = self.group_size(columns)

        def wide(x: jax.Array, to: int, value: int) -> jax.Array:
            rows = [(0, 0)] * (x.ndim - 1)
            return jnp.pad(x, [*rows, (0, to - x.shape[-1])], constant_values=value)

        scale = wide(scale.astype(jnp.dtype(self.scale_dtype)), width // size, 0)
        codes = codes.astype(self.code_dtype)
        if not self.zero_point:
            data = bitpack.pack_codes(wide(codes, width, self.zero_code), self.bits)
            return QTensor(data, scale, None, self.bits, self.group, columns)
        assert zero is not None
        zero = wide(zero.astype(jnp.uint8), width // size, 0)
        added = jnp.arange(width) >= columns
        added = added.reshape(*[1] * (codes.ndim - 1), width)
        filler = jnp.repeat(zero, size, axis=-1)  # the padding stands for zero
        data = bitpack.pack_codes(jnp.where(added, filler, wide(codes, width, 0)), self.bits)
        return QTensor(data, scale, zero, self.bits, self.group, columns)

    @property
    def name(self) -> str:
        group = f"-g{self.group}" if self.group else ""
        half = "-f16" if self.scale_dtype == "float16" else ""
        return f"int{self.bits}{group}{'-zp' if self.zero_point else ''}{half}"

    @property
    def lossless_dtype(self) -> str:
        return "float32"

    def quantize(self, array: jax.Array) -> QTensor:
        """Round to nearest, a block of rows at a time.

        Raises:
            ConfigError: for a matrix without columns, which has no scale.
        """
        self._check_shape(array.shape)
        rows_OI = array.reshape(-1, array.shape[-1])
        pieces = (x.reshape(*array.shape[:-1], x.shape[-1]) for x in quantize_rows(rows_OI, self))
        data, scale, zero = pieces
        kept = zero if self.zero_point else None
        return QTensor(data, scale, kept, self.bits, self.group, array.shape[-1])

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> QTensor:
        self._check_shape(shape)

        def make(block: np.ndarray) -> tuple[jax.Array, ...]:
            made = quantize_rows(jax.device_put(block, may_alias=True), self)
            return made if self.zero_point else made[:2]

        return self.from_arrays(shape, to_device(fill_arrays(self._specs(shape), blocks(), make)))

    def array_specs(self, shape: tuple[int, ...]) -> dict[str, tuple[PartialShape, Any]]:
        return dict(self._specs(shape))

    def _specs(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Any]]:
        *rows, columns = shape
        width = round_up(columns, CHUNK)
        groups = (*rows, width // (self.group or width))
        found: dict[str, tuple[tuple[int, ...], Any]] = {
            ".data": ((*rows, width * self.bits // 8), self.code_dtype),
            ".scale": (groups, DTYPES[self.scale_dtype]),
        }
        return {**found, ".zero": (groups, np.uint8)} if self.zero_point else found

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if not shape[-1]:
            raise ConfigError(f"{self.name} requires a matrix with columns, got shape {shape}")

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> QTensor:
        scale, zero = arrays[".scale"], arrays.get(".zero")
        return QTensor(arrays[".data"], scale, zero, self.bits, self.group, shape[-1])

    def from_file(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> QTensor:
        zero = arrays.get(".zero")
        check_finite(path, arrays, ".scale")
        if zero is not None and zero.max(initial=0) > self.code_range[1]:
            raise CheckpointError(
                f"{path}.zero holds {zero.max()}: zero points must be at most {self.code_range[1]}"
            )
        return self.from_arrays(shape, to_device(arrays))


def parse(name: str) -> IntFormat | None:
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
    if group not in (*GROUP_SIZES, None):
        raise ConfigError(f"{name}: group size must be 32, 64 or 128 columns, got {group}")
    return IntFormat(bits, group, bool(found[3]), "float16" if found[4] else "float32")


def _int8_matmul(x_RI: jax.Array, weight: QTensor) -> jax.Array:
    """Multiply 8-bit integers and inputs from -127 to 127: integer sums, scaled once."""
    data_OI = weight.data[:, : weight.columns]
    whole_RO = jax.lax.dot_general(
        x_RI, data_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return whole_RO.astype(jnp.float32) * weight.scale.astype(jnp.float32).reshape(1, -1)


def _row_matmul(x_1I: jax.Array, weight: QTensor) -> jax.Array:
    """Multiply one row with the stored bytes, scaled before the sum, which XLA:CPU fuses."""
    size, zero, scale = weight.int_format.group_size(weight.columns), weight.zero, weight.scale
    width = weight.data.shape[1] * 8 // weight.bits
    x_1I = jnp.pad(x_1I.astype(jnp.float32), ((0, 0), (0, width - x_1I.shape[1])))
    size = size if weight.bits == 8 else size // 2  # bytes of a group

    def wide(x_OG: jax.Array) -> jax.Array:
        return jnp.repeat(x_OG.astype(jnp.float32), size, axis=1)

    middle = jnp.float32(weight.int_format.zero_code) if zero is None else wide(zero)
    scale = wide(scale)
    if weight.bits == 8:
        return ((weight.data.astype(jnp.float32) - middle) * scale * x_1I).sum(axis=1)[None]
    data = weight.data
    if weight.bits < 4:  # not fused with the sum, which would take XLA:CPU twice as long
        data = jax.lax.optimization_barrier(bitpack.to_four_bits(data, weight.bits))
    low, high = (half.reshape(1, -1) for half in jnp.moveaxis(x_1I.reshape(-1, 2, HALF), 1, 0))
    product = ((data & 15).astype(jnp.float32) - middle) * scale * low
    product += ((data >> 4).astype(jnp.float32) - middle) * scale * high
    return product.sum(axis=1)[None]
