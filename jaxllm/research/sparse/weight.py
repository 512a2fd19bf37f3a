"""Sparse weights: a bit mask, and the values of the set bits.

bfloat16-2:4                   at most 2 of each 4 columns are nonzero: 9 bits a weight
bfloat16-bitmap                any columns are nonzero: 1 bit per weight, 16 more if nonzero
float32-..., int8-...          2:4 and bitmap of other dtypes; int8 with one scale per row
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.ops import cuda, native
from jaxllm.ops.cuda.launch import Rows
from jaxllm.research.sparse.speed import find_speed_warning
from jaxllm.weights.safetensors import empty_aligned
from jaxllm.weights.types.arrays import DTYPES, as_weight
from jaxllm.weights.types.base import (
    BLOCK_ROWS,
    ArraySpecs,
    Format,
    ReadBlocks,
    WeightBase,
    check_finite,
    nan_out_of_range,
    round_up,
    to_device,
)
from jaxllm.weights.types.bitpack import CHUNK
from jaxllm.weights.types.int_weight import IntFormat, IntWeight

TWO_OF_FOUR, BITMAP = PATTERNS = ("2:4", "bitmap")
TAIL_PADDING = 128  # padding of a bitmap's values: how far a kernel may read past the end

_CODES = IntFormat(8, None)  # quantizes to int8 with one scale per row
_BITS = (1 << np.arange(8)).astype(np.uint8)


class SparseWeight(WeightBase, struct.PyTreeNode):
    """`weight[o, i]` is the stored value if bit i of row o is set, otherwise 0.

    I' is I rounded up to whole chunks of 128 columns; all R rows of a stack count as rows.

    Pattern "2:4": exactly two bits of each aligned 4 columns are set; the value is 0 if the weight
    is 0 or beyond I. Pattern "bitmap": the bits of the nonzero weights are set, none beyond I.
    """

    mask: jax.Array  # uint8 [..., O, I' / 8], bit i % 8 of byte i // 8 for column i
    # In column order; float32, bfloat16 or int8. "2:4": [..., O, I' / 2]. "bitmap":
    # [V], all rows one after the other, then `TAIL_PADDING` unused ones.
    values: jax.Array
    begin: jax.Array | None  # "bitmap": int32 [R + 1], where each row's values begin
    # int8: float32 [..., O, 1]; codes and scales are those of an IntWeight int8.
    scale: jax.Array | None
    columns: int = struct.field(pytree_node=False)  # I

    @property
    def supports_int8_inputs(self) -> bool:  # type: ignore[override]
        return self.scale is not None

    @property
    def has_row_scale(self) -> bool:
        return self.scale is not None

    @property
    def trainable_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("values",) if self.scale is None else ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.mask.shape[:-1], self.columns)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.float32) if self.scale is not None else self.values.dtype

    @property
    def pattern(self) -> str:
        return TWO_OF_FOUR if self.begin is None else BITMAP

    @property
    def format(self) -> str:
        return SparseFormat(str(self.values.dtype), self.pattern).name

    def with_zeros(self) -> jax.Array | IntWeight:
        """Return the weight with its zeros: an array, or integers with the same codes."""
        numbers = self._expand_values()
        if self.scale is None:
            return numbers[..., : self.columns]
        return IntWeight(numbers, self.scale, None, 8, None, self.columns)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        """Return the weights; integers are dequantized in float32."""
        return as_weight(self.with_zeros()).to_dense(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        def row(x: jax.Array) -> jax.Array:
            return jnp.asarray(x).at[index.reshape(-1)].get(mode="clip")

        if self.begin is None:
            return nan_out_of_range(jax.tree.map(row, self).to_dense(), index, self.mask.shape[0])
        scale = None if self.scale is None else row(self.scale)
        # Only the rows' offsets are gathered: the values stay in place.
        part = self.replace(mask=row(self.mask), begin=row(self.begin[:-1]), scale=scale)
        return nan_out_of_range(part.to_dense(), index, self.mask.shape[0])

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        return as_weight(self.with_zeros()).matmul(x_RI)

    def native_matrix(self) -> native.Matrix:
        return native.Matrix(_KINDS[str(self.values.dtype), self.pattern], jax.tree.leaves(self))

    def cuda_matrix(self) -> cuda.Matrix | None:
        bits = 8 * self.values.dtype.itemsize
        if self.begin is not None or bits == 32:
            return None
        arrays = {"weight": self.values, "zero": self.mask}
        arrays |= {} if self.scale is None else {"scale": self.scale}
        return cuda.Matrix(Rows(bits // 2, struct=f"Sparse<{bits}>"), arrays)

    def with_rows(self, index: np.ndarray) -> "SparseWeight":
        return to_sparse(as_weight(self.with_zeros()).with_rows(index), self.pattern)

    def with_columns(self, begin: int, end: int) -> "SparseWeight":
        return to_sparse(as_weight(self.with_zeros()).with_columns(begin, end), self.pattern)

    def concatenate(self, appended: Sequence["SparseWeight"], axis: int) -> "SparseWeight":
        first, *others = (as_weight(x.with_zeros()) for x in (self, *appended))
        return to_sparse(first.concatenate(others, axis), self.pattern)

    @jax.jit
    def _expand_values(self) -> jax.Array:
        """Return the values `[..., O, I']`, 0 if no bit is set."""
        *rows, width = self.mask.shape
        byte, bit = self.mask[..., None], _BITS.reshape(*(1 for _ in self.mask.shape), 8)
        rank = jax.lax.population_count(byte & (bit - 1)).astype(jnp.int32)  # in its byte
        if self.begin is None:  # two for each four columns: four for each byte
            place = jnp.minimum(rank, 3)
            number = jnp.take_along_axis(self.values.reshape(*rows, width, 4), place, axis=-1)
        else:
            count = jax.lax.population_count(self.mask).astype(jnp.int32)
            before = jnp.cumsum(count, axis=-1) - count
            begin = self.begin[: math.prod(rows)].reshape(*rows, 1)
            number = self.values.at[(begin + before)[..., None] + rank].get(mode="clip")
        number = jnp.where((byte & bit) != 0, number, jnp.zeros((), number.dtype))
        return number.reshape(*rows, 8 * width)


_KINDS = {
    ("float32", TWO_OF_FOUR): native.Kind.SPARSE24_F32,
    ("bfloat16", TWO_OF_FOUR): native.Kind.SPARSE24_BF16,
    ("int8", TWO_OF_FOUR): native.Kind.SPARSE24_INT8,
    ("float32", BITMAP): native.Kind.BITMAP_F32,
    ("bfloat16", BITMAP): native.Kind.BITMAP_BF16,
    ("int8", BITMAP): native.Kind.BITMAP_INT8,
}
NAMES = tuple("-".join(key) for key in _KINDS)


@dataclasses.dataclass(frozen=True)
class SparseFormat(Format):
    """Values of a dtype (`int8`: with one scale per row) in a pattern: see `SparseWeight`."""

    dtype: str
    pattern: str

    is_data_dependent = True

    @property
    def name(self) -> str:
        return f"{self.dtype}-{self.pattern}"

    @property
    def dense_format(self) -> str:  # type: ignore[override]
        return self.dtype

    @property
    def speed_warning(self) -> str | None:  # type: ignore[override]
        return find_speed_warning(self.name)

    def drop_zeros(self, weight: jax.Array | WeightBase) -> SparseWeight:
        return to_sparse(weight, self.pattern)  # keeps the codes of integers

    @property
    def lossless_dtype(self) -> str:
        return "float32" if self.dtype == "int8" else self.dtype

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> SparseWeight:
        """Store the nonzero values; integers are rounded as `int8` rounds them.

        Raises:
            ConfigError: if the pattern is 2:4 and more than 2 of 4 columns are nonzero, and for
                int8 without columns.
        """
        if self.dtype == "int8" and not shape[-1]:
            raise ConfigError(f"{self.name} requires a matrix with columns, got shape {shape}")

        def quantize_each() -> Iterable[tuple[np.ndarray, np.ndarray | None]]:
            for block in blocks():
                array = jax.device_put(block, may_alias=True)
                if self.dtype != "int8":
                    yield np.asarray(array.astype(DTYPES[self.dtype])), None
                else:
                    codes = _CODES.quantize(array)
                    yield np.asarray(codes.data)[:, : shape[-1]], np.asarray(codes.scale)

        return self._from_blocks(shape, quantize_each)

    def _from_blocks(
        self,
        shape: tuple[int, ...],
        blocks: Callable[[], Iterable[tuple[np.ndarray, np.ndarray | None]]],
    ) -> SparseWeight:
        """Return the weight of blocks of rows and scales. Bitmaps read the blocks twice."""
        *rows, columns = shape
        total, crowded, counts = math.prod(rows), 0, [np.zeros(1, np.int64)]
        if self.pattern == BITMAP:
            counts += [np.count_nonzero(block, axis=1) for block, _ in blocks()]
            begin = np.cumsum(np.concatenate(counts))
            if begin[-1] + TAIL_PADDING > np.iinfo(np.int32).max:
                raise ConfigError(
                    f"{self.name}: too many nonzero values: got {begin[-1]}, the maximum is"
                    " 2**31 - 129"
                )
        sizes = self._specs(
            shape, 0 if self.pattern == TWO_OF_FOUR else int(begin[-1]) + TAIL_PADDING
        )
        arrays = {name: empty_aligned(size, dtype) for name, (size, dtype) in sizes.items()}
        mask = arrays[".mask"].reshape(total, -1)
        if self.pattern == BITMAP:
            arrays[".begin"][...] = begin
            arrays[".values"][begin[-1] :] = 0
        done = 0
        for block, scale in blocks():
            block_rows = slice(done, done + len(block))
            wide = np.pad(block, ((0, 0), (0, round_up(columns, CHUNK) - columns)))
            if self.pattern == TWO_OF_FOUR:
                bits, two, more = map(np.asarray, _pack_two_of_four(wide))
                arrays[".values"].reshape(total, -1)[block_rows] = two
                crowded += int(more)
            else:
                is_nonzero = wide != 0
                bits = np.packbits(is_nonzero, axis=1, bitorder="little")
                arrays[".values"][begin[done] : begin[done + len(block)]] = wide[is_nonzero]
            mask[block_rows] = bits
            if scale is not None:
                arrays[".scale"].reshape(total, 1)[block_rows] = scale
            done += len(block)
        if crowded:
            raise ConfigError(
                f"{self.name}: {crowded} of {total * round_up(columns, 4) // 4} groups of 4"
                f" columns have more than 2 nonzero weights. Prune the matrix {shape} to 2:4 first"
            )
        return self.from_arrays(shape, to_device(arrays))

    def _specs(self, shape: tuple[int, ...], values: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        *rows, columns = shape
        width = round_up(columns, CHUNK)
        sizes: dict[str, tuple[tuple[int, ...], Any]] = {".mask": ((*rows, width // 8), np.uint8)}
        dtype = np.int8 if self.dtype == "int8" else DTYPES[self.dtype]
        if self.pattern == TWO_OF_FOUR:
            sizes[".values"] = ((*rows, width // 2), dtype)
        else:
            sizes[".values"] = ((values,), dtype)
            sizes[".begin"] = ((math.prod(rows) + 1,), np.int32)
        return {**sizes, ".scale": ((*rows, 1), np.float32)} if self.dtype == "int8" else sizes

    def array_specs(self, shape: tuple[int, ...]) -> ArraySpecs:
        specs: ArraySpecs = dict(self._specs(shape, 0))
        if self.pattern == BITMAP:
            specs[".values"] = ((None,), specs[".values"][1])
        return specs

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> SparseWeight:
        begin, scale = arrays.get(".begin"), arrays.get(".scale")
        return SparseWeight(arrays[".mask"], arrays[".values"], begin, scale, shape[-1])

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        values, width = arrays[".values"], arrays[".mask"].shape[-1]
        mask = arrays[".mask"].reshape(-1, width)
        if self.pattern == TWO_OF_FOUR:
            _check_groups(path, mask, values.reshape(-1, 4 * width), shape[-1])
        else:
            _check_counts(path, mask, values, shape[-1], arrays[".begin"])
        if self.dtype == "int8":
            check_finite(path, arrays, ".scale")


def parse(name: str, _: Callable[[str], Format]) -> SparseFormat | None:
    """Parse `bfloat16-2:4`, `int8-bitmap` and so on; None for other names."""
    return SparseFormat(*name.rsplit("-", 1)) if name in NAMES else None


def to_sparse(weight: jax.Array | WeightBase, pattern: str) -> SparseWeight:
    """Store a weight without its zeros, bit for bit, in the pattern "2:4" or "bitmap".

    Zeros lose their sign.

    Args:
        weight: an array of float32 or bfloat16, or an 8-bit IntWeight with float32 scales per row,
            whose codes and scales are kept.

    Raises:
        ConfigError: for another type of weight, an unknown pattern, and for 2:4 if more than 2 of 4
            columns are nonzero; the message counts the groups.
    """
    if pattern not in PATTERNS:
        raise ConfigError(f"sparse pattern must be {' or '.join(PATTERNS)}, got {pattern!r:.40}")
    if isinstance(weight, IntWeight) and weight.format == "int8":
        codes = np.asarray(weight.data).reshape(-1, weight.data.shape[-1])[:, : weight.columns]
        scale_O = np.asarray(weight.scale).reshape(-1, 1)
        blocks = [slice(i, i + BLOCK_ROWS) for i in range(0, len(codes), BLOCK_ROWS)]
        return SparseFormat("int8", pattern)._from_blocks(
            weight.shape, lambda: ((codes[block], scale_O[block]) for block in blocks)
        )
    name = weight.format if isinstance(weight, WeightBase) else str(weight.dtype)
    if name not in ("float32", "bfloat16"):
        raise ConfigError(
            f"sparse weights must be float32, bfloat16 or int8 (one scale per row), got {name}"
        )
    return SparseFormat(name, pattern).quantize(weight)  # type: ignore[arg-type]  # an array


@jax.jit
def _pack_two_of_four(block: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return bits `[n, I' / 8]` and values `[n, I' / 2]` of a block `[n, I']`.

    Also returns the number of groups with too many values.

    Values are compared as bits: XLA's threads flush the smallest floats to 0, and sums would change
    the payload of NaN.
    """
    bits_dtype = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[block.dtype.itemsize]
    number = jax.lax.bitcast_convert_type(block.reshape(block.shape[0], -1, 4), bits_dtype)
    is_int = block.dtype == jnp.int8
    is_nonzero = (number if is_int else number << 1) != 0  # shifts out a float's sign
    count = is_nonzero.sum(axis=-1, keepdims=True)
    is_set = is_nonzero | (jnp.cumsum(~is_nonzero, axis=-1) <= 2 - count)  # fills up with zeros
    rank = jnp.cumsum(is_set, axis=-1) - 1
    two = [jnp.where(is_nonzero & (rank == k), number, jnp.zeros((), bits_dtype)) for k in (0, 1)]
    values = jnp.stack([x[..., 0] | x[..., 1] | x[..., 2] | x[..., 3] for x in two], axis=-1)
    values = jax.lax.bitcast_convert_type(values, block.dtype).reshape(block.shape[0], -1)
    eight = is_set.reshape(block.shape[0], -1, 8)
    bits = jnp.where(eight, _BITS.reshape(1, 1, 8), np.uint8(0)).sum(axis=-1, dtype=jnp.uint8)
    return bits, values, (count > 2).sum()


