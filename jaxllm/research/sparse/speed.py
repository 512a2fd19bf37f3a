"""The speed of sparse formats: a warning before one is stored that this processor decodes slowly.

A sparse weight has fewer bytes, but a kernel has to expand it. Which of the two decides depends on
the instruction set.
"""

import jax

from jaxllm.ops import native

# Instruction set -> format -> decoding speed, as a ratio to the dense format: tokens per second of
# a whole model with one row (docs/benchmarks/compression.md). Unmeasured formats are absent.
DECODE_SPEED: dict[str, dict[str, float]] = {
    "portable": {  # of one product
        "bfloat16-2:4": 0.22,
        "int8-2:4": 0.23,
        "bfloat16-bitmap": 0.17,
        "int8-bitmap": 0.17,
    },
    "avx2": {  # bfloat16-bitmap before its dense format became faster
        "bfloat16-2:4": 1.46,
        "int8-2:4": 1.11,
        "bfloat16-bitmap": 1.33,
        "int8-bitmap": 0.94,
    },
    "avx2-vnni": {  # not measured again: as avx2
        "bfloat16-2:4": 1.46,
        "int8-2:4": 1.11,
        "bfloat16-bitmap": 1.31,
        "int8-bitmap": 0.94,
    },
    "avx512": {  # this one and the next two before their dense formats became faster
        "bfloat16-2:4": 1.55,
        "int8-2:4": 1.29,
        "bfloat16-bitmap": 1.34,
        "int8-bitmap": 1.03,
    },
    "avx512-vnni": {  # on a processor with VBMI2, as the next two
        "bfloat16-2:4": 1.68,
        "int8-2:4": 1.51,
        "bfloat16-bitmap": 1.55,
        "int8-bitmap": 1.27,
    },
    "avx512-bf16": {
        "bfloat16-2:4": 1.61,
        "int8-2:4": 1.50,
        "bfloat16-bitmap": 1.51,
        "int8-bitmap": 1.23,
    },
    "avx512-amx": {
        "bfloat16-2:4": 1.50,
        "int8-2:4": 1.21,
        "bfloat16-bitmap": 1.46,
        "int8-bitmap": 1.20,
    },
}


def find_speed_warning(name: str) -> str | None:
    """Return a line on a format that this processor decodes more slowly than its dense format."""
    if not native.is_enabled() or jax.default_backend() != "cpu":
        return None
    isa = str(native.isa())
    ratio = DECODE_SPEED.get(isa, {}).get(name, 1.0)
    if ratio >= 1:
        return None
    dense = name.rpartition("-")[0]
    return (
        f"{name} decodes at {ratio:.2g}x the speed of {dense} on this processor ({isa}): see"
        " docs/benchmarks/compression.md"
    )
