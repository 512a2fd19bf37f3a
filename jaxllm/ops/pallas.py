"""Few-row matmuls with integer weights on a GPU, by a Pallas kernel that reads the integers.

Plain JAX first dequantizes the weights, which writes and reads two to eight times their bytes. A
program of the grid takes a block of weight rows and a part of the columns, and loops over groups of
columns that share a scale: integers are exact in bfloat16; a group's products are summed in
float32, then scaled. The parts are added in order.

Enabled by JAXLLM_PALLAS=1. Tested against plain JAX in interpret mode, and timed on a GPU by
`scripts/benchmarks/gpu.py`.
"""

import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ROWS = 16  # input rows of a tensor core; missing ones are zeros
HALF = 16  # bytes of 32 four-bit columns: see `weights.types.int_weight`
CHUNK = 128  # columns per step if a row has one scale


class Tile(NamedTuple):
    """How much a program multiplies: weight rows, parts of the columns; and its warps."""

    rows: int
    parts: int
    warps: int
    stages: int  # steps whose weights are loaded ahead


TILES = {4: Tile(64, 4, 2, 3), 8: Tile(32, 4, 2, 3)}  # by bits: docs/benchmarks/gpu.md


def is_enabled() -> bool:
    """Whether GPUs use the Pallas kernel."""
    return os.environ.get("JAXLLM_PALLAS", "0") == "1"


def is_supported(x_RI: jax.Array, data: jax.Array, bits: int) -> bool:
    """Whether the kernel supports these: bfloat16 inputs of few rows, weights in full blocks."""
    rows = 0 < x_RI.shape[0] <= ROWS and x_RI.dtype == jnp.bfloat16
    return rows and bits in TILES and data.ndim == 2 and data.shape[0] % TILES[bits].rows == 0


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

    (rows, columns), outputs, tile = x_RI.shape, data.shape[0], TILES[bits]
    width = data.shape[1] * 8 // bits
    x = jnp.pad(x_RI, ((0, ROWS - rows), (0, width - columns))).T
    if bits == 4:  # the columns in low four bits, then those in high ones
        x = x.reshape(-1, 2, HALF, ROWS).swapaxes(0, 1).reshape(width, ROWS)
    pieces = [data, scale] if zero is None else [data, scale, zero]
    y = pl.pallas_call(
        functools.partial(_kernel, bits=bits, unit=group or CHUNK),
        out_shape=jax.ShapeDtypeStruct((tile.parts, outputs, ROWS), jnp.float32),
        grid=(outputs // tile.rows, tile.parts),
        in_specs=[
            pl.BlockSpec(x.shape, lambda i, part: (0, 0)),
            *(pl.BlockSpec((tile.rows, p.shape[1]), lambda i, part: (i, 0)) for p in pieces),
        ],
        out_specs=pl.BlockSpec((None, tile.rows, ROWS), lambda i, part: (part, i, 0)),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(x, *pieces)
    return y.sum(axis=0)[:, :rows].T


def _kernel(x_ref: Any, data_ref: Any, scale_ref: Any, *refs: Any, bits: int, unit: int) -> None:
    from jax.experimental import pallas as pl

    *zero_ref, out_ref = refs
    stored = unit * bits // 8  # columns of `data` that hold a unit
    units, groups = data_ref.shape[1] // stored, scale_ref.shape[1]
    count = -(-units // TILES[bits].parts)
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
