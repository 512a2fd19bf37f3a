"""Affine quantization: integers with a scale and a zero point.

`r = scale (q - zero)` (Jacob et al. 2018, arXiv 1712.05877, eq. 1). All code takes scales and codes
from here, also methods that choose integers themselves, so that results agree bit for bit.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.weights.leaves import digits
from jaxllm.weights.leaves.digits import CHUNK
from jaxllm.weights.leaves.leaf import ROWS, up


@dataclasses.dataclass(frozen=True)
class Affine:
    """Affine quantization to integers, as pure functions that can be compiled."""

    bits: int
    group: int | None  # columns per scale; None: one scale per row (8 bits only)
    zero_point: bool = False
    scale: str = "float32"  # the dtype of scales

    @property
    def levels(self) -> tuple[int, int]:
        """The minimum and the maximum code."""
        return (0, 2**self.bits - 1) if self.zero_point or self.bits < 8 else (-127, 127)

    @property
    def middle(self) -> int:
        """The code of zero if there are no zero points."""
        return 0 if self.bits == 8 else 2 ** (self.bits - 1)

    @property
    def code_dtype(self) -> Any:
        return jnp.dtype(jnp.int8 if self.levels[0] < 0 else jnp.uint8)

    def size(self, columns: int) -> int:
        """Return the columns of a group."""
        return self.group or up(columns, CHUNK)

    def grid(
        self, w_OGg: jax.Array, shrink: jax.Array | float = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        """Return scales, as they are stored, and zero points `[..., G]` of groups `[..., G, g]`.

        Symmetric, 8 bits: the largest magnitude is 127 steps. Symmetric, fewer bits: it is minus
        half of the levels, such as -8 steps of 4 bits, which uses all levels (as llama.cpp's Q4_0);
        the zero points are all `middle`. With a zero point: all steps cover the range from minimum
        to maximum, and zero.

        Args:
            shrink: a factor on that range, `[..., G]` or one number, for a search that clips.
        """
        w_OGg, kept = w_OGg.astype(jnp.float32), jnp.dtype(self.scale)
        least, most = self.levels
        if self.zero_point:
            low = jnp.minimum(w_OGg.min(-1), 0) * shrink
            high = jnp.maximum(w_OGg.max(-1), 0) * shrink
            scale = ((high - low) / most).astype(kept)
            wide = scale.astype(jnp.float32)
            zero = jnp.clip(jnp.round(-low / jnp.where(wide == 0, 1.0, wide)), least, most)
            return scale, zero.astype(jnp.uint8)
        if self.bits == 8:
            end = jnp.abs(w_OGg).max(-1) * shrink / most
        else:
            largest = jnp.abs(w_OGg).argmax(-1, keepdims=True)
            end = jnp.take_along_axis(w_OGg, largest, -1)[..., 0] * shrink / -self.middle
        return end.astype(kept), jnp.full(end.shape, self.middle, jnp.uint8)

    def codes(self, w: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
        """Return the nearest code of each number (half to even); the three shapes broadcast."""
        wide, (least, most) = scale.astype(jnp.float32), self.levels
        steps = jnp.round(w.astype(jnp.float32) / jnp.where(wide == 0, 1.0, wide))
        return jnp.clip(steps + zero.astype(jnp.float32), least, most).astype(self.code_dtype)

    def values(self, codes: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
        """Dequantize codes to float32, bit for bit as `dense` does."""
        steps = codes.astype(jnp.float32) - zero.astype(jnp.float32)
        return steps * scale.astype(jnp.float32)


@partial(jax.jit, static_argnums=1)
def rounded(array: jax.Array, to: Affine) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize `[O, I]` to data, scales and zero points, `ROWS` rows at a time."""
    rows, columns = array.shape
    width, group = up(columns, CHUNK), to.size(columns)

    def some(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        w = jnp.pad(w.astype(jnp.float32), ((0, 0), (0, width - columns)))
        w_OGg = w.reshape(w.shape[0], width // group, group)
        scale, zero = to.grid(w_OGg)
        q = to.codes(w_OGg, scale[..., None], zero[..., None])
        return digits.packed(q.reshape(w.shape), to.bits), scale, zero

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
