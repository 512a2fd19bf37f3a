"""The formats that a weight can have, by name; `as_format` makes any leaf of any other.

float32, bfloat16, float16     arrays
bf16-packed                    bfloat16 in 12 bits, losslessly
int8                           8 bits, a scale a row
int8-g64                       8 bits, a scale for each 64 columns (32, 64 or 128)
int8-g16                       8 bits, a scale for each 16 columns: GGUF's Q6_K alone
int4-g64                       4 bits, the same; int4 alone means int4-g64
int3-g64, int2-g64             3 and 2 bits, the same
...-zp                         with a zero point
...-f16                        float16 scales in place of float32
nf4                            4 bits in the levels of QLoRA's NormalFloat, blocks of 64, their
                               absmax in 8 bits (double quantization); nf4-f32: absmax in float32
bfloat16-2:4                   no more than 2 of each 4 columns are not 0: 9 bits a weight
bfloat16-bitmap                any are not 0: a bit for each and 16 for those
float32-..., int8-...          2:4 and bitmap of other numbers; int8 with a scale a row

What is made of other weights has theirs after a slash:
ordered/int4-g64               columns in an order in which those of a group lie together
offset/int4-g32-zp             a number for each group is added (GGUF's Q4_1, Q5_1, Q4_K, Q5_K)
rank64/int8                    two factors of rank 64 (see `leaves/factored.py`)
static/int8                    multiplied by inputs rounded on a grid found beforehand
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

Weight = jax.Array | Leaf  # what stands in the parameters

# A row for each kind of leaf: the format that a name means, None where it means another kind.
PARSERS: tuple[Callable[[str], Format | None], ...] = (
    arrays.parse,
    packed.parse,
    fine.parse,
    integers.parse,
    nf4.parse,
    sparse.parse,
)
# Likewise for leaves composed of others, whose format a row reads by the function that it is given.
COMPOSED: tuple[Callable[[str, Callable[[str], Format]], Format | None], ...] = (
    factored.parse,
    ordered.parse,
    offset.parse,
    static.parse,
)


def parse(name: Any) -> Format:
    """A format by its name. Raises ConfigError for an unknown name."""
    if isinstance(name, str):
        for parser in PARSERS:
            if (found := parser(name)) is not None:
                return found
        for reader in COMPOSED:
            if (found := reader(name, parse)) is not None:
                return found
    raise ConfigError(
        f"a weight format is one of {', '.join(DTYPES)}, bf16-packed, int8, int8-g64, int4-g64,"
        " int3-g64, int2-g64 (-zp for a zero point, then -f16 for float16 scales), nf4, nf4-f32,"
        f" bfloat16-2:4, bfloat16-bitmap (or float32-, int8-), got {name!r:.40}"
    )


STACKED = "arrays, int8, int4, int3, int2 or nf4"


def can_stack(name: str) -> bool:
    """Whether a stack of matrices can have this format: each of its pieces is one of pieces."""
    return isinstance(parse(name), arrays.Float | integers.Integer | nf4.NormalFloat)


# Of what these keep a share is made anew: its numbers decide what is stored of them.
REMADE = packed.Bfloat16Packed | sparse.SparseFormat


def form(name: str, shape: tuple[int, ...]) -> Any:
    """A weight of `shape` in a format as `jax.eval_shape` has it: shapes and dtypes alone. None for
    a format that makes shares of its weights anew (`REMADE`).
    """
    format = parse(name)
    if isinstance(getattr(format, "inner", format), REMADE):
        return None
    pieces = {n: jax.ShapeDtypeStruct(s, d) for n, (s, d) in format.expected(shape).items()}
    return jax.eval_shape(lambda pieces: format.of_pieces(shape, pieces), pieces)


def apart(name: str) -> tuple[int, ...]:
    """The axes, 0 rows and 1 columns, along which what a format makes of a part of a matrix is the
    part of what it makes of all of it.
    """
    found = parse(name)
    if isinstance(found, arrays.Float):
        return (0, 1)
    return () if isinstance(found, nf4.NormalFloat | factored.LowRank) else (0,)


def dense(weight: Weight, dtype: Any = None) -> jax.Array:
    """The numbers of a weight as an array: of integers float32, of packed ones bfloat16."""
    return as_leaf(weight).dense(dtype)


def format_of(weight: Weight) -> str:
    """The name of the format that a weight has, in full."""
    return as_leaf(weight).format


def as_format(weight: Weight, name: str) -> Weight:
    """A matrix or a stack of them, `[..., O, I]`, in the format `name`; as it is where it has it.

    Memory beside the result: one block of rows in float32. Raises ConfigError for an unknown name
    or a matrix whose numbers the format cannot keep (`bf16-packed` keeps bfloat16 only).
    """
    wanted = parse(name)
    if format_of(weight) == wanted.name:
        return weight
    if isinstance(wanted, sparse.SparseFormat) and format_of(weight) == wanted.dtype:
        return sparse.sparse_of(weight, wanted.pattern)  # integers stay the ones that were chosen
    array = dense(weight)
    if wanted.name not in DTYPES and array.ndim < 2:
        raise ConfigError(f"{name} is a format of matrices, got shape {array.shape}")
    made: Weight = wanted.make(array)
    return made
