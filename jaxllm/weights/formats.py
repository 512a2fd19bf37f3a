"""The formats that a weight can have, by name; `as_format` makes any leaf of any other.

float32, bfloat16, float16     arrays
bf16-packed                    bfloat16 in 12 bits, losslessly
int8                           8 bits, a scale a row
int8-g64                       8 bits, a scale for each 64 columns (32, 64 or 128)
int4-g64                       4 bits, the same; int4 alone means int4-g64
int4-g64-zp                    4 bits with a zero point
...-f16                        float16 scales in place of float32
"""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.weights.qtensor import CHUNK, HALF, Packed, QTensor

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
PACKED = "bf16-packed"
GROUPS = (32, 64, 128)
ROWS = 256  # rows quantized at a time

Leaf = jax.Array | QTensor | Packed


@dataclasses.dataclass(frozen=True)
class Integer:
    """Integers with scales: see `QTensor`. group None is one scale a row (8 bits only)."""

    bits: int
    group: int | None
    zero_point: bool = False
    scale: str = "float32"


def parse(name: Any) -> str | Integer:
    """A format by its name: an `Integer`, or the name of one of the others.

    Raises ConfigError for a name that is none.
    """
    text = name if isinstance(name, str) else ""
    if text in DTYPES or text == PACKED:
        return text
    found = re.fullmatch(r"int(8|4)(?:-g(\d+))?(-zp)?(-f16)?", text)
    if not found:
        raise ConfigError(
            f"a weight format is one of {', '.join(DTYPES)}, {PACKED}, int8, int8-g64, int4-g64,"
            f" int4-g64-zp (-f16 for float16 scales), got {name!r:.40}"
        )
    bits, zero_point = int(found[1]), bool(found[3])
    group = int(found[2]) if found[2] else (None if bits == 8 else 64)
    if group not in (*GROUPS, None):
        raise ConfigError(f"{name}: a group is of 32, 64 or 128 columns, got {group}")
    if zero_point and bits == 8:
        raise ConfigError(f"{name}: zero points are for 4 bits")
    return Integer(bits, group, zero_point, "float16" if found[4] else "float32")


def dense(leaf: Leaf, dtype: Any = None) -> jax.Array:
    """The numbers of a leaf as an array: of a QTensor float32, of a Packed bfloat16."""
    if isinstance(leaf, QTensor | Packed):
        return leaf.dense() if dtype is None else leaf.dense(dtype)
    return leaf if dtype is None else leaf.astype(dtype)


def format_of(leaf: Leaf) -> str:
    """The name of the format that a leaf has."""
    if isinstance(leaf, Packed):
        return PACKED
    if isinstance(leaf, QTensor):
        group = f"-g{leaf.group}" if leaf.group else ""
        zero = "-zp" if leaf.zero is not None else ""
        return f"int{leaf.bits}{group}{zero}{'-f16' if leaf.scale.dtype == jnp.float16 else ''}"
    return str(jnp.dtype(leaf.dtype))


def as_format(leaf: Leaf, name: str) -> Leaf:
    """A matrix `[O, I]` in the format `name`; as it is where it has that format.

    Memory beside the result: one block of rows in float32. Raises ConfigError for an unknown name
    or a matrix whose numbers the format cannot keep (`bf16-packed` keeps bfloat16 only).
    """
    wanted = parse(name)
    if format_of(leaf) == format_of_name(name):
        return leaf
    if isinstance(wanted, str) and wanted != PACKED:
        return dense(leaf, DTYPES[wanted])
    array = dense(leaf)
    if array.ndim != 2:
        raise ConfigError(f"{name} is a format of matrices, got shape {array.shape}")
    return pack(array) if isinstance(wanted, str) else _integers(array, wanted)


def format_of_name(name: str) -> str:
    """The full spelling of a format's name: int4 is int4-g64."""
    return "int4-g64" + name[4:] if re.fullmatch(r"int4(?!-g).*", name) else name


