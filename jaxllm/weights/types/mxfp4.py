"""MXFP4: codes of 4 bits, e2m1 floats, with a power of two as the scale of each 32 columns.

From the OCP Microscaling Formats (MX) Specification 1.0, section 5. Codes are packed and sliced as
those of `IntWeight`; only their values differ, and their scales, which are stored as exponents.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops import native
from jaxllm.weights.types.arrays import add_dependency, matmul
from jaxllm.weights.types.int_weight import MAX_F32_ROWS, IntFormat, IntWeight

GROUP = 32
# Doubled, so that they are whole; scales are halved.
LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


class Mxfp4Weight(IntWeight):
    """`weight[o, i] = LEVELS[q[o, i]] * 2**(scale[o, i // 32] - 128)`, exact in bfloat16.

    XLA takes the subnormal powers, those of 0 and 1, for 0.
    """

    @property
    def int_format(self) -> IntFormat:
        return FORMAT

    def centered_codes(self) -> jax.Array:
        """Return the codes' levels, int8 `[..., O, I']`."""
        codes = self.codes.astype(jnp.int8)
        small, odd = codes & 7, codes & 1
        # Above 3, the last bit is the mantissa after a leading 1, and the others the exponent.
        large = (2 | odd) << jnp.maximum((small >> 1) - 1, 0)
        level = jnp.where(small < 4, small, large)
        return jnp.where(codes < 8, level, -level)

    @property
    def wide_scale(self) -> jax.Array:
        exponent = jnp.maximum(self.scale.astype(jnp.uint32), 1) - 1
        return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.bfloat16)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        """Return the weights, by default in bfloat16, which is exact."""
        return super().to_dense(dtype or self.dtype)

    def to_int8(self) -> IntWeight:
        """Return the same numbers as `int8-g32`."""
        return IntWeight(self.centered_codes(), self.wide_scale, None, 8, GROUP, self.columns)

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        weight = add_dependency(x_RI, self)  # as for `IntWeight`
        many = x_RI.dtype == jnp.bfloat16 and x_RI.shape[0] > MAX_F32_ROWS
        return matmul(x_RI, weight.to_dense(jnp.bfloat16 if many else jnp.float32))

    def for_accelerator(self) -> "Mxfp4Weight":
        return self

    def native_matrix(self) -> native.Matrix:
        return native.Matrix(native.Kind.MXFP4, [self.data, self.scale], GROUP)


@dataclasses.dataclass(frozen=True)
class Mxfp4Format(IntFormat):
    """The format of `Mxfp4Weight`."""

    @property
    def name(self) -> str:
        return "mxfp4"

    @property
    def lossless_dtype(self) -> str:
        return "bfloat16"

    @property
    def is_plain(self) -> bool:
        return False

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Check nothing: any exponent is that of a finite scale."""

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> Mxfp4Weight:
        data, scale = arrays[".data"], arrays[".scale"]
        return Mxfp4Weight(data, scale, None, bits=4, group=GROUP, columns=shape[-1])


FORMAT = Mxfp4Format(4, GROUP, scale_dtype="uint8")


def parse(name: str) -> Mxfp4Format | None:
    """Parse `mxfp4`; None for other names."""
    return FORMAT if name == FORMAT.name else None
