"""The weight formats by name; `as_format` converts any weight to any of them.

float32, bfloat16, float16     arrays
bf16-packed                    bfloat16 in 12 bits, losslessly
int8                           8 bits, one scale per row
int8-g64                       8 bits, one scale per 64 columns (32, 64 or 128)
int8-g16                       8 bits, one scale per 16 columns; only from GGUF files
int4-g64                       4 bits, likewise; in a row of rules int4 means int4-g64
int3-g64, int2-g64             3 and 2 bits, likewise
...-zp                         with a zero point
...-f16                        with float16 scales instead of float32
q4_k, q5_k, q6_k               GGUF's blocks of 256 columns: 4.5, 5.5 and 6.56 bits a weight, with
                               scales (and minima) that are integers, and searched
mxfp4                          4 bits, floats with a power of two per 32 columns; from files
nf4                            4 bits, the levels of QLoRA's NormalFloat, in blocks of 64 whose
                               absmax has 8 bits (double quantization); nf4-f32: absmax in float32

Composite formats name the format of their inner weight after a slash:
ordered/int4-g64               columns permuted so that those of a group are adjacent (act-order)
offset/int4-g32-zp-f16         a float offset per group (GGUF's Q4_1, Q5_1)

Packages add types by entry points of the group `jaxllm.weight_types`, imported when a name is none
of these: a module with NAMES of its formats, and a `parse` of a name and of the function that
parses inner formats.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxllm.errors import ConfigError
from jaxllm.runtime.plugins import load_plugins
from jaxllm.weights.types import (
    arrays,
    block_weight,
    int_weight,
    mxfp4,
    nf4,
    packed_bf16,
    permuted,
)
from jaxllm.weights.types.arrays import DTYPES, as_weight
from jaxllm.weights.types.base import Format, WeightBase

Weight = jax.Array | WeightBase  # any weight in a dict of parameters

# A row for each type of weight: parses its format's name, and returns None for other names.
PARSERS: tuple[Callable[[str], Format | None], ...] = (
    arrays.parse,
    packed_bf16.parse,
    int_weight.parse,
    mxfp4.parse,
    block_weight.parse,
    nf4.parse,
    lambda name: permuted.parse(name, parse_format),
)


def parse_format(name: Any) -> Format:
    """Return the format with this name. Raises ConfigError for an unknown name."""
    if isinstance(name, str):
        for parse in PARSERS:
            if (format := parse(name)) is not None:
                return format
        for module in load_plugins("weight_types"):
            if (format := module.parse(name, parse_format)) is not None:
                return format
    raise ConfigError(
        f"weight format must be one of {', '.join(DTYPES)}, bf16-packed, int8, int8-g64, int4-g64,"
        " int3-g64, int2-g64 (-zp for a zero point, then -f16 for float16 scales), q4_k, q5_k,"
        f" q6_k, nf4, nf4-f32, {', '.join(further_names())}, got {name!r:.40}"
    )


def further_names() -> list[str]:
    """Return names of formats of other packages' types."""
    return [name for module in load_plugins("weight_types") for name in module.NAMES]


STACKABLE = "arrays, int8, int4, int3, int2, mxfp4, q4_k, q5_k, q6_k or nf4"


def can_stack(name: str) -> bool:
    """Return whether a stack of matrices can have this format: its arrays are then stacks."""
    format = parse_format(name)
    if isinstance(format, int_weight.IntFormat):
        return format.is_plain or format is mxfp4.FORMAT
    return isinstance(format, arrays.FloatFormat | block_weight.BlockFormat | nf4.NF4Format)


def abstract_weight(name: str, shape: tuple[int, ...]) -> Any:
    """Return a weight of `shape` as `jax.eval_shape` does: shapes and dtypes only.

    None for a format whose shards are quantized anew (`Format.is_data_dependent`).
    """
    format = parse_format(name)
    if getattr(format, "inner", format).is_data_dependent:
        return None
    structs = {n: jax.ShapeDtypeStruct(s, d) for n, (s, d) in format.array_specs(shape).items()}
    return jax.eval_shape(lambda arrays: format.from_arrays(shape, arrays), structs)


def to_dense(weight: Weight, dtype: Any = None) -> jax.Array:
    """Return a weight as an array; by default float32 for integers, bfloat16 if packed."""
    return as_weight(weight).to_dense(dtype)


def weight_format(weight: Weight) -> str:
    """Return the full name of a weight's format."""
    return as_weight(weight).format


def as_format(weight: Weight, name: str) -> Weight:
    """Convert a matrix or a stack of them, `[..., O, I]`, to the format `name`.

    A weight that has the format is returned unchanged. Memory besides the result: one block of rows
    in float32.

    Raises:
        ConfigError: for an unknown name, or a matrix whose values the format cannot hold
            (`bf16-packed` holds only bfloat16).
    """
    format = parse_format(name)
    if weight_format(weight) == format.name:
        return weight
    if weight_format(weight) == format.dense_format:
        dropped: Weight = format.drop_zeros(weight)
        return dropped
    if isinstance(weight, mxfp4.Mxfp4Weight) and format.name == "int8-g32":
        return weight.to_int8()
    array = to_dense(weight)
    if format.name not in DTYPES and array.ndim < 2:
        raise ConfigError(f"{name} requires a matrix, got shape {array.shape}")
    converted: Weight = format.quantize(array)
    return converted


def log_slow_formats(names: Iterable[str | None], log: Callable[[str], None]) -> None:
    """Log a warning for each of these formats that this machine decodes slowly."""
    for name in dict.fromkeys(names):
        if name is not None and (warning := parse_format(name).speed_warning) is not None:
            log(warning)


def for_accelerator(params: Any) -> Any:
    """Return parameters in the forms that a GPU or TPU multiplies: of 4 bits as XLA's int4; if CUDA
    kernels do not read them, GGUF's blocks as integers, and packed bfloat16 unpacked.
    """

    def has_form(node: Any) -> bool:
        return hasattr(node, "for_accelerator")

    return jax.tree.map(
        lambda x: x.for_accelerator() if has_form(x) else x, params, is_leaf=has_form
    )
