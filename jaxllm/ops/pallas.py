"""Few-row matmuls with integer weights on a GPU, by a Pallas kernel that reads the integers.

Plain JAX first dequantizes the weights, which writes and reads two to four times their bytes. A
program of the grid takes a block of weight rows and loops over the groups of columns that share a
scale: integers are exact in bfloat16; a group's products are summed in float32, then scaled.

Enabled by JAXLLM_PALLAS=1. It is tested against plain JAX in interpret mode, and has not been
timed on a GPU (`scripts/benchmarks/gpu.py` does that, with and without).
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

ROWS = 16  # input rows of a tensor core; missing ones are zeros
BLOCK = 16  # weight rows per program: few, so that small matrices fill a GPU
HALF = 16  # bytes of 32 four-bit columns: see `weights.types.int_weight`
CHUNK = 128  # columns per step if a row has one scale


def is_enabled() -> bool:
    """Whether GPUs use the Pallas kernel."""
    return os.environ.get("JAXLLM_PALLAS", "0") == "1"


def is_supported(x_RI: jax.Array, data: jax.Array) -> bool:
    """Whether the kernel supports these: bfloat16 inputs of few rows, weights in full blocks."""
    rows = 0 < x_RI.shape[0] <= ROWS and x_RI.dtype == jnp.bfloat16
    return rows and data.ndim == 2 and data.shape[0] % BLOCK == 0


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

    (rows, columns), outputs = x_RI.shape, data.shape[0]
    width = data.shape[1] * 8 // bits
    x = jnp.pad(x_RI, ((0, ROWS - rows), (0, width - columns))).T
    if bits == 4:  # the columns in low four bits, then those in high ones
        x = x.reshape(-1, 2, HALF, ROWS).swapaxes(0, 1).reshape(width, ROWS)
    pieces = [scale] if zero is None else [scale, zero]
    spec = functools.partial(pl.BlockSpec, index_map=lambda i: (i, 0))
    y = pl.pallas_call(
        functools.partial(_kernel, bits=bits, unit=group or CHUNK),
        out_shape=jax.ShapeDtypeStruct((outputs, ROWS), jnp.float32),
        grid=(outputs // BLOCK,),
        in_specs=[
            pl.BlockSpec(x.shape, lambda i: (0, 0)),
            *(spec((BLOCK, piece.shape[1])) for piece in (data, *pieces)),
        ],
        out_specs=spec((BLOCK, ROWS)),
        interpret=interpret,
    )(x, data, *pieces)
    return y[:, :rows].T


def _kernel(x_ref: Any, data_ref: Any, scale_ref: Any, *refs: Any, bits: int, unit: int) -> None:
    from jax.experimental import pallas as pl

    *zero_ref, out_ref = refs
    stored = unit * bits // 8  # columns of `data` that hold a unit
    units, groups = data_ref.shape[1] // stored, scale_ref.shape[1]

    def add(u: Any, total: jax.Array) -> jax.Array:
        g = pl.ds(u if groups > 1 else 0, 1)
        q = data_ref[:, pl.ds(u * stored, stored)]
        if bits == 8:
            part = _dot(q, x_ref[pl.ds(u * unit, unit), :])
        else:
            half = x_ref.shape[0] // 2
            zero = zero_ref[0][:, g].astype(jnp.int32) if zero_ref else 8
            low, high = ((q >> s & 15).astype(jnp.int32) - zero for s in (0, 4))
            part = _dot(low, x_ref[pl.ds(u * stored, stored), :])
            part += _dot(high, x_ref[pl.ds(half + u * stored, stored), :])
        return total + part * scale_ref[:, g].astype(jnp.float32)

    zeros = jnp.zeros(out_ref.shape, jnp.float32)
    out_ref[...] = jax.lax.fori_loop(0, units, add, zeros)


def _dot(q: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.dot(q.astype(jnp.bfloat16), x, preferred_element_type=jnp.float32)
