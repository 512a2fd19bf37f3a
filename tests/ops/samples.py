"""Random weights, inputs and caches for the kernels, and their float64 results."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.ops.native import Kind
from jaxllm.weights.types.mxfp4 import LEVELS as MXFP4_LEVELS
from jaxllm.weights.types.nf4 import DYNAMIC, LEVELS
from tests.ops.ctypes_kernels import DTYPES, Cached, Matrix, bfloat16, placed

Rng = np.random.Generator

FLOATS = {"float32": Kind.FLOAT32, "bfloat16": Kind.BFLOAT16, "float16": Kind.FLOAT16}
INTEGERS = [  # bits, columns per scale (0: the whole row), zero points, scale dtype
    (8, 0, False, "float32"), (8, 0, False, "float16"), (8, 32, False, "float32"),
    (8, 64, False, "float16"), (8, 128, False, "float32"), (4, 32, False, "float16"),
    (4, 64, False, "float32"), (4, 128, False, "float32"), (4, 32, True, "float32"),
    (4, 64, True, "float16"), (4, 128, True, "float32"),
]  # fmt: skip
SUPER_KINDS = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
SPARE = 128  # unused values after those of a bitmap


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _integers(bits: int, group: int, zero_point: bool, scales: str) -> Callable[..., Matrix]:
    """Return a sampler of integer weights with all levels and arbitrary padding."""

    def draw(rng: Rng, rows: int, columns: int) -> Matrix:
        width = _up(columns, 128)
        groups = width // group if group else 1
        scale = rng.normal(0, 0.01, (rows, groups)).astype(scales)
        if bits == 8:
            q = rng.integers(-128, 128, (rows, width))
            lowest = rng.random(rows) < 0.2  # all -128, whose negation int8 cannot hold
            lowest[:1] = False
            q[lowest] = -128
            data, zero = q.astype(np.int8), np.zeros((rows, groups), np.uint8)
        else:
            q = rng.integers(0, 16, (rows, width))
            low, high = np.moveaxis(q.reshape(rows, width // 32, 2, 16), 2, 0)
            data = (low | high << 4).astype(np.uint8).reshape(rows, width // 2)
            zero = rng.integers(0, 16, (rows, groups)) if zero_point else np.full(scale.shape, 8)
        size = width // groups if groups else 0
        centred = q.reshape(rows, groups, size) - zero.astype(int)[:, :, None]
        numbers = (centred * scale.astype(np.float64)[:, :, None]).reshape(rows, width)[:, :columns]
        return Matrix(
            Kind.INT8 if bits == 8 else Kind.INT4, numbers, placed(data), group, placed(scale),
            placed(zero.astype(np.uint8)) if zero_point else None,
        )  # fmt: skip

    return draw


def _mxfp4(rng: Rng, rows: int, columns: int) -> Matrix:
    """Draw a `weights.types.mxfp4` weight: the levels of int4's codes, and exponents as scales."""
    plain = _integers(4, 32, False, "float32")(rng, rows, columns)
    exponent = rng.integers(110, 128, (rows, plain.data.shape[1] // 16)).astype(np.uint8)
    low, high = (
        MXFP4_LEVELS[x.reshape(*exponent.shape, 16)] for x in (plain.data & 15, plain.data >> 4)
    )
    level = np.stack([low, high], axis=2).astype(np.float64)
    numbers = level.reshape(*exponent.shape, 32) * np.exp2(exponent - 128.0)[..., None]
    numbers = numbers.reshape(rows, plain.data.shape[1] * 2)[:, :columns]
    return Matrix(Kind.MXFP4, numbers, plain.data, 32, placed(exponent))


def _blocks(bits: int) -> Callable[..., Matrix]:
    """Return a sampler of integer weights whose groups of 32 follow their float16 scales."""
    plain = _integers(bits, 32, False, "float16")

    def draw(rng: Rng, rows: int, columns: int) -> Matrix:
        matrix = plain(rng, rows, columns)
        assert matrix.scale is not None
        data = placed(join_blocks(matrix.scale, matrix.data).view(np.uint16)).view(np.uint8)
        return dataclasses.replace(matrix, data=data, blocks=True)

    return draw


def _super_blocks(kind: Kind) -> Callable[..., Matrix]:
    """Return a sampler of GGUF's blocks of 256 columns, Q4_K, Q5_K or Q6_K (ggml-common.h)."""
    bits = {Kind.Q4_K: 4, Kind.Q5_K: 5, Kind.Q6_K: 6}[kind]

    def draw(rng: Rng, rows: int, columns: int) -> Matrix:
        count = _up(columns, 256) // 256
        q = rng.integers(0, 1 << bits, (rows, count, 256)).astype(np.uint8)
        d, least = rng.normal(0, 0.01, (2, rows, count, 1)).astype(np.float16)
        if bits == 6:
            scale, minimum = rng.integers(-128, 128, (rows, count, 16)), 32
            half = q.reshape(rows, count, 2, 4, 32)
            low = half[..., :2, :] & 15 | half[..., 2:, :] << 4
            high = (half >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(3, np.uint8)
            parts = [low, high, scale.astype(np.int8).view(np.uint8), d.view(np.uint8)]
            least_GG = np.zeros((rows, count, 1))
        else:
            (scale, least_GG), minimum = rng.integers(0, 64, (2, rows, count, 8)), 0
            pair = q.reshape(rows, count, 4, 2, 32)
            low = pair[..., 0, :] & 15 | pair[..., 1, :] << 4
            runs = q.reshape(rows, count, 8, 32)
            fifth = (runs >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(2, np.uint8)
            six = [scale[..., :4] | scale[..., 4:] >> 4 << 6]
            six += [least_GG[..., :4] | least_GG[..., 4:] >> 4 << 6]
            six += [scale[..., 4:] & 15 | (least_GG[..., 4:] & 15) << 4]
            halves = [x.view(np.uint8) for x in (d, least)]
            parts = [*halves, *(x.astype(np.uint8) for x in six), *[fifth][: bits - 4], low]
        size = 256 // scale.shape[2]
        steps = np.repeat(d.astype(np.float64) * scale, size, axis=2) * (q.astype(int) - minimum)
        offset = np.repeat(least.astype(np.float64) * least_GG, 256 // least_GG.shape[2], axis=2)
        numbers = (steps - offset).astype(np.float32).astype(np.float64)
        data = np.concatenate([x.reshape(rows, count, math.prod(x.shape[2:])) for x in parts], 2)
        sizes = np.abs(steps) + np.abs(offset)
        numbers, sizes = (x.reshape(rows, 256 * count)[:, :columns] for x in (numbers, sizes))
        data = placed(data.reshape(rows, count * data.shape[2]))
        return Matrix(kind, numbers, data, 32, sizes=sizes)

    return draw


def join_blocks(scale: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Return GGUF's blocks, uint8 `[O, ...]`: each float16 scale before its group's bytes."""
    rows, groups = scale.shape
    codes = data.view(np.uint8).reshape(rows, groups, data.shape[1] // max(groups, 1))
    blocks = np.concatenate([scale[..., None].view(np.uint8), codes], axis=2)
    return blocks.reshape(rows, groups * blocks.shape[2])


def _floats(kind: Kind) -> Callable[..., Matrix]:
    def draw(rng: Rng, rows: int, columns: int) -> Matrix:
        data = rng.normal(0, 0.02, (rows, columns)).astype(DTYPES[kind])
        return Matrix(kind, data.astype(np.float64), placed(data))

    return draw


def _packed(rng: Rng, rows: int, columns: int) -> Matrix:
    """Draw a `weights.types.bf16_12bit.PackedBf16`; one column in twenty is an escape."""
    whole, base = _up(columns, 64), 108
    byte = rng.integers(0, 256, (rows, whole), dtype=np.uint8)
    nibbles = rng.integers(0, 256, (rows, _up(columns, 128) // 2), dtype=np.uint8)
    p = np.arange(whole)
    exponent = nibbles[:, p // 128 * 64 + p % 64] >> np.where(p // 64 % 2, 4, 0) & 15
    wide = byte.astype(np.uint16)
    bits = (wide & 128) << 8 | (base + exponent.astype(np.uint16)) << 7 | wide & 127
    c = np.arange(columns)
    bits = bits[:, c // 64 * 64 + 8 * (2 * (c // 8 % 4) + c // 32 % 2) + c % 8]
    row, column = np.nonzero(rng.random((rows, columns)) < 0.05)
    value = rng.normal(0, 1, len(row)).astype(bfloat16)
    bits[row, column] = value.view(np.uint16)
    begin = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])[: rows + 1]
    pieces = [nibbles, np.int32(base), begin.astype(np.int32), column.astype(np.int32), value]
    numbers = bits.astype(np.uint16).view(bfloat16).astype(np.float64)
    return Matrix(Kind.PACKED_BF16, numbers, placed(byte), packed=[placed(a) for a in pieces])


def _nf4(coded: bool) -> Callable[..., Matrix]:
    """Return a sampler of `weights.types.nf4` weights, with coded scales or with floats."""

    def draw(rng: Rng, rows: int, columns: int) -> Matrix:
        groups = -(-columns // 64)
        code, count = rng.integers(0, 256, (rows, groups), dtype=np.uint8), rows * groups
        factor = rng.uniform(0.01, 0.05, -(-count // 256)).astype(np.float32)
        mean, scale = np.float32(0.03), rng.normal(0, 0.01, (rows, groups)).astype(np.float32)
        tables = [placed(np.array(LEVELS, np.float32))]
        exact = scale.astype(np.float64)
        if coded:
            tables += [placed(DYNAMIC), placed(factor), placed(np.array(mean))]
            repeated = np.repeat(factor, 256)[:count].reshape(rows, groups)
            exact = DYNAMIC.astype(np.float64)[code] * repeated + np.float64(mean)
        data = rng.integers(0, 256, (rows, groups, 32), dtype=np.uint8)
        level = tables[0].astype(np.float64)[np.concatenate([data & 15, data >> 4], axis=2)]
        numbers = (level * exact[..., None]).reshape(rows, groups * 64)[:, :columns]
        levels = [placed(code if coded else scale), *tables]
        return Matrix(Kind.NF4, numbers, placed(data.reshape(rows, groups * 32)), codebook=levels)

    return draw


SPARSE = {  # dtype: the kinds for 2:4 and bitmap weights
    "float32": (Kind.SPARSE24_F32, Kind.BITMAP_F32),
    "bfloat16": (Kind.SPARSE24_BF16, Kind.BITMAP_BF16),
    "int8": (Kind.SPARSE24_INT8, Kind.BITMAP_INT8),
}


def _sparse(name: str, pattern: int) -> Callable[..., Matrix]:
    """Return a sampler of sparse weights; bitmap rows have any density."""
    kind = SPARSE[name][pattern]

    def draw(rng: Rng, rows: int, columns: int) -> Matrix:
        width = _up(columns, 128)
        if pattern == 0:
            there = rng.random((rows, width // 4, 4)).argsort(axis=2).reshape(rows, width) < 2
        else:
            share = rng.choice([0, 0.1, 0.5, 0.9, 1], (rows, 1))
            there = rng.random((rows, width)) < share
            there[:, columns:] = False
        scale = rng.normal(0, 0.01, (rows, 1)).astype(np.float32)
        if name == "int8":
            value = rng.integers(-128, 128, (rows, width)).astype(np.int8)
            numbers = np.where(there, value * scale.astype(np.float64), 0)[:, :columns]
        else:
            dtype = bfloat16 if name == "bfloat16" else np.dtype(np.float32)
            value = rng.normal(0, 0.02, (rows, width)).astype(dtype)
            numbers = np.where(there, value.astype(np.float64), 0)[:, :columns]
        counts = np.concatenate([[0], there.sum(axis=1)])
        if pattern == 0:
            data = value[there].reshape(rows, width // 2)
        else:
            data = np.concatenate([value[there], np.full(SPARE, 7).astype(value.dtype)])
        return Matrix(
            kind, numbers, placed(data), scale=placed(scale) if name == "int8" else None,
            mask=placed(np.packbits(there, axis=1, bitorder="little")),
            begin=placed(np.cumsum(counts).astype(np.int32)) if pattern else None,
        )  # fmt: skip

    return draw


FORMATS: dict[str, Callable[..., Matrix]] = {
    **{name: _floats(kind) for name, kind in FLOATS.items()},
    **{
        f"int{bits}" + f"-g{group}" * bool(group) + "-zp" * zero + "-f16" * (scales == "float16"):
        _integers(bits, group, zero, scales)
        for bits, group, zero, scales in INTEGERS
    },
    "mxfp4": _mxfp4,
    "int8-blocks": _blocks(8),
    "int4-blocks": _blocks(4),
    **{kind.name.lower(): _super_blocks(kind) for kind in SUPER_KINDS},
    "bf16-packed": _packed,
    "nf4": _nf4(True),
    "nf4-f32": _nf4(False),
    **{
        f"{name}-{pattern}": _sparse(name, i)
        for name in SPARSE
        for i, pattern in enumerate(("2:4", "bitmap"))
    },
}  # fmt: skip


# Kinds of inputs: float32 [R, I], from standard normal values.
def _far_apart(rng: Rng, x: np.ndarray) -> np.ndarray:
    return x * np.exp2(rng.uniform(-40, 40, x.shape))


def _lone_giants(rng: Rng, x: np.ndarray) -> np.ndarray:
    return np.where(rng.random(x.shape) < 0.02, 1e6, 1e-6) * x


def _subnormal(rng: Rng, x: np.ndarray) -> np.ndarray:
    return x * 1e-39


def _largest(rng: Rng, x: np.ndarray) -> np.ndarray:
    return np.clip(x, -4, 4) * (3e38 / 4 / max(x.shape[1], 1))


def _near_the_top(rng: Rng, x: np.ndarray) -> np.ndarray:
    """Set some to +-3e37: sums overflow with integer codes, not with scaled weights."""
    return np.where(rng.random(x.shape) < 6 / max(x.shape[1], 1), np.sign(x) * 3e37, x)


INPUTS: dict[str, Callable[[Rng, np.ndarray], np.ndarray]] = {
    "normal": lambda rng, x: x,
    "far apart": _far_apart,
    "lone giants": _lone_giants,
    "subnormal": _subnormal,
    "largest": _largest,
    "near the top": _near_the_top,
    "zeros": lambda rng, x: x * 0,
}


def inputs(rng: Rng, name: str, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    return placed(INPUTS[name](rng, rng.normal(0, 1, shape)).astype(np.float32).astype(dtype))


def rounded(x: np.ndarray, group: int | None) -> np.ndarray:
    """Round for weights with groups of so many columns, as `round_to_int8` does, in float32."""
    (rows, columns), size = x.shape, group or 128
    wide = np.pad(x.astype(np.float32), ((0, 0), (0, -columns % size)))
    block = wide.reshape(rows, wide.shape[1] // size, size)
    step = np.abs(block).max(axis=2, keepdims=True) * (np.float32(1) / np.float32(127))
    step[step < 2.0**-102] = 0
    inverse = np.float32(1) / np.where(step == 0, np.float32(1), step)
    return (np.round(block * inverse) * step).reshape(wide.shape)[:, :columns]


def errors(y: np.ndarray, x: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Return a product's error as a share of the bound for float32 (1: at the bound).

    The bound is a few roundings of the sum of the terms' magnitudes, plus underflow. The error is
    infinite if a result that should be finite is not.
    """
    x = x.astype(np.float64)
    exact, size = x @ matrix.numbers.T, np.abs(x) @ matrix.magnitudes.T
    columns = x.shape[1]
    share = 1e-6 * max(1.0, (columns / 2048) ** 0.5)
    with np.errstate(invalid="ignore"):
        off = np.abs(y - exact) / (share * size + 1e-37 * (columns + 1))
    off[np.abs(exact) > 3e38] = 0  # beyond float32's range
    return np.where(np.isfinite(y), off, np.where(size > 3e38, 0, np.inf))


def brute_force(
    q: np.ndarray, at: np.ndarray, parts: Sequence[Cached], scale: float, window: int | None,
    cap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return float64 softmax attention, and the size of its rounding errors: the same over the
    values' magnitudes, and more where scores are large, whose errors are those of the weights.
    """
    B, T, N, H = q.shape
    out, size = np.zeros((2, B, T, N, H))
    dense = [
        (
            p.k.astype(np.float64) * (1 if p.k_scale is None else p.k_scale[..., None]),
            p.v.astype(np.float64) * (1 if p.v_scale is None else p.v_scale[..., None]),
            p.position,
        )
        for p in parts
    ]
    for b, t, n in np.ndindex(B, T, N):
        scores, values, reach = [], [], 0.0
        for part in dense:
            k, v, position = (x[b if len(x) == B else 0] for x in part)
            seen = (position >= 0) & (position <= at[b, t])
            if window is not None:
                seen &= at[b, t] - position < window
            head = n // (N // k.shape[1])
            score = scale * (k[seen, head] @ q[b, t, n].astype(np.float64))
            terms = scale * (np.abs(k[seen, head]) @ np.abs(q[b, t, n].astype(np.float64)))
            reach = max(reach, terms.max(initial=0))
            scores.append(score if cap is None else cap * np.tanh(score / cap))
            values.append(v[seen, head])
        score, value = np.concatenate(scores), np.concatenate(values)
        if len(score):
            weight = np.exp(score - score.max())
            out[b, t, n] = weight @ value / weight.sum()
            size[b, t, n] = weight @ np.abs(value) / weight.sum() * (1 + reach / 50)
    return out, size


def cached(rng: Rng, kind: Kind, rows: tuple[int, int, int], size: tuple[int, int, int]) -> Cached:
    """Draw a cache part of `(S, K, H)` with these numbers of rows of keys, values and positions.

    A third of the slots is empty; float slots hold NaN if all rows share one row of positions.
    """
    S, K, H = size
    position = np.where(rng.random((rows[2], S)) < 0.7, rng.integers(0, 60, (rows[2], S)), -1)
    k, v = (rng.normal(0, 1, (n, S, K, H)) for n in rows[:2])
    if kind == Kind.INT8:
        k, v = (np.clip(np.round(x * 40), -127, 127) for x in (k, v))
    elif rows[2] == 1:
        k[:, position[0] < 0] = v[:, position[0] < 0] = np.nan
    k, v = (placed(x.astype(DTYPES[kind])) for x in (k, v))
    scales = [None, None]
    if kind == Kind.INT8:
        scales = [placed(rng.uniform(0, 0.05, x.shape[:3]).astype(np.float32)) for x in (k, v)]
    return Cached(k, v, placed(position.astype(np.int32)), *scales)
