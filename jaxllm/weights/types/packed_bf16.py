"""bfloat16 weights in 12 bits, losslessly."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.ops import cuda, native
from jaxllm.ops.cuda.launch import Rows
from jaxllm.weights.types.arrays import DTYPES, DenseWeight
from jaxllm.weights.types.base import (
    ArraySpecs,
    Format,
    ReadBlocks,
    WeightBase,
    fill_arrays,
    nan_out_of_range,
    round_up,
    to_device,
)

NAME = "bf16-packed"
MAX_ESCAPES = 64  # of a row, for a CUDA kernel; at random a row of 4,096 weights has less than one


class PackedBf16Weight(WeightBase, struct.PyTreeNode):
    """bfloat16 in 12 bits, losslessly: sign and mantissa in a byte, the exponent in four bits.

    The four bits select one of 16 consecutive exponents, `base` to `base + 15`, chosen to cover as
    many weights as possible; the few others are stored separately, as exact escapes. Rows are
    stored in whole blocks of 64 columns. In a block, byte `8 (2 j + h) + i` belongs to column `32 h
    + 8 j + i` (j < 4, h < 2, i < 8), an order that the kernel's byte interleaving undoes. The
    exponent of byte p of blocks 2 b and 2 b + 1 is in the low and high bits of byte p of nibble
    block b.
    """

    sign_mantissa: jax.Array  # uint8 [..., O, I']; I' is I in whole 64
    nibbles: jax.Array  # uint8 [..., O, I'' / 2]; I'' is I in whole 128
    base: jax.Array  # int32 scalar
    escape_begin: jax.Array  # int32 [R + 1], where the escapes of each of all R rows begin
    escape_column: jax.Array  # int32 [E], ascending in a row
    escape_value: jax.Array  # bfloat16 [E]
    columns: int = struct.field(pytree_node=False)  # I
    max_escapes: int = struct.field(pytree_node=False)  # the most escapes in a row
    # int32 [O + 2 + 2 E], as CUDA kernels read them (`scale` in ops/cuda/csrc/formats.h); or None.
    cuda_escapes: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.sign_mantissa.shape[:-1], self.columns)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.bfloat16)

    @property
    def format(self) -> str:
        return NAME

    def to_dense(self, dtype: Any = None) -> jax.Array:
        """Return the weights, bit for bit in bfloat16."""
        rows = jnp.arange(self.size // self.columns)
        return self._unpack_rows(rows).reshape(self.shape).astype(dtype or jnp.bfloat16)

    def take(self, index: jax.Array) -> jax.Array:
        rows = self.sign_mantissa.shape[0]
        return nan_out_of_range(
            self._unpack_rows(jnp.clip(index.reshape(-1), 0, rows - 1)), index, rows
        )

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        return DenseWeight(self.to_dense()).matmul(x_RI)

    def for_accelerator(self) -> "jax.Array | PackedBf16Weight":
        """Return the weights unpacked, as in its own product a GPU would write them out each time;
        but packed if CUDA kernels read them. Those multiply a row's escapes one after the other.
        """
        whole = self.ndim == 2 and not (self.shape[0] % 16 or self.columns % 128)
        few = self.max_escapes <= MAX_ESCAPES
        # Without 0 and infinity: the kernels' exponents are others.
        if cuda.find_problem() is None and whole and few and 0 < int(self.base) < 240:
            return self.list_escapes()
        return self.to_dense()

    def list_escapes(self) -> "PackedBf16Weight":
        """Return a matrix with its escapes as CUDA kernels read them."""
        base, bits = int(self.base), np.asarray(self.escape_value).view(np.uint16).astype(np.int32)
        packed = (bits & 0x807F) | (np.clip(bits >> 7 & 255, base, base + 15) << 7)
        escapes = np.stack([np.asarray(self.escape_column), bits << 16 | packed], axis=1)
        scale = np.array([2.0 ** (base - 118)], np.float32).view(np.int32)
        parts: list[Any] = [scale, self.escape_begin, escapes.reshape(-1)]
        return self.replace(cuda_escapes=jax.device_put(np.concatenate(parts)))

    def cuda_matrix(self) -> cuda.Matrix | None:
        if self.cuda_escapes is None:
            return None
        arrays = {"weight": self.sign_mantissa, "zero": self.nibbles, "scale": self.cuda_escapes}
        return cuda.Matrix(Rows(8, struct="PackedBFloat16"), arrays)

    def native_matrix(self) -> native.Matrix | None:
        if self.cuda_escapes is not None:
            return None
        return native.Matrix(native.Kind.PACKED_BF16, jax.tree.leaves(self))

    def arrays(self) -> dict[str, jax.Array]:
        arrays = super().arrays()
        return {name: array for name, array in arrays.items() if name != ".cuda_escapes"}

    def with_rows(self, index: np.ndarray) -> "PackedBf16Weight":
        return PackedBf16Format().quantize(self.to_dense()[..., index, :])

    def with_columns(self, begin: int, end: int) -> "PackedBf16Weight":
        return PackedBf16Format().quantize(self.to_dense()[..., begin:end])

    def concatenate(self, appended: Sequence["PackedBf16Weight"], axis: int) -> "PackedBf16Weight":
        return PackedBf16Format().quantize(
            jnp.concatenate([x.to_dense() for x in (self, *appended)], axis=axis - 2)
        )

    @jax.jit
    def _unpack_rows(self, index: jax.Array) -> jax.Array:
        byte = _flatten_rows(self.sign_mantissa)[index].astype(jnp.uint16)
        nibble = _flatten_rows(self.nibbles)[index].reshape(index.shape[0], -1, 64)
        nibble = jnp.stack([nibble & 15, nibble >> 4], axis=2).reshape(index.shape[0], -1)
        exponent = nibble[:, : byte.shape[1]].astype(jnp.uint16) + self.base.astype(jnp.uint16)
        bits = ((byte & 128) << 8) | (exponent << 7) | (byte & 127)
        block = bits.reshape(index.shape[0], -1, 4, 2, 8).swapaxes(2, 3)
        dense = jax.lax.bitcast_convert_type(block, jnp.bfloat16).reshape(index.shape[0], -1)
        dense = dense[:, : self.columns]
        if not self.max_escapes:
            return dense
        begin, end = self.escape_begin[index], self.escape_begin[index + 1]
        at = begin[:, None] + jnp.arange(self.max_escapes)[None]
        last = self.escape_column.shape[0] - 1
        column = jnp.where(at < end[:, None], self.escape_column[jnp.minimum(at, last)], -1)
        column = jnp.where(column < 0, self.columns, column)  # out of range: dropped
        row = jnp.arange(index.shape[0])[:, None]
        return dense.at[row, column].set(self.escape_value[jnp.minimum(at, last)], mode="drop")


@dataclasses.dataclass(frozen=True)
class PackedBf16Format(Format):
    """The format of `PackedBf16Weight`."""

    name = NAME
    lossless_dtype = "bfloat16"
    is_data_dependent = True

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> PackedBf16Weight:
        return pack_bf16(shape, blocks)

    def array_specs(self, shape: tuple[int, ...]) -> ArraySpecs:
        rows = shape[:-1]
        return {
            **_fixed_specs(shape),
            ".base": ((), np.int32),
            ".escape_begin": ((int(np.prod(rows)) + 1,), np.int32),
            ".escape_column": ((None,), np.int32),
            ".escape_value": ((None,), DTYPES["bfloat16"]),
        }

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> PackedBf16Weight:
        widest = int(np.diff(np.asarray(arrays[".escape_begin"])).max(initial=0))
        fields = {key.removeprefix("."): value for key, value in arrays.items()}
        return PackedBf16Weight(**fields, columns=shape[-1], max_escapes=widest)

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        names = (".escape_begin", ".escape_column", ".escape_value")
        begin, column, value = (arrays[name] for name in names)
        ordered = np.diff(column) > 0
        ordered[np.unique(begin[(begin > 0) & (begin < len(column))]) - 1] = True  # a row's first
        valid = (
            len(column) == len(value)
            and begin[0] == 0
            and begin[-1] == len(column)
            and (np.diff(begin) >= 0).all()
            and column.min(initial=0) >= 0
            and column.max(initial=0) < shape[-1]
            and ordered.all()
            and 0 <= int(arrays[".base"]) <= 240
        )
        if not valid:
            raise CheckpointError(
                f"{path}: escapes of the packed exponents do not match the matrix"
            )


def parse(name: str) -> PackedBf16Format | None:
    """Parse `bf16-packed`; None for other names."""
    return PackedBf16Format() if name == NAME else None


def pack_bf16(shape: tuple[int, ...], blocks: ReadBlocks) -> PackedBf16Weight:
    """Pack bfloat16 weights `[..., O, I]` from blocks of rows, which are read twice.

    Raises:
        ConfigError: for another dtype, and if more than 1 in 50 exponents would escape, so that
            nothing is saved.
    """
    size, columns = int(np.prod(shape)), shape[-1]
    counts_of_16 = np.convolve(_count_exponents(blocks()), np.ones(16, int))
    base = int(np.argmax(counts_of_16[15:256]))  # entry 15 + b counts exponents b to b + 15
    escapes = size - int(counts_of_16[15:256].max())
    if escapes * 50 > max(size, 1000):
        raise ConfigError(
            f"{NAME} would not save memory: {escapes} of {size} exponents are outside any 16"
            " consecutive ones. Use bfloat16"
        )
    count, column, value = [np.zeros(1, np.int64)], [], []  # the escapes of each block

    def split(block: np.ndarray) -> list[np.ndarray]:
        arrays = _split_bits(jax.device_put(block, may_alias=True), np.int16(base))
        byte, index, outside = map(np.asarray, arrays)
        row, at = np.divmod(np.flatnonzero(outside), columns)
        count.append(np.bincount(row, minlength=len(block)))
        column.append(at.astype(np.int32))
        value.append(block[row, at])
        pair = _interleave(index).reshape(len(block), -1, 2, 64)
        return [_interleave(byte), (pair[:, :, 0] | (pair[:, :, 1] << 4)).reshape(len(block), -1)]

    arrays = fill_arrays(_fixed_specs(shape), blocks(), split)
    counts = np.concatenate(count)
    arrays |= {  # `jnp.asarray` would compile a program for every other number of escapes
        ".base": np.asarray(base, np.int32),
        ".escape_begin": np.cumsum(counts).astype(np.int32),
        ".escape_column": np.concatenate([np.zeros(0, np.int32), *column]),
        ".escape_value": np.concatenate([np.zeros(0, jnp.bfloat16), *value]),
    }
    return PackedBf16Weight(
        **{name.removeprefix("."): array for name, array in to_device(arrays).items()},
        columns=columns,
        max_escapes=int(counts.max()),
    )


def _fixed_specs(shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shapes and dtypes of the arrays with an entry for each weight."""
    *rows, columns = shape
    return {
        ".sign_mantissa": ((*rows, round_up(columns, 64)), np.uint8),
        ".nibbles": ((*rows, round_up(columns, 128) // 2), np.uint8),
    }


def _count_exponents(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Count the weights with each of the 256 exponents."""
    counts = np.zeros(256, np.int64)
    for block in blocks:
        if block.dtype != jnp.bfloat16:
            raise ConfigError(f"{NAME} requires bfloat16 weights, got {block.dtype}")
        exponent = (block.view(np.uint16) >> 7).astype(np.uint8).reshape(-1)  # drops the sign
        even = exponent.size // 2 * 2
        pairs = np.bincount(exponent[:even].view(np.uint16), minlength=1 << 16).reshape(256, 256)
        counts += pairs.sum(axis=0) + pairs.sum(axis=1)
        counts += np.bincount(exponent[even:], minlength=256)
    return counts


@jax.jit
def _split_bits(weight_OI: jax.Array, base: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return sign and mantissa `[O, I']`, exponent less base `[O, I'']`, and which escape `[O, I]`.

    All are in column order (see `PackedBf16Weight`).
    """
    columns = weight_OI.shape[1]
    bits = jax.lax.bitcast_convert_type(weight_OI, jnp.uint16)
    byte = (((bits >> 8) & 128) | (bits & 127)).astype(jnp.uint8)
    exponent = ((bits >> 7) & 255).astype(jnp.int16)
    index = jnp.clip(exponent - base, 0, 15).astype(jnp.uint8)
    outside = (exponent < base) | (exponent > base + 15)
    return (
        jnp.pad(byte, ((0, 0), (0, round_up(columns, 64) - columns))),
        jnp.pad(index, ((0, 0), (0, round_up(columns, 128) - columns))),
        outside,
    )


def _interleave(byte_OI: np.ndarray) -> np.ndarray:
    """Put a byte for each column in the order of `PackedBf16Weight`; 8 bytes move as one number."""
    eight = byte_OI.view(np.uint64).reshape(len(byte_OI), -1, 2, 4).swapaxes(2, 3)
    return np.ascontiguousarray(eight).reshape(len(byte_OI), -1).view(np.uint8)


def _flatten_rows(x: jax.Array) -> jax.Array:
    """Flatten a stack of matrices to rows."""
    return x.reshape(-1, x.shape[-1])
