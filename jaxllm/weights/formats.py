"""The formats that a weight can have, by name; `as_format` makes any leaf of any other.

float32, bfloat16, float16     arrays
bf16-packed                    bfloat16 in 12 bits, losslessly
int8                           8 bits, a scale a row
int8-g64                       8 bits, a scale for each 64 columns (32, 64 or 128)
int4-g64                       4 bits, the same; int4 alone means int4-g64
int4-g64-zp                    4 bits with a zero point
...-f16                        float16 scales in place of float32
bfloat16-2:4                   no more than 2 of each 4 columns are not 0: 9 bits a weight
bfloat16-bitmap                any are not 0: a bit for each and 16 for those
float32-..., int8-...          2:4 and bitmap of other numbers; int8 with a scale a row
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxllm.errors import ConfigError
from jaxllm.weights.leaves import arrays, integers, packed, sparse
from jaxllm.weights.leaves.arrays import DTYPES, Dense
from jaxllm.weights.leaves.leaf import Format, Leaf

Weight = jax.Array | Leaf  # what stands in the parameters

# A row for each kind of leaf: the format that a name means, None where it means another kind.
PARSERS: tuple[Callable[[str], Format | None], ...] = (
    arrays.parse,
    packed.parse,
    integers.parse,
    sparse.parse,
)


def parse(name: Any) -> Format:
    """A format by its name. Raises ConfigError for an unknown name."""
    for parser in PARSERS:
        if isinstance(name, str) and (found := parser(name)) is not None:
            return found
    raise ConfigError(
        f"a weight format is one of {', '.join(DTYPES)}, bf16-packed, int8, int8-g64, int4-g64,"
        f" int4-g64-zp (-f16 for float16 scales), bfloat16-2:4, bfloat16-bitmap (or"
        f" float32-, int8-), got {name!r:.40}"
    )


def as_leaf(weight: Weight) -> Leaf:
    """A weight as a `Leaf`, arrays too."""
    return weight if isinstance(weight, Leaf) else Dense(weight)


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
    array = dense(weight)
    if wanted.name not in DTYPES and array.ndim < 2:
        raise ConfigError(f"{name} is a format of matrices, got shape {array.shape}")
    made: Weight = wanted.make(array)
    return made
