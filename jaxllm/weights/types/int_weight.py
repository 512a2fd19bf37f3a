"""Integer weights: codes with a scale per row or group, symmetric or with a zero point.

Some files have more, one of these at a time. Products are then those of weights without it:

offset/...   a float offset per group (GGUF). A zero point is an integer number of steps, an offset
             any number: `x @ w.T = x @ (q s).T + sum_g(x) @ offset.T`.
int8-g16     a scale per 16 columns (GGUF). The kernels support groups of 32 and more, so the
             product is a sum of two: with zeros for the last, then for the first 16 of 32 inputs.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.ops import cuda, native
from jaxllm.ops.cuda.launch import Rows
from jaxllm.ops.target import is_accelerator
from jaxllm.weights.types import bitpack
from jaxllm.weights.types.affine import AffineQuantizer, quantize_rows
from jaxllm.weights.types.arrays import add_dependency, matmul
from jaxllm.weights.types.base import (
    INPUT_BLOCK,
    ArraySpecs,
    Format,
    LinearFn,
    ReadBlocks,
    WeightBase,
    check_finite,
    fill_arrays,
    group_slice,
    nan_out_of_range,
    pad_groups,
    round_up,
    to_device,
)
from jaxllm.weights.types.bitpack import CHUNK, HALF

GROUP_SIZES = (32, 64, 128)
MAX_F32_ROWS = 16  # in plain JAX, more rows of bfloat16 multiply weights rounded to bfloat16
OFFSET = "offset/"  # prefix of format names
_GROUP_FIELDS = ("scale", "zero", "second_scale", "offset")


class IntWeight(WeightBase, struct.PyTreeNode):
    """`weight[o, i] = (q[o, i] - zero[o, g]) * scale[o, g] + offset[o, g]`, with g = i // group.

    I' is I rounded up to whole chunks of 128 columns; the padding stands for zero. Native kernels
    support 8 bits without a zero point, and 4 bits; fewer bits are unpacked to 4 in the product.
    """

    supports_int8_inputs = True
    has_parts = False

    # 8 bits: q itself, int8 [..., O, I'] (never -128 if we quantize, but files may have it), or
    # uint8 with a zero point. 4, 3 and 2 bits: q from 0 to 2^bits - 1, packed as in `bitpack`,
    # uint8 [..., O, I' bits / 8]; 4 bits for a GPU: q - 8, int4 [..., O, I'] (`for_accelerator`).
    data: jax.Array
    scale: jax.Array  # float32 or float16 [..., O, G], G = I' / group or 1; may be negative
    zero: jax.Array | None  # uint8 [..., O, G]; None: 2^(bits - 1), and 0 for 8 bits
    bits: int = struct.field(pytree_node=False)
    group: int | None = struct.field(pytree_node=False)  # None: one scale per row
    columns: int = struct.field(pytree_node=False)  # I
    offset: jax.Array | None = None  # float32 [..., O, G]
    # float32 [..., O, G], the scales of the last 16 columns of groups of 32
    second_scale: jax.Array | None = None

    @property
    def is_composite(self) -> bool:
        return self.offset is not None or self.second_scale is not None

    @property
    def is_fused_in_groups(self) -> bool:
        """Whether a GPU's compiler reads its codes within a product with bfloat16."""
        grouped = self.bits == 8 and self.zero is None and self.group is not None
        return self.data.dtype == jnp.int4 or (grouped and is_accelerator())

    @property
    def input_block(self) -> int:  # type: ignore[override]
        return self.group or INPUT_BLOCK

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.columns)

    @property
    def int_format(self) -> "IntFormat":
        """Its format."""
        scale = "float16" if self.scale.dtype == jnp.float16 else "float32"
        group = self.group if self.second_scale is None else HALF
        return IntFormat(self.bits, group, self.zero is not None, scale, self.offset is not None)

    @property
    def format(self) -> str:
        return self.int_format.name

    @property
    def codes(self) -> jax.Array:
        """The codes q, `[..., O, I']`."""
        if self.data.dtype == jnp.int4:
            return (self.data.astype(jnp.int8) + jnp.int8(8)).astype(jnp.uint8)
        return bitpack.unpack_codes(self.data, self.bits)

    def centered_codes(self) -> jax.Array:
        """Return q less its zero point: int8 `[..., O, I']`, int16 for 8 bits with a zero point."""
        if self.zero is None and self.data.dtype == jnp.int4:
            return self.data.astype(jnp.int8)
        if self.zero is None:
            return self.codes.astype(jnp.int8) - jnp.int8(self.int_format.zero_code)
        dtype = jnp.int16 if self.bits == 8 else jnp.int8
        size = self.int_format.group_size(self.columns)
        return self.codes.astype(dtype) - jnp.repeat(self.zero.astype(dtype), size, axis=-1)

    @property
    def wide_scale(self) -> jax.Array:
        """The scales as float32."""
        return self.scale.astype(jnp.float32)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        """Return the weights, computed in float32."""
        if self.offset is None:
            weights: jax.Array = self._dense(dtype)
            return weights
        return (self._dense(None) + self._repeat_groups(self.offset)).astype(dtype or jnp.float32)

    @partial(jax.jit, static_argnums=1)  # fused also when the caller is not compiled
    def _dense(self, dtype: Any) -> jax.Array:
        q, scale = self.centered_codes(), self.wide_scale
        if self.second_scale is not None:
            scale = _pair(scale, self.second_scale)
        grouped = q.reshape(*scale.shape, q.shape[-1] // scale.shape[-1]).astype(jnp.float32)
        weight = (grouped * scale[..., None]).reshape(q.shape)[..., : self.columns]
        return weight.astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        part = self._map_rows(lambda x: jnp.asarray(x).at[index.reshape(-1)].get(mode="clip"))
        return nan_out_of_range(part.to_dense(), index, self.data.shape[0])

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        if x_RI.dtype == jnp.int8:
            x_RI = jnp.maximum(x_RI, -127)  # as in the kernels, which negate inputs
            if self.bits == 8 and self.group is None and self.zero is None:
                return _int8_matmul(x_RI, self)
        # Or XLA:CPU dequantizes all layers before the first, and keeps them for a loop of steps.
        weight = add_dependency(x_RI, self)
        if x_RI.dtype == jnp.bfloat16 and weight.is_fused_in_groups:
            return _multiply_groups(x_RI, weight)
        if x_RI.shape[0] == 1 and weight.data.dtype != jnp.int4:
            return _row_matmul(x_RI, weight)
        rows = 1 if is_accelerator() else MAX_F32_ROWS
        many = x_RI.dtype == jnp.bfloat16 and x_RI.shape[0] > rows
        if many and is_accelerator() and self.bits == 8 and self.zero is None and not self.group:
            # Codes are exact in bfloat16, and XLA reads them within the product.
            sum_RO = matmul(x_RI, self.data[:, : self.columns].astype(jnp.bfloat16))
            return sum_RO * self.scale.astype(jnp.float32).reshape(1, -1)
        return matmul(x_RI, weight.to_dense(jnp.bfloat16 if many else jnp.float32))

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        if self.offset is not None:
            product_RO = linear(x_RI, self.replace(offset=None))
            return product_RO + linear(self._group_sums(x_RI), self.offset)
        is_first = (jnp.arange(self.columns) % (2 * HALF) < HALF)[None]
        zero = jnp.zeros((), x_RI.dtype)
        first = self.replace(second_scale=None)
        second = first.replace(scale=self.second_scale)
        return linear(jnp.where(is_first, x_RI, zero), first) + linear(
            jnp.where(is_first, zero, x_RI), second
        )

    def for_accelerator(self) -> "IntWeight":
        """Return the weight in the form that a GPU's or TPU's compiler reads within a product.

        4 bits are XLA's own type: in two nibbles of bytes, a product of several rows would first
        write all of the weight as floats. Groups of 16 have all their scales in one array.
        """
        if self.second_scale is not None:
            scale = _pair(self.scale, self.second_scale)
            return self.replace(scale=scale, second_scale=None, group=HALF)
        if self.bits != 4 or self.data.dtype == jnp.int4:
            return self
        return self.replace(data=(self.codes.astype(jnp.int8) - jnp.int8(8)).astype(jnp.int4))

    def native_matrix(self) -> native.Matrix | None:
        if self.is_composite or (self.bits == 8 and self.zero is not None):
            return None
        if self.data.dtype == jnp.int4 or self.group == HALF:
            return None
        if self.bits == 8:
            return native.Matrix(native.Kind.INT8, jax.tree.leaves(self), self.group)
        data = bitpack.to_four_bits(self.data, self.bits)
        if self.zero is None and self.bits < 4:  # the kernels' zero is 8, in both codes of a byte
            data = data + jnp.uint8(0x11 * (8 - self.int_format.zero_code))
        return native.Matrix(native.Kind.INT4, jax.tree.leaves(self.replace(data=data)), self.group)

    def cuda_matrix(self) -> cuda.Matrix | None:
        coded = self.data.dtype == jnp.int8 or self.data.dtype == jnp.int4
        if self.is_composite or not coded or self.group == HALF:
            return None
        scale = jnp.dtype(self.scale.dtype).name
        rows = Rows(self.bits, self.group or 0, scale, self.zero is not None)
        names = ("weight", "scale", *(["zero"] if self.zero is not None else []))
        return cuda.Matrix(rows, dict(zip(names, jax.tree.leaves(self), strict=True)))

    @property
    def has_row_scale(self) -> bool:
        return self.group is None

    def arrays(self) -> dict[str, jax.Array]:
        pieces = {name: getattr(self, field) for field, name in self.int_format.file_names.items()}
        if self.data.dtype == jnp.int4:
            pieces |= {".data": bitpack.pack_codes(self.codes, self.bits)}
        if self.group == HALF:
            pieces |= {".first": self.scale[..., ::2], ".second": self.scale[..., 1::2]}
        return pieces

    def with_rows(self, index: np.ndarray) -> "IntWeight":
        return self._map_rows(lambda x: x[..., index, :])

    def with_columns(self, begin: int, end: int) -> "IntWeight":
        if self.group is not None:
            group_slice(self.format, begin, end, self.columns, self.group)
        in_chunks = not begin % CHUNK and (not end % CHUNK or end == self.columns)
        in_chunks &= self.data.dtype != jnp.int4
        until = round_up(end, CHUNK) if in_chunks else end  # with the padding of the last chunk
        groups = self._groups(begin, until)
        if not in_chunks:
            return self._repack(self.codes[..., begin:end], groups)
        data = self.data[..., begin * self.bits // 8 : until * self.bits // 8]
        return self.replace(data=data, columns=end - begin, **groups)

    def concatenate(self, appended: Sequence["IntWeight"], axis: int) -> "IntWeight":
        if axis == 0:
            return self._map_rows(lambda *x: jnp.concatenate(x, axis=-2), *appended)
        parts = [self, *appended]
        codes = jnp.concatenate([x.codes[..., : x.columns] for x in parts], axis=-1)
        groups = [x._groups(0, x.columns) for x in (parts if self.group else [self])]
        return self._repack(codes, jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *groups))

    def _map_rows(self, function: Callable[..., jax.Array], *others: "IntWeight") -> "IntWeight":
        """Apply a function to each array `[..., O, X]` of weights of one format."""
        parts = (self, *others)
        names = [name for name in ("data", *_GROUP_FIELDS) if getattr(self, name) is not None]
        fields = {name: function(*(getattr(x, name) for x in parts)) for name in names}
        return self.replace(**fields)

    def _groups(self, begin: int, end: int) -> dict[str, Any]:
        """Return the arrays `[..., O, G]`, by field, for columns from `begin` to before `end`."""
        group = self.group
        span = slice(None) if group is None else slice(begin // group, -(-end // group))
        fields = {name: getattr(self, name) for name in _GROUP_FIELDS}
        return {name: x[..., span] for name, x in fields.items() if x is not None}

    def _repack(self, codes: jax.Array, groups: dict[str, Any]) -> "IntWeight":
        """Return the weight with other codes `[..., O, I]` and arrays `[..., O, G]`."""
        plain_format = dataclasses.replace(self.int_format, group=self.group, has_offset=False)
        plain = plain_format.from_codes(codes, groups["scale"], groups.get("zero"))
        padded = {name: pad_groups(x, plain.scale.shape[-1]) for name, x in groups.items()}
        padded["scale"] = plain.scale  # as they were, in the format's dtype
        return self.replace(data=plain.data, **padded, columns=plain.columns)

    def _repeat_groups(self, x_OG: jax.Array) -> jax.Array:
        """Repeat each group's value for all its columns."""
        return jnp.repeat(x_OG, self.group, axis=-1)[..., : self.columns]  # type: ignore[arg-type]

    def _group_sums(self, x_RI: jax.Array) -> jax.Array:
        """Sum the inputs of each group, float32 `[R, G]`."""
        x_RI = x_RI.astype(jnp.float32)
        width = self.scale.shape[-1] * self.int_format.group_size(self.columns)
        x_RI = jnp.pad(x_RI, ((0, 0), (0, width - x_RI.shape[1])))
        return x_RI.reshape(x_RI.shape[0], self.scale.shape[-1], -1).sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class IntFormat(AffineQuantizer, Format):
    """The format of `IntWeight`."""

    has_offset: bool = False

    @property
    def name(self) -> str:
        group = f"-g{self.group}" if self.group else ""
        half = "-f16" if self.scale_dtype == "float16" else ""
        prefix = OFFSET if self.has_offset else ""
        return f"{prefix}int{self.bits}{group}{'-zp' if self.zero_point else ''}{half}"

    @property
    def is_plain(self) -> bool:
        """Whether it has codes, scales and zero points only, and can be made by quantizing."""
        return not self.has_offset and self.group != HALF

    def from_codes(
        self, codes: jax.Array, scale: jax.Array, zero: jax.Array | None = None
    ) -> IntWeight:
        """Return the weight with codes `[..., O, I]`, and scales and zero points `[..., O, G]`.

        Nothing is rounded but scales to their dtype.
        """
        columns, width = codes.shape[-1], round_up(codes.shape[-1], CHUNK)
        size = self.group_size(columns)
        scale = pad_groups(scale.astype(jnp.dtype(self.scale_dtype)), width // size)
        padding = [*[(0, 0)] * (codes.ndim - 1), (0, width - columns)]  # stands for zero
        codes = jnp.pad(codes.astype(self.code_dtype), padding, constant_values=self.zero_code)
        if self.zero_point:
            assert zero is not None
            zero = pad_groups(zero.astype(jnp.uint8), width // size)
            is_padding = (jnp.arange(width) >= columns).reshape(*[1] * (codes.ndim - 1), width)
            codes = jnp.where(is_padding, jnp.repeat(zero, size, axis=-1), codes)
        data = bitpack.pack_codes(codes, self.bits)
        zero = zero if self.zero_point else None
        return IntWeight(data, scale, zero, self.bits, self.group, columns)

    def quantize(self, array: jax.Array) -> IntWeight:
        """Round to nearest, a block of rows at a time.

        Raises:
            ConfigError: for a matrix without columns, which has no scale.
        """
        self._check_quantizable(array.shape)
        rows_OI = array.reshape(-1, array.shape[-1])
        data, scale, zero = (
            x.reshape(*array.shape[:-1], x.shape[-1]) for x in quantize_rows(rows_OI, self)
        )
        zero = zero if self.zero_point else None
        return IntWeight(data, scale, zero, self.bits, self.group, array.shape[-1])

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> IntWeight:
        self._check_quantizable(shape)
        specs: Any = self.array_specs(shape)

        def quantize_block(block: np.ndarray) -> tuple[jax.Array, ...]:
            return quantize_rows(jax.device_put(block, may_alias=True), self)[: len(specs)]

        return self.from_arrays(shape, to_device(fill_arrays(specs, blocks(), quantize_block)))

    def _check_quantizable(self, shape: tuple[int, ...]) -> None:
        if not self.is_plain:
            raise ConfigError(
                f"{self.name} cannot be made by quantizing; it comes from GGUF files and"
                " checkpoints. Use int8-g32"
            )
        if not shape[-1]:
            raise ConfigError(f"{self.name} requires a matrix with columns, got shape {shape}")

    @property
    def file_names(self) -> dict[str, str]:
        """The name in a file of each array that is a field of `IntWeight`."""
        if self.group == HALF:
            return {"data": ".data", "scale": ".first", "second_scale": ".second"}
        fields = ["data", "scale", *(["zero"] if self.zero_point else [])]
        if not self.has_offset:
            return {field: f".{field}" for field in fields}
        return {field: f".weight.{field}" for field in fields} | {"offset": ".offset"}

    def array_specs(self, shape: tuple[int, ...]) -> ArraySpecs:
        *rows, columns = shape
        width = round_up(columns, CHUNK)
        groups = (*rows, width // (self._stored_group or width))
        specs = {
            "data": ((*rows, width * self.bits // 8), self.code_dtype),
            "scale": (groups, jnp.dtype(self.scale_dtype)),
            "zero": (groups, np.uint8),
            "offset": (groups, np.float32),
            "second_scale": (groups, np.float32),
        }
        return {name: specs[field] for field, name in self.file_names.items()}

    @property
    def _stored_group(self) -> int | None:
        """Columns of a group of `IntWeight`; groups of 16 are stored in pairs."""
        return 2 * HALF if self.group == HALF else self.group

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> IntWeight:
        fields: dict[str, Any] = {n: arrays[name] for n, name in self.file_names.items()}
        fields.setdefault("zero", None)
        return IntWeight(**fields, bits=self.bits, group=self._stored_group, columns=shape[-1])

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        names = self.file_names
        real = ("scale", "second_scale", "offset")
        check_finite(path, arrays, *(names[field] for field in real if field in names))
        if self.zero_point and (zero := arrays[names["zero"]].max(initial=0)) > self.code_range[1]:
            raise CheckpointError(
                f"{path}{names['zero']} holds {zero}: zero points must be at most"
                f" {self.code_range[1]}"
            )


def parse(name: str) -> IntFormat | None:
    """Parse `int8`, `int8-g64`, `int4-g64`, `int3-g64`, `int2-g64`, with `-zp` or `-f16` too.

    Before those, `offset/` for any with groups. Returns None for other names.

    Raises:
        ConfigError: for an unsupported group size, and another format after the prefix.
    """
    if name.startswith(OFFSET):
        inner = parse(name.removeprefix(OFFSET))
        if inner is None or not inner.is_plain or inner.group is None:
            raise ConfigError(f"{name:.40}: format after {OFFSET} must be integers in groups")
        return dataclasses.replace(inner, has_offset=True)
    match = re.fullmatch(r"int([8432])(?:-g(\d+))?(-zp)?(-f16)?", name)
    if not match:
        return None
    bits = int(match[1])
    group = int(match[2]) if match[2] else (None if bits == 8 else 64)
    if group not in (*GROUP_SIZES, None) and name != "int8-g16":
        raise ConfigError(f"{name}: group size must be 32, 64 or 128 columns, got {group}")
    return IntFormat(bits, group, bool(match[3]), "float16" if match[4] else "float32")


def _pair(first_OG: jax.Array, second_OG: jax.Array) -> jax.Array:
    """Return the scales of groups of 16 columns from those of the first and the second of 32."""
    pairs = jnp.stack([first_OG, second_OG], axis=-1)
    return pairs.reshape(*first_OG.shape[:-1], -1)


def _int8_matmul(x_RI: jax.Array, weight: IntWeight) -> jax.Array:
    """Multiply 8-bit integers and inputs from -127 to 127: integer sums, scaled once."""
    data_OI = weight.data[:, : weight.columns]
    sum_RO = jax.lax.dot_general(
        x_RI, data_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return sum_RO.astype(jnp.float32) * weight.scale.astype(jnp.float32).reshape(1, -1)


def _multiply_groups(x_RI: jax.Array, weight: IntWeight) -> jax.Array:
    """Multiply bfloat16 by codes in groups, in the forms that XLA fuses for a GPU.

    For one row that is a sum, in float32. For several it is a product of bfloat16 weights, rounded
    twice: their scales, and codes times scales (2**-8 of a weight at most). Zero points have a
    product of their own, with the sums of the groups' inputs.
    """
    codes, (outputs, width), zero = weight.data, weight.data.shape, weight.zero
    x_RI = jnp.pad(x_RI, ((0, 0), (0, width - x_RI.shape[1])))
    scale_OG, size = weight.scale, width // weight.scale.shape[1]
    zero_OG = None if zero is None else zero.astype(jnp.float32) - 8
    if x_RI.shape[0] == 1:
        numbers = codes.astype(jnp.float32)
        if zero_OG is not None:
            numbers -= jnp.repeat(zero_OG, size, axis=1)
        scale = jnp.repeat(scale_OG.astype(jnp.float32), size, axis=1)
        terms = numbers * scale * x_RI.astype(jnp.float32)
        return terms.sum(axis=1)[None]
    grouped = codes.astype(jnp.bfloat16).reshape(outputs, -1, size)
    dense = grouped * scale_OG.astype(jnp.bfloat16)[:, :, None]
    y = matmul(x_RI, dense.reshape(outputs, width))
    if zero_OG is None:
        return y
    sum_RG = x_RI.astype(jnp.float32).reshape(x_RI.shape[0], -1, size).sum(axis=2)
    return y - matmul(sum_RG, zero_OG * scale_OG.astype(jnp.bfloat16).astype(jnp.float32))


def _row_matmul(x_1I: jax.Array, weight: IntWeight) -> jax.Array:
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
