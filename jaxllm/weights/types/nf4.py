"""4-bit NormalFloat: 16 levels that normally distributed weights fill evenly (QLoRA).

Dettmers et al. 2023 (arXiv 2305.14314), sections 2 and 3; the levels and the map of the absmax are
those of bitsandbytes. Blocks of 64 run through the flattened matrix, row after row.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import ConfigError
from jaxllm.ops import cuda, native
from jaxllm.ops.cuda.launch import Rows
from jaxllm.weights.types.arrays import add_dependency, matmul
from jaxllm.weights.types.base import (
    ArraySpecs,
    Format,
    ReadBlocks,
    WeightBase,
    check_finite,
    empty_aligned,
    group_slice,
    nan_out_of_range,
    round_up,
    to_device,
)
from jaxllm.weights.types.bitpack import CHUNK

# fmt: off
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
BLOCK = 64  # weights that share an absmax
ABSMAX_BLOCK = 256  # absmax that share a scale
HALF = 32  # weights j and j + 32 of a block share a byte
MAX_F32_ROWS = 16  # more rows of bfloat16 multiply weights rounded to bfloat16


def dynamic_map() -> np.ndarray:
    """Return the 256 levels of the dynamic data type, float32, ascending.

    Dettmers 2016 (arXiv 1511.04561).

    For each sign and each power of ten from 1e-6 to 1, [0.1, 1] is split into equal parts, 1 for
    the lowest power and twice as many for each next one; their midpoints, times the power, are the
    levels. 0 and 1 are added.
    """
    levels = [0.0, 1.0]
    for bits in range(7):
        edges = np.linspace(0.1, 1, 2**bits + 1)
        middles = 10.0 ** (bits - 6) * (edges[:-1] + edges[1:]) / 2
        levels += [*middles, *-middles]
    return np.sort(levels).astype(np.float32)


DYNAMIC = dynamic_map()


class Nf4Weight(WeightBase, struct.PyTreeNode):
    """`weight.reshape(-1)[64 b + j] = LEVELS[q[b, j]] * absmax[b]` of a matrix `[O, I]`.

    With double quantization the absmax is `DYNAMIC[absmax[b]] * scale[b // 256] + mean`. The weight
    is never trained: gradients flow only to the other factor of a product.
    """

    # uint8 [..., B, 32], B = O I / 64 rounded up: byte j of a block has q of its weight j in the
    # low four bits, of weight j + 32 in the high. The last block is padded with zeros.
    data: jax.Array
    absmax: jax.Array  # float32 [..., B], or uint8 with double quantization
    scale: jax.Array | None  # float32 [..., B / 256] rounded up; None: no double quantization
    mean: jax.Array | None  # float32 [...], likewise
    rows: int = struct.field(pytree_node=False)  # O
    columns: int = struct.field(pytree_node=False)  # I

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-2], self.rows, self.columns)

    @property
    def format(self) -> str:
        return NF4Format(self.scale is not None).name

    def to_dense(self, dtype: Any = None) -> jax.Array:
        """Return the weights, computed in float32."""
        weights: jax.Array = _dense(self).astype(dtype or jnp.float32)
        return weights

    def take(self, index: jax.Array) -> jax.Array:
        return nan_out_of_range(_take_rows(self, index.reshape(-1)), index, self.rows)

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        # Or XLA:CPU dequantizes all layers before the first, and keeps them for a loop of steps.
        weight = add_dependency(x_RI, self)
        many = x_RI.dtype == jnp.bfloat16 and x_RI.shape[0] > MAX_F32_ROWS
        return matmul(x_RI, weight.to_dense(jnp.bfloat16 if many else jnp.float32))

    def for_accelerator(self) -> "Nf4Weight":
        """Return the weight with its absmax as float32, if CUDA kernels read them."""
        if self.ndim > 2 or self.columns % CHUNK or cuda.find_problem() is not None:
            return self
        return self.replace(absmax=_absmax(self), scale=None, mean=None)

    def cuda_matrix(self) -> cuda.Matrix | None:
        if self.scale is not None or self.columns % CHUNK:
            return None
        arrays = {"weight": self.data, "scale": self.absmax}
        rows = {name: array.reshape(self.rows, -1) for name, array in arrays.items()}
        return cuda.Matrix(Rows(4, BLOCK, struct="Nf4"), rows)

    def native_matrix(self) -> native.Matrix | None:
        if self.columns % BLOCK or not self.columns:  # rows share blocks
            return None
        arrays = [self.data, self.absmax, jnp.asarray(LEVELS, jnp.float32)]
        if self.scale is not None and self.mean is not None:
            arrays += [jnp.asarray(DYNAMIC), self.scale, self.mean]
        return native.Matrix(native.Kind.NF4, arrays, BLOCK, self.rows)

    def with_rows(self, index: np.ndarray) -> "Nf4Weight":
        """Take rows; the absmax become float32, as slices may split the blocks of their scales."""
        data, absmax = self._row_blocks()
        return self._from_row_blocks(data[..., index, :, :], absmax[..., index, :])

    def with_columns(self, begin: int, end: int) -> "Nf4Weight":
        """Take columns, as `with_rows` does."""
        data, absmax = self._row_blocks()
        groups = group_slice(self.format, begin, end, self.columns, BLOCK)
        return self._from_row_blocks(data[..., groups, :], absmax[..., groups])

    def concatenate(self, appended: Sequence["Nf4Weight"], axis: int) -> "Nf4Weight":
        """Concatenate, as `with_rows` does."""
        data, absmax = zip(*(x._row_blocks() for x in (self, *appended)), strict=True)
        return self._from_row_blocks(
            jnp.concatenate(data, axis=axis - 3), jnp.concatenate(absmax, axis=axis - 2)
        )

    def _row_blocks(self) -> tuple[jax.Array, jax.Array]:
        """Return blocks `[..., O, I / 64, 32]` and their absmax, float32 `[..., O, I / 64]`.

        Raises:
            ConfigError: if a block spans two rows.
        """
        if self.columns % BLOCK:
            raise ConfigError(
                f"{self.format} with {self.columns} columns cannot be sliced: rows share a block"
                f" unless columns are a multiple of {BLOCK}"
            )
        stack = self.data.shape[:-2]
        return (
            self.data.reshape(*stack, self.rows, -1, HALF),
            _absmax(self).reshape(*stack, self.rows, -1),
        )

    def _from_row_blocks(self, data: jax.Array, absmax: jax.Array) -> "Nf4Weight":
        *stack, rows, blocks = absmax.shape
        data = data.reshape(*stack, rows * blocks, HALF)
        absmax = absmax.reshape(*stack, rows * blocks)
        return Nf4Weight(data, absmax, None, None, rows=rows, columns=blocks * BLOCK)


@dataclasses.dataclass(frozen=True)
class NF4Format(Format):
    """The format of `Nf4Weight`."""

    sliceable_axes = ()  # blocks may span rows

    double_quant: bool = True  # whether the absmax have 8 bits, or else 32

    @property
    def name(self) -> str:
        return "nf4" if self.double_quant else "nf4-f32"

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> Nf4Weight:
        """Divide each weight by its block's absmax and round it to the nearest level.

        For double quantization, subtract the mean from the absmax, divide them by the largest of
        their block, and round to the nearest level of the dynamic map.

        Raises:
            ConfigError: for an empty matrix.
        """
        if 0 in shape:
            raise ConfigError(f"{self.name} requires a nonempty matrix, got shape {shape}")
        *stack, rows, columns = shape
        count = round_up(rows * columns, BLOCK) // BLOCK
        data = empty_aligned((*stack, count, HALF), np.dtype(np.uint8))
        absmax = empty_aligned((*stack, count), np.dtype(np.float32))
        flat_data, flat_absmax, done = data.reshape(-1, HALF), absmax.reshape(-1), 0
        for cut in _iter_blocks(blocks(), rows * columns):
            end = done + len(cut)
            flat_data[done:end], flat_absmax[done:end] = _quantize_blocks(jnp.asarray(cut))
            done = end
        arrays = {".data": data, ".absmax": absmax}
        if self.double_quant:
            codes, scale, mean = map(np.asarray, _double_quantize(jnp.asarray(absmax)))
            arrays = {".data": data, ".absmax": codes, ".scale": scale, ".mean": mean}
        return self.from_arrays(shape, to_device(arrays))

    def array_specs(self, shape: tuple[int, ...]) -> ArraySpecs:
        *stack, rows, columns = shape
        count = round_up(rows * columns, BLOCK) // BLOCK
        specs: ArraySpecs = {
            ".data": ((*stack, count, HALF), np.uint8),
            ".absmax": ((*stack, count), np.uint8 if self.double_quant else np.float32),
        }
        if self.double_quant:
            scales = round_up(count, ABSMAX_BLOCK) // ABSMAX_BLOCK
            specs |= {".scale": ((*stack, scales), np.float32), ".mean": (tuple(stack), np.float32)}
        return specs

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        check_finite(path, arrays, *((".scale", ".mean") if self.double_quant else (".absmax",)))

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> Nf4Weight:
        scale, mean = arrays.get(".scale"), arrays.get(".mean")
        return Nf4Weight(arrays[".data"], arrays[".absmax"], scale, mean, shape[-2], shape[-1])


def parse(name: str) -> NF4Format | None:
    """Parse `nf4` (double quantization) and `nf4-f32` (without); None for other names."""
    return {"nf4": NF4Format(), "nf4-f32": NF4Format(double_quant=False)}.get(name)


def _iter_blocks(blocks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield matrices of `size` numbers as float32 blocks `[n, 64]`, padded with zeros."""
    rest, missing = np.zeros(0, np.float32), size
    for block in blocks:
        flat = np.concatenate([rest, block.reshape(-1).astype(np.float32)])
        while len(flat) >= missing:
            yield np.pad(flat[:missing], (0, -missing % BLOCK)).reshape(-1, BLOCK)
            flat, missing = flat[missing:], size
        full = len(flat) // BLOCK * BLOCK
        if full:
            yield flat[:full].reshape(-1, BLOCK)
        rest, missing = flat[full:], missing - full