def pack(array: jax.Array) -> Packed:
    """bfloat16 weights `[O, I]` in 12 bits each.

    Raises ConfigError for another dtype, and where more than 1 in 50 exponents would escape, so
    that nothing is gained.
    """
    if array.dtype != jnp.bfloat16:
        raise ConfigError(f"{PACKED} stores bfloat16 weights losslessly, got {array.dtype}")
    bits = np.asarray(array).view(np.uint16)
    rows, columns = bits.shape
    exponent = ((bits >> 7) & 255).astype(np.uint8)
    held = np.convolve(np.bincount(exponent.reshape(-1), minlength=256), np.ones(16, int))
    base = int(np.argmax(held[15:256]))  # held[15 + b] counts exponents b to b + 15
    row, column = np.nonzero((exponent < base) | (exponent > base + 15))
    if len(row) * 50 > max(bits.size, 1000):
        raise ConfigError(
            f"{PACKED}: {len(row)} of {bits.size} exponents lie outside any 16 consecutive ones"
        )
    padded = np.zeros((rows, -(-columns // 64) * 64), np.uint16)
    padded[:, :columns] = bits
    block = padded.reshape(rows, -1, 2, 4, 8).swapaxes(2, 3).reshape(rows, -1)
    index = np.clip(((block >> 7) & 255).astype(np.int16) - base, 0, 15).astype(np.uint8)
    whole = np.zeros((rows, -(-columns // 128) * 128), np.uint8)
    whole[:, : index.shape[1]] = index
    pair = whole.reshape(rows, -1, 2, 64)
    count = np.bincount(row, minlength=rows)
    return Packed(
        sign_mantissa=jnp.asarray((((block >> 8) & 128) | (block & 127)).astype(np.uint8)),
        nibbles=jnp.asarray((pair[:, :, 0] | (pair[:, :, 1] << 4)).reshape(rows, -1)),
        base=jnp.int32(base),
        escape_begin=jnp.asarray(np.concatenate([[0], np.cumsum(count)]).astype(np.int32)),
        escape_column=jnp.asarray(column.astype(np.int32)),
        escape_value=jnp.asarray(np.asarray(array)[row, column]),
        columns=columns,
        widest=int(count.max(initial=0)),
    )


def _integers(array: jax.Array, to: Integer) -> QTensor:
    """Round to integers, a block of rows at a time."""
    columns = array.shape[1]
    data, scale, zero = _rounded(array, to)
    return QTensor(data, scale, zero if to.zero_point else None, to.bits, to.group, columns)


@partial(jax.jit, static_argnums=1)
def _rounded(array: jax.Array, to: Integer) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, columns = array.shape
    width = -(-columns // CHUNK) * CHUNK
    group = to.group or width

    def some(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        w = jnp.pad(w.astype(jnp.float32), ((0, 0), (0, width - columns)))
        q, scale, zero = _round_groups(w.reshape(w.shape[0], width // group, group), to)
        q = q.reshape(w.shape)
        if to.bits == 4:
            low, high = jnp.moveaxis(q.reshape(w.shape[0], width // 32, 2, HALF), 2, 0)
            q = (low | (high << 4)).reshape(w.shape[0], width // 2)
        return q, scale, zero

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


def _round_groups(w_OGg: jax.Array, to: Integer) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Integers `[O, G, g]`, scales and zero points `[O, G]`; the scale is rounded first.

    Symmetric, 8 bits: the largest magnitude is 127 steps. Symmetric, 4 bits: it is -8 steps, which
    uses all 16 levels (as llama.cpp's Q4_0). With a zero point: 15 steps from least to largest.
    """
    kept = jnp.dtype(to.scale)

    def steps(scale: jax.Array) -> jax.Array:
        wide = scale.astype(jnp.float32)[:, :, None]
        return jnp.round(w_OGg / jnp.where(wide == 0, 1.0, wide))

    if to.zero_point:
        low, high = jnp.minimum(w_OGg.min(-1), 0), jnp.maximum(w_OGg.max(-1), 0)
        scale = ((high - low) / 15).astype(kept)
        wide = scale.astype(jnp.float32)
        zero = jnp.clip(jnp.round(-low / jnp.where(wide == 0, 1.0, wide)), 0, 15)
        q = jnp.clip(steps(scale) + zero[:, :, None], 0, 15)
        return q.astype(jnp.uint8), scale, zero.astype(jnp.uint8)
    none = jnp.zeros(w_OGg.shape[:2], jnp.uint8)
    if to.bits == 8:
        scale = (jnp.abs(w_OGg).max(-1) / 127).astype(kept)
        return jnp.clip(steps(scale), -127, 127).astype(jnp.int8), scale, none
    largest = jnp.abs(w_OGg).argmax(-1, keepdims=True)
    scale = (jnp.take_along_axis(w_OGg, largest, -1)[..., 0] / -8).astype(kept)
    return (jnp.clip(steps(scale), -8, 7) + 8).astype(jnp.uint8), scale, none
