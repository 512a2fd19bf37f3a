"""Few-row matmuls with integer weights on a GPU, by a Pallas kernel that reads the integers.

Plain JAX first dequantizes the weights, which writes and reads two to eight times their bytes. A
program of the grid takes a block of weight rows and a part of the columns, and loops over groups of
columns that share a scale: integers are exact in bfloat16; a group's products are summed in
float32, then scaled. The parts are added in order.

Used for 2 to 16 rows on a single NVIDIA GPU since Ampere, unless JAXLLM_PALLAS=0: there it was 3.6
to 5.7 times as fast in whole models, while XLA fuses the dequantization of a single row
(docs/benchmarks/gpu.md). Tests run it in interpret mode.
"""

import functools
import os
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.ops.varying_axes import varying_axes

ROWS = 16  # input rows of a tensor core; missing ones are zeros
BLOCK = 32  # weight rows of a program
PARTS = {4: 8, 8: 4}  # by bits: parts of the columns, so that few weight rows fill a GPU
WARPS = {4: 1, 8: 2}
HALF = 16  # bytes of 32 four-bit columns: see `weights.types.int_weight`
CHUNK = 128  # columns per step if a row has one scale


def is_enabled() -> bool:
    """Whether the device is a single GPU for which the kernel compiles, and it is not disabled."""
    device, *others = jax.devices()
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; AMD's are "gfx942"
    ampere = re.fullmatch(r"[0-9]+\.[0-9]+", capability) and float(capability) >= 8
    return bool(ampere) and not others and os.environ.get("JAXLLM_PALLAS") != "0"


def is_supported(x_RI: jax.Array, data: jax.Array, bits: int) -> bool:
    """Whether to use the kernel: a few rows of bfloat16, not in `shard_map`; full blocks."""
    rows = 1 < x_RI.shape[0] <= ROWS and x_RI.dtype == jnp.bfloat16 and not varying_axes(x_RI)
    return rows and bits in PARTS and data.ndim == 2 and data.shape[0] % BLOCK == 0


def multiply(
    x_RI: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    *,
    bits: int,
    group: int | None,
    interpret: bool = False,
) -> jax.Array:
    """Return `x @ weight.T`, float32 `[R, O]`, for arrays of a `IntWeight` that `is_supported`
    accepts.

    Args:
        x_RI: bfloat16.
        data, scale, zero: `[O, ...]` as in `IntWeight`.
        interpret: Run in plain JAX on any device, for tests.
    """
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    # Said by jax 0.11 when it lowers the kernel, to those who wrote it; 0.12 is out of our range.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    (rows, columns), outputs = x_RI.shape, data.shape[0]
    width = data.shape[1] * 8 // bits
    x = jnp.pad(x_RI, ((0, ROWS - rows), (0, width - columns))).T
    if bits == 4:  # the columns in low four bits, then those in high ones
        x = x.reshape(-1, 2, HALF, ROWS).swapaxes(0, 1).reshape(width, ROWS)
    pieces = [data, scale] if zero is None else [data, scale, zero]
    y = pl.pallas_call(
        functools.partial(_kernel, bits=bits, unit=group or CHUNK),
        out_shape=jax.ShapeDtypeStruct((PARTS[bits], outputs, ROWS), jnp.float32),
        grid=(outputs // BLOCK, PARTS[bits]),
        in_specs=[
            pl.BlockSpec(x.shape, lambda i, part: (0, 0)),
            *(pl.BlockSpec((BLOCK, p.shape[1]), lambda i, part: (i, 0)) for p in pieces),
        ],
        out_specs=pl.BlockSpec((None, BLOCK, ROWS), lambda i, part: (part, i, 0)),
        compiler_params=triton.CompilerParams(num_warps=WARPS[bits]),
        interpret=interpret,
    )(x, *pieces)
    return y.sum(axis=0)[:, :rows].T


def _kernel(x_ref: Any, data_ref: Any, scale_ref: Any, *refs: Any, bits: int, unit: int) -> None:
    from jax.experimental import pallas as pl

    *zero_ref, out_ref = refs
    stored = unit * bits // 8  # columns of `data` that hold a unit
    units, groups = data_ref.shape[1] // stored, scale_ref.shape[1]
    count = -(-units // PARTS[bits])
    begin = pl.program_id(1) * count

    def add(u: Any, total: jax.Array) -> jax.Array:
        g = pl.ds(u if groups > 1 else 0, 1)
        q = data_ref[:, pl.ds(u * stored, stored)]
        if bits == 8:
            part = _dot(q.astype(jnp.bfloat16), x_ref[pl.ds(u * unit, unit), :])
        else:
            half = x_ref.shape[0] // 2
            zero = zero_ref[0][:, g] if zero_ref else 8
            low, high = (_center(q >> s & 15, zero) for s in (0, 4))
            part = _dot(low, x_ref[pl.ds(u * stored, stored), :])
            part += _dot(high, x_ref[pl.ds(half + u * stored, stored), :])
        return total + part * scale_ref[:, g].astype(jnp.float32)

    zeros = jnp.zeros(out_ref.shape, jnp.float32)
    out_ref[...] = jax.lax.fori_loop(begin, jnp.minimum(begin + count, units), add, zeros)


def _center(code: jax.Array, zero: Any) -> jax.Array:
    """Return `code - zero` of four-bit codes in bfloat16, where 128 + code has the code's bits."""
    shifted = jax.lax.bitcast_convert_type(code.astype(jnp.uint16) | 0x4300, jnp.bfloat16)
    return shifted - (jnp.asarray(zero, jnp.int32) + 128).astype(jnp.bfloat16)


def _dot(q: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.dot(q, x, preferred_element_type=jnp.float32)
