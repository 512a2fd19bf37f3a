"""The weight formats by name; `as_format` converts any weight to any of them.

float32, bfloat16, float16     arrays
bf16-packed                    bfloat16 in 12 bits, losslessly
int8                           8 bits, one scale per row
int8-g64                       8 bits, one scale per 64 columns (32, 64 or 128)
int8-g16                       8 bits, one scale per 16 columns; only from GGUF's Q6_K
int4-g64                       4 bits, likewise; int4 means int4-g64
int3-g64, int2-g64             3 and 2 bits, likewise
...-zp                         with a zero point
...-f16                        with float16 scales instead of float32
nf4                            4 bits, the levels of QLoRA's NormalFloat, in blocks of 64 whose
                               absmax has 8 bits (double quantization); nf4-f32: absmax in float32
bfloat16-2:4                   at most 2 of each 4 columns are nonzero: 9 bits a weight
bfloat16-bitmap                any columns are nonzero: 1 bit per weight, 16 more if nonzero
float32-..., int8-...          2:4 and bitmap of other dtypes; int8 with one scale per row

Composite formats name the format of their inner weight after a slash:
ordered/int4-g64               columns permuted so that those of a group are adjacent (act-order)
offset/int4-g32-zp             a float offset per group (GGUF's Q4_1, Q5_1, Q4_K, Q5_K)
rank64/int8                    two factors of rank 64 (see `leaves/factored.py`)
static/int8                    inputs are quantized on a calibrated grid
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxllm.errors import ConfigError
from jaxllm.weights.leaves import (
    arrays,
    factored,
    fine,
    integers,
    nf4,
    offset,
    ordered,
    packed,
    sparse,
    static,
)
from jaxllm.weights.leaves.arrays import DTYPES, as_leaf
from jaxllm.weights.leaves.leaf import Format, Leaf

Weight = jax.Array | Leaf  # any weight in a dict of parameters

# A row for each type of weight: parses its format's name, and returns None for other names.
PARSERS: tuple[Callable[[str], Format | None], ...] = (
    arrays.parse,
    packed.parse,
    fine.parse,
    integers.parse,
    nf4.parse,
    sparse.parse,
)
# Likewise for composite weights: a row parses the inner format with the function that it is passed.
COMPOSED: tuple[Callable[[str, Callable[[str], Format]], Format | None], ...] = (
    factored.parse,
    ordered.parse,
    offset.parse,
    static.parse,
)


def parse(name: Any) -> Format:
    """Return the format with this name. Raises ConfigError for an unknown name."""
    if isinstance(name, str):
        for parser in PARSERS:
            if (found := parser(name)) is not None:
                return found
        for reader in COMPOSED:
            if (found := reader(name, parse)) is not None:
                return found
    raise ConfigError(
        f"weight format must be one of {', '.join(DTYPES)}, bf16-packed, int8, int8-g64, int4-g64,"
        " int3-g64, int2-g64 (-zp for a zero point, then -f16 for float16 scales), nf4, nf4-f32,"
        f" bfloat16-2:4, bfloat16-bitmap (or float32-, int8-), got {name!r:.40}"
    )


STACKED = "arrays, int8, int4, int3, int2 or nf4"


def can_stack(name: str) -> bool:
    """Return whether a stack of matrices can have this format: its arrays are then stacks."""
    return isinstance(parse(name), arrays.Float | integers.Integer | nf4.NormalFloat)


# The sizes of their arrays depend on the weight's values, so their shards are quantized anew.
REMADE = packed.Bfloat16Packed | sparse.SparseFormat


def form(name: str, shape: tuple[int, ...]) -> Any:
    """Return a weight of `shape` as `jax.eval_shape` does: shapes and dtypes only.

    None for a format whose shards are quantized anew (`REMADE`).
    """
    format = parse(name)
    if isinstance(getattr(format, "inner", format), REMADE):
        return None
    pieces = {n: jax.ShapeDtypeStruct(s, d) for n, (s, d) in format.expected(shape).items()}
    return jax.eval_shape(lambda pieces: format.of_pieces(shape, pieces), pieces)


def apart(name: str) -> tuple[int, ...]:
    """Return the axes, 0 rows and 1 columns, along which slicing and quantizing commute."""
    found = parse(name)
    if isinstance(found, arrays.Float):
        return (0, 1)
    return () if isinstance(found, nf4.NormalFloat | factored.LowRank) else (0,)


def dense(weight: Weight, dtype: Any = None) -> jax.Array:
    """Return a weight as an array; by default float32 for integers, bfloat16 if packed."""
    return as_leaf(weight).dense(dtype)


def format_of(weight: Weight) -> str:
    """Return the full name of a weight's format."""
    return as_leaf(weight).format


def as_format(weight: Weight, name: str) -> Weight:
    """Convert a matrix or a stack of them, `[..., O, I]`, to the format `name`.

    A weight that has the format is returned unchanged. Memory besides the result: one block of rows
    in float32.

    Raises:
        ConfigError: for an unknown name, or a matrix whose values the format cannot hold
            (`bf16-packed` holds only bfloat16).
    """
    wanted = parse(name)
    if format_of(weight) == wanted.name:
        return weight
    if isinstance(wanted, sparse.SparseFormat) and format_of(weight) == wanted.dtype:
        return sparse.sparse_of(weight, wanted.pattern)  # keeps the integer codes
    array = dense(weight)
    if wanted.name not in DTYPES and array.ndim < 2:
        raise ConfigError(f"{name} requires a matrix, got shape {array.shape}")
    made: Weight = wanted.make(array)
    return made