@jax.jit
def _quantize_blocks(w_Bj: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantize blocks `[B, 64]`: return their bytes and absmax."""
    absmax_B = jnp.abs(w_Bj).max(-1)
    scaled = w_Bj / jnp.where(absmax_B == 0, 1.0, absmax_B)[:, None]
    q = jnp.zeros(scaled.shape, jnp.uint8)
    for middle in _midpoints(np.asarray(LEVELS, np.float32)):
        q += (scaled > middle).astype(jnp.uint8)
    return q[:, :HALF] | (q[:, HALF:] << 4), absmax_B


@jax.jit
def _double_quantize(absmax: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize absmax `[..., B]` to codes `[..., B]`, scales and means (double quantization)."""
    mean, count = absmax.mean(-1), absmax.shape[-1]
    rest = absmax - mean[..., None]
    wide = jnp.pad(rest, [*[(0, 0)] * mean.ndim, (0, -count % ABSMAX_BLOCK)])
    wide = wide.reshape(*mean.shape, -1, ABSMAX_BLOCK)
    scale = jnp.abs(wide).max(-1)
    scaled = wide / jnp.where(scale == 0, 1.0, scale)[..., None]
    codes = jnp.searchsorted(jnp.asarray(_midpoints(DYNAMIC)), scaled.reshape(-1))
    codes = codes.astype(jnp.uint8).reshape(*mean.shape, -1)[..., :count]
    return codes, scale, mean


def _midpoints(levels: np.ndarray) -> np.ndarray:
    """Return the thresholds above which the next level is the nearest."""
    exact = levels.astype(np.float64)
    return ((exact[1:] + exact[:-1]) / 2).astype(np.float32)


@jax.jit  # op by op, the product would be rounded before the mean is added
def _absmax(weight: Nf4Weight) -> jax.Array:
    """Return the factor of each block's levels, float32 `[..., B]`."""
    if weight.scale is None or weight.mean is None:
        return jax.lax.stop_gradient(weight.absmax)
    scale, mean = jax.lax.stop_gradient((weight.scale, weight.mean))
    wide = jnp.repeat(scale, ABSMAX_BLOCK, axis=-1)[..., : weight.absmax.shape[-1]]
    return jnp.asarray(DYNAMIC)[weight.absmax.astype(jnp.int32)] * wide + mean[..., None]


def _lookup_level(q: jax.Array) -> jax.Array:
    """Return `LEVELS[q]`, float32: selected bit by bit, as XLA:CPU gathers element by element."""
    levels: list[Any] = [np.float32(level) for level in LEVELS]
    for bit in range(4):
        is_set = (q >> bit) & 1 == 1
        pairs = zip(levels[1::2], levels[::2], strict=True)
        levels = [jnp.where(is_set, one, zero) for one, zero in pairs]
    level: jax.Array = levels[0]
    return level


@jax.jit
def _dense(weight: Nf4Weight) -> jax.Array:
    """Return the weights, float32 `[..., O, I]`."""
    halves = [_lookup_level(weight.data & 15), _lookup_level(weight.data >> 4)]
    blocks = jnp.concatenate(halves, axis=-1) * _absmax(weight)[..., None]
    *stack, count, _ = blocks.shape
    flat = blocks.reshape(*stack, count * BLOCK)[..., : weight.rows * weight.columns]
    return flat.reshape(weight.shape)


@jax.jit
def _take_rows(weight: Nf4Weight, index_N: jax.Array) -> jax.Array:
    """Return rows of a matrix by index, float32 `[N, I]`; an index outside is clipped."""
    row_N = jnp.clip(index_N, 0, weight.rows - 1).astype(jnp.int32)
    # A row's first weight as a block and a remainder: as one number it may overflow 32 bits.
    blocks, rest = divmod(weight.columns, BLOCK)
    at_NI = (row_N * rest)[:, None] + jnp.arange(weight.columns, dtype=jnp.int32)[None]
    block_NI, j_NI = (row_N * blocks)[:, None] + at_NI // BLOCK, at_NI % BLOCK
    byte_NI = weight.data[block_NI, j_NI % HALF]
    level_NI = _lookup_level(jnp.where(j_NI < HALF, byte_NI & 15, byte_NI >> 4))
    return level_NI * _absmax(weight)[block_NI]
