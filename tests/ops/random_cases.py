"""Seeded random calls of kernels on instruction sets: `python -m tests.ops.random_cases`.

Shapes, unaligned addresses and values of every kind, checked against float64.
`scripts/tools/sanitize.py` runs this with instrumented kernels, cibuildwheel with a wheel's.
"""

import argparse
import itertools
import sys
from collections.abc import Callable

import numpy as np

from jaxllm.ops.native import Kind, available_isas
from tests.ops.ctypes_kernels import (
    Matrix,
    attend,
    bfloat16,
    dequantize,
    kernels,
    multiply_operands,
    placed,
    product,
)  # fmt: skip
from tests.ops.samples import (
    FORMATS,
    INPUTS,
    Rng,
    brute_force,
    cached,
    errors,
    inputs,
    rounded,
)  # fmt: skip

OUTPUTS = (0, 1, 3, 4, 5, 18, 33)
COLUMNS = (0, 1, 5, 31, 64, 100, 129, 257, 512, 1300)
WIDE = (65_664, 131_200, 131_328)  # wider than the CPU cache holds for a few rows
ROWS = (0, 1, 2, 3, 4, 5, 8, 17, 40)


def _matrix(rng: Rng) -> Matrix:
    wide = rng.random() < 0.05
    outputs = int(rng.integers(1, 6)) if wide else int(rng.choice(OUTPUTS))
    columns = int(rng.choice(WIDE if wide else COLUMNS))
    return FORMATS[str(rng.choice(list(FORMATS)))](rng, outputs, columns)


def linear(rng: Rng, isa: str) -> bool:
    matrix = _matrix(rng)
    columns = matrix.numbers.shape[1]
    rows = int(rng.integers(0, 7)) if columns in WIDE else int(rng.choice(ROWS))
    if matrix.is_integer and rng.random() < 0.2:
        codes = placed(rng.integers(-127, 128, (rows, columns)).astype(np.int8))
        near = errors(product(isa, matrix, codes), codes.astype(np.float32), matrix)
        return bool(near.max(initial=0) <= 1)
    dtype = bfloat16 if rng.random() < 0.5 else np.dtype(np.float32)
    x = inputs(rng, str(rng.choice(list(INPUTS))), (rows, columns), dtype)
    whole = matrix.is_integer and rng.random() < 0.5
    wild = rng.random(rows) < 0.1
    if columns:
        x[wild, rng.integers(columns)] = rng.choice([np.nan, np.inf, -np.inf])
    y = product(isa, matrix, x, rounded=whole)
    tame = rounded(x[~wild], matrix.group) if whole else x[~wild]
    right = errors(y[~wild], tame, matrix).max(initial=0) <= 1
    return bool(right and not (columns and np.isfinite(y[wild]).any()))


def dequantized(rng: Rng, isa: str) -> bool:
    matrix = _matrix(rng)
    wide, half = dequantize(isa, matrix, np.float32), dequantize(isa, matrix, bfloat16)
    right = np.allclose(wide, matrix.numbers, rtol=2e-7, atol=0)
    return right and half.tobytes() == wide.astype(bfloat16).tobytes()


def attention(rng: Rng, isa: str) -> bool:
    B, T, K, G = (int(rng.choice(n)) for n in ((1, 2, 3), (0, 1, 1, 2, 19), (1, 2, 4), (1, 2, 3)))
    H = int(rng.choice((1, 5, 16, 20, 32, 64, 96)))
    kinds = (Kind.FLOAT32, Kind.BFLOAT16, Kind.FLOAT16, Kind.INT8)
    alike = rng.choice(kinds) if rng.random() < 0.7 else None
    parts = [
        cached(
            rng,
            Kind(int(rng.choice(kinds) if alike is None else alike)),
            tuple(B if rng.random() < 0.5 else 1 for _ in range(3)),
            (int(rng.choice((0, 1, 3, 63, 64, 65, 150))), K, H),
        )
        for _ in range(int(rng.integers(1, 4)))
    ]
    dtype = bfloat16 if rng.random() < 0.5 else np.dtype(np.float32)
    q = placed(rng.normal(0, 1, (B, T, K * G, H)).astype(dtype))
    at = placed(rng.integers(-1, 60, (B, T)).astype(np.int32))
    window = None if rng.random() < 0.6 else int(rng.integers(1, 70))
    cap = None if rng.random() < 0.5 else float(rng.choice((0.5, 2.0, 50.0)))
    exact, size = brute_force(q, at, parts, 0.3, window, cap)
    y = attend(isa, q, at, parts, scale=0.3, window=window, cap=cap).astype(np.float64)
    share = 5e-6 if dtype == np.float32 else 2**-7
    right = bool((np.abs(y - exact) <= share * (size + 1e-3)).all())
    if T:  # the results are undefined, but must not crash
        q[:, 0] = rng.choice([np.nan, np.inf, 3e38, 1e-40])
        attend(isa, q, at, parts, scale=1e30, window=window, cap=cap)
    return right


def multiplied(rng: Rng, isa: str) -> bool:
    """Two matrices, where the set has a kernel for them; else there is nothing to compare."""
    if not kernels(isa).multiply_operands:
        return True
    dtype = bfloat16 if rng.random() < 0.5 else np.dtype(np.float32)
    depth = int(rng.choice(COLUMNS))
    sizes = [(int(rng.choice((1, 3, 16, 18, 33, 50))), depth) for _ in range(2)]
    axes = (int(rng.integers(2)), int(rng.integers(2)))
    a, b = (
        placed(rng.normal(0, 1, size if axis else size[::-1]).astype(dtype))
        for size, axis in zip(sizes, axes, strict=True)
    )
    left, right = (
        np.asarray(x if axis else x.T, np.float64) for x, axis in zip((a, b), axes, strict=True)
    )
    exact, size = left @ right.T, np.abs(left) @ np.abs(right).T
    share = np.abs(exact) / 256 if dtype == bfloat16 else 0
    y = multiply_operands(isa, a, b, axes).astype(np.float64)
    return bool((np.abs(y - exact) <= 1e-6 * size + share).all())


KERNELS: dict[str, Callable[[Rng, str], bool]] = {
    "linear": linear,
    "dequantize": dequantized,
    "attend": attention,
    "multiply": multiplied,
}


def main() -> int:
    """Print the seed of each wrong result; return 1 if there is one, or if there are no kernels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", nargs="?", choices=KERNELS, help="default: each")
    parser.add_argument("isa", nargs="?", help="default: each of this machine")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    kernels = [asked.kernel] if asked.kernel else list(KERNELS)
    isas = [asked.isa] if asked.isa else available_isas()
    wrong = 0
    for kernel, isa, case in itertools.product(kernels, isas, range(asked.cases)):
        with np.errstate(all="ignore"):
            right = KERNELS[kernel](np.random.default_rng([asked.seed, case]), isa)
        if not right:
            print(f"wrong answer: {kernel} on {isa}, seed {asked.seed}, case {case}")
            wrong += 1
    if not isas:
        print("no kernels were found")
    return bool(wrong) or not isas


if __name__ == "__main__":
    sys.exit(main())