def _check_groups(path: str, mask: np.ndarray, values: np.ndarray, columns: int) -> None:
    wrong = int((_BIT_COUNTS[mask & 15] != 2).sum() + (_BIT_COUNTS[mask >> 4] != 2).sum())
    if wrong:
        raise CheckpointError(f"{path}.mask has {wrong} groups of 4 columns without exactly 2 bits")
    first = columns // 4  # the first group that may have columns beyond the end
    bits = np.unpackbits(mask[:, first // 2 :], axis=1, bitorder="little")
    is_set = bits.astype(bool)[:, first % 2 * 4 :]
    beyond = np.nonzero(is_set)[1].reshape(len(mask), -1) >= columns - 4 * first
    if (values[:, 2 * first :][beyond] != 0).any():
        raise CheckpointError(f"{path}.values has nonzero values beyond its {columns} columns")


def _check_counts(
    path: str, mask: np.ndarray, values: np.ndarray, columns: int, begin: np.ndarray
) -> None:
    beyond = np.packbits(np.arange(mask.shape[1] * 8) >= columns, bitorder="little")
    if (mask & beyond[None]).any():
        raise CheckpointError(f"{path}.mask has bits beyond its {columns} columns")
    counts = _BIT_COUNTS[mask].sum(axis=1, dtype=np.int64)
    if begin[0] != 0 or (np.diff(begin.astype(np.int64)) != counts).any():
        raise CheckpointError(f"{path}.begin does not match the bits per row in {path}.mask")
    if len(values) != begin[-1] + TAIL_PADDING:
        raise CheckpointError(
            f"{path}.values has {len(values)} values, {path}.begin expects {begin[-1]} +"
            f" {TAIL_PADDING}"
        )


_BIT_COUNTS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(
    axis=1, dtype=np.uint8
)
