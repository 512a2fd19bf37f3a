"""Affine quantization: integers with a scale and a zero point.

`r = scale (q - zero)` (Jacob et al. 2018, arXiv 1712.05877, eq. 1). All code takes scales and codes
from here, also methods that choose integers themselves, so that results agree bit for bit.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.weights.types import bitpack
from jaxllm.weights.types.base import BLOCK_ROWS, round_up
from jaxllm.weights.types.bitpack import CHUNK


@dataclasses.dataclass(frozen=True)
class AffineQuantizer:
    """Affine quantization to integers, as pure functions that can be compiled."""

    bits: int
    group: int | None  # columns per scale; None: one scale per row (8 bits only)
    zero_point: bool = False
    scale_dtype: str = "float32"  # the dtype of scales

    @property
    def code_range(self) -> tuple[int, int]:
        """The minimum and the maximum code."""
        return (0, 2**self.bits - 1) if self.zero_point or self.bits < 8 else (-127, 127)

    @property
    def zero_code(self) -> int:
        """The code of zero if there are no zero points."""
        return 0 if self.bits == 8 else 2 ** (self.bits - 1)

    @property
    def code_dtype(self) -> Any:
        return jnp.dtype(jnp.int8 if self.code_range[0] < 0 else jnp.uint8)

    def group_size(self, columns: int) -> int:
        """Return the columns of a group."""
        return self.group or round_up(columns, CHUNK)

    def choose_grid(
        self, w_OGg: jax.Array, shrink: jax.Array | float = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        """Return scales, as they are stored, and zero points `[..., G]` of groups `[..., G, g]`.

        Symmetric, 8 bits: the largest magnitude is 127 steps. Symmetric, fewer bits: it is minus
        half of the levels, such as -8 steps of 4 bits, which uses all levels (as llama.cpp's Q4_0);
        the zero points are all `zero_code`. With a zero point: all steps cover the range from
        minimum to maximum, and zero.

        Args:
            shrink: a factor on that range, `[..., G]` or one number, for a search that clips.
        """
        w_OGg, scale_dtype = w_OGg.astype(jnp.float32), jnp.dtype(self.scale_dtype)
        least, most = self.code_range
        if self.zero_point:
            low = jnp.minimum(w_OGg.min(-1), 0) * shrink
            high = jnp.maximum(w_OGg.max(-1), 0) * shrink
            scale = ((high - low) / most).astype(scale_dtype)
            wide = scale.astype(jnp.float32)
            zero = jnp.clip(jnp.round(-low / jnp.where(wide == 0, 1.0, wide)), least, most)
            return scale, zero.astype(jnp.uint8)
        if self.bits == 8:
            end = jnp.abs(w_OGg).max(-1) * shrink / most
        else:
            largest = jnp.abs(w_OGg).argmax(-1, keepdims=True)
            end = jnp.take_along_axis(w_OGg, largest, -1)[..., 0] * shrink / -self.zero_code
        return end.astype(scale_dtype), jnp.full(end.shape, self.zero_code, jnp.uint8)

    def to_codes(self, w: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
        """Return the nearest code of each number (half to even); the three shapes broadcast."""
        wide, (least, most) = scale.astype(jnp.float32), self.code_range
        steps = jnp.round(w.astype(jnp.float32) / jnp.where(wide == 0, 1.0, wide))
        return jnp.clip(steps + zero.astype(jnp.float32), least, most).astype(self.code_dtype)

    def to_values(self, codes: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
        """Dequantize codes to float32, bit for bit as `dense` does."""
        steps = codes.astype(jnp.float32) - zero.astype(jnp.float32)
        return steps * scale.astype(jnp.float32)


@partial(jax.jit, static_argnums=1)
def quantize_rows(
    array: jax.Array, quantizer: AffineQuantizer
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize `[O, I]` to data, scales and zero points, `BLOCK_ROWS` rows at a time."""
    rows, columns = array.shape
    width, group = round_up(columns, CHUNK), quantizer.group_size(columns)

    def quantize_block(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        w = jnp.pad(w.astype(jnp.float32), ((0, 0), (0, width - columns)))
        w_OGg = w.reshape(w.shape[0], width // group, group)
        scale, zero = quantizer.choose_grid(w_OGg)
        q = quantizer.to_codes(w_OGg, scale[..., None], zero[..., None])
        return bitpack.pack_codes(q.reshape(w.shape), quantizer.bits), scale, zero

    blocks = rows // BLOCK_ROWS
    if not blocks:
        return quantize_block(array)

    def block(i: jax.Array) -> Any:
        return quantize_block(jax.lax.dynamic_slice_in_dim(array, i * BLOCK_ROWS, BLOCK_ROWS, 0))

    done = jax.lax.map(block, jnp.arange(blocks))
    done = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), done)
    if rows % BLOCK_ROWS:
        done = jax.tree.map(
            lambda *x: jnp.concatenate(x), done, quantize_block(array[blocks * BLOCK_ROWS :])
        )
    return done
