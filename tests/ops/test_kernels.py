"""The C++ kernels without XLA, on every available instruction set, against float64."""

import itertools

import numpy as np
import pytest

from jaxllm.ops import native
from jaxllm.ops.native import Kind
from tests.ops.ctypes_kernels import attend, bfloat16, dequantize, kernels, placed, product
from tests.ops.samples import (
    FORMATS,
    INPUTS,
    brute_force,
    cached,
    errors,
    inputs,
    join_blocks,
    rounded,
)  # fmt: skip

# Outputs and columns: one, odd, a tile plus a remainder, groups and chunks that do not divide.
SHAPES = [(1, 1), (7, 100), (33, 200), (18, 1300)]
ROWS = (1, 2, 3, 5, 8, 9, 16, 40)
TYPES = [np.dtype(np.float32), bfloat16]
INTEGERS = [name for name in FORMATS if name.startswith("int")]
SUPER = ["q4_k", "q5_k", "q6_k"]
SPARSE = [name for name in FORMATS if name.endswith(("2:4", "bitmap"))]


@pytest.mark.parametrize("name", FORMATS)
def test_product_is_exact_and_row_has_same_bits(isa: str, name: str) -> None:
    """Each output is within float32 rounding of the float64 product, and row 0 has the same bits in
    every batch size.
    """
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        matrix = FORMATS[name](rng, *shape)
        for dtype in TYPES:
            x = inputs(rng, "normal", (max(ROWS), shape[1]), dtype)
            single_row = product(isa, matrix, x[:1])
            for rows in ROWS:
                y = product(isa, matrix, x[:rows])
                assert errors(y, x[:rows], matrix).max() <= 1, (shape, dtype, rows)
                assert y[:1].tobytes() == single_row.tobytes(), (shape, dtype, rows)


def test_instruction_set_reports_matrix_unit(isa: str) -> None:
    """kernels(isa).matrix_unit.supports is set exactly if there is a matrix unit."""
    assert bool(kernels(isa).matrix_unit.supports) == native.has_matrix_unit()


@pytest.mark.parametrize("kind", INPUTS)
def test_product_is_exact_for_any_input_range(isa: str, kind: str) -> None:
    """A large input costs no small input its bits, no partial sum overflows if the scaled result is
    finite, and row 0 has the same bits in every batch size.
    """
    rng = np.random.default_rng(1)
    for name, draw in FORMATS.items():
        matrix = draw(rng, 9, 600)
        for dtype in TYPES:
            x = inputs(rng, kind, (17, 600), dtype)
            single_row = product(isa, matrix, x[:1])
            for rows in (1, 6, 17):
                y = product(isa, matrix, x[:rows])
                assert errors(y, x[:rows], matrix).max() <= 1, (name, dtype, rows)
                assert y[:1].tobytes() == single_row.tobytes(), (name, dtype, rows)


@pytest.mark.parametrize("name", ["bfloat16", "int8", "int4-g64", "q5_k", "bfloat16-bitmap"])
def test_rows_beyond_the_cache_have_the_same_bits(isa: str, name: str) -> None:
    """Where a kernel multiplies many rows in parts, of 64 as floats and 128 as bfloat16, products
    are exact, and each row has the bits that it has alone.
    """
    rng = np.random.default_rng(3)
    matrix, x = FORMATS[name](rng, 13, 4096), inputs(rng, "normal", (203, 4096), bfloat16)
    y = product(isa, matrix, x)
    assert errors(y, x, matrix).max() <= 1
    for row in (0, 63, 64, 127, 128, 202):
        alone = product(isa, matrix, x[row : row + 1])
        assert y[row : row + 1].tobytes() == alone.tobytes(), row


@pytest.mark.parametrize("name", [*INTEGERS, "mxfp4"])
def test_product_ignores_huge_input_at_zero_weight(isa: str, name: str) -> None:
    """An input up to 3e38 that meets a zero weight costs the other terms of that output no
    precision.
    """
    rng = np.random.default_rng(2)
    matrix = FORMATS[name](rng, 5, 256)
    middle = np.argmin(np.abs(matrix.numbers), axis=1)
    column = middle[0]
    assert matrix.numbers[0, column] == 0
    for dtype, giant in ((d, g) for d in TYPES for g in (1e4, 1e30, 3e38)):
        x = inputs(rng, "normal", (1, 256), dtype)
        x[0, column] = giant
        assert errors(product(isa, matrix, x), x, matrix)[0, 0] <= 1, (dtype, giant)


def test_lone_input_of_any_mantissa_is_multiplied_exactly(isa: str) -> None:
    """The product of one bfloat16 input with four-bit weights is exact: no digit overflows."""
    matrix = FORMATS["int4-blocks"](np.random.default_rng(4), 5, 64)
    for i in range(256):
        x = np.zeros((1, 64), bfloat16)
        x[0, i // 4] = (128 + i % 128) * (1 if i < 128 else -1)
        exact = x.astype(np.float64) @ matrix.numbers.T
        assert (product(isa, matrix, x) == exact).all(), x[0, i // 4]


@pytest.mark.parametrize("nonfinite", [np.nan, np.inf])
def test_product_confines_nonfinite_input_to_its_row(isa: str, nonfinite: float) -> None:
    """A NaN or infinite input makes its own row non-finite and leaves the bits of all other rows
    unchanged.
    """
    rng = np.random.default_rng(3)
    for name, draw in FORMATS.items():
        matrix = draw(rng, 9, 300)
        for dtype, rows, whole in ((d, r, w) for d in TYPES for r in (2, 6) for w in (False, True)):
            x = inputs(rng, "normal", (rows, 300), dtype)
            before = product(isa, matrix, x, rounded=whole)
            x[0, 5] = nonfinite
            y = product(isa, matrix, x, rounded=whole)
            assert not np.isfinite(y[0]).any(), (name, dtype, rows, whole)
            assert y[1:].tobytes() == before[1:].tobytes(), (name, dtype, rows, whole)


@pytest.mark.parametrize("name", [name for name in INTEGERS if name not in SPARSE])
def test_input_rounding_equals_round_to_int8(isa: str, name: str) -> None:
    """Identity weights return the rounded inputs themselves, bit for bit equal to round_to_int8."""
    rng = np.random.default_rng(4)
    n = 640
    matrix = FORMATS[name](rng, n, n)
    matrix.scale[...] = 1
    if matrix.zero is not None:
        matrix.zero[...] = 8
    q = np.eye(n, dtype=np.int64) + (0 if matrix.kind == Kind.INT8 else 8)
    data = q.astype(np.int8)
    if matrix.kind == Kind.INT4:
        low, high = np.moveaxis(q.reshape(n, n // 32, 2, 16), 2, 0)
        data = (low | high << 4).astype(np.uint8).reshape(n, n // 2)
    matrix.data[...] = join_blocks(matrix.scale, data) if matrix.blocks else data
    for kind, dtype in ((k, d) for k in INPUTS for d in TYPES):
        x = inputs(rng, kind, (3, n), dtype)
        if kind == "normal":  # many values halfway between two integers
            x[2] = np.round(x[2].astype(np.float32) * 20) / 2
            x[2, ::32] = 127
        y = product(isa, matrix, x, rounded=True)
        assert (y == rounded(x, matrix.group)).all(), (kind, dtype)


@pytest.mark.parametrize("name", [*INTEGERS, *SUPER, "mxfp4"])
def test_rounded_input_product_is_exact_to_float32(isa: str, name: str) -> None:
    """With inputs rounded to int8, outputs are within float32 rounding, and row 0 has the same bits
    in every batch size.
    """
    rng, dtypes = np.random.default_rng(5), itertools.cycle(TYPES)  # the next shape has the other
    for shape in SHAPES:
        matrix = FORMATS[name](rng, *shape)
        for kind, dtype in zip(INPUTS, dtypes, strict=False):
            x = inputs(rng, kind, (max(ROWS), shape[1]), dtype)
            single_row = product(isa, matrix, x[:1], rounded=True)
            for rows in (1, 3, 40):
                y = product(isa, matrix, x[:rows], rounded=True)
                off = errors(y, rounded(x[:rows], matrix.group), matrix)
                assert off.max() <= 1, (shape, dtype, kind, rows)
                assert y[:1].tobytes() == single_row.tobytes(), (shape, dtype, kind, rows)


@pytest.mark.parametrize("name", FORMATS)
def test_product_handles_empty_and_very_wide_shapes(isa: str, name: str) -> None:
    """Products are exact without outputs, columns or rows, and for rows wider than a CPU cache."""
    rng = np.random.default_rng(6)
    for outputs, columns, rows in (
        (0, 64, 2),
        (3, 0, 1),
        (5, 0, 6),
        (3, 64, 0),
        (5, 131_328, 5),
        (2, 8_192, 33),
    ):
        matrix = FORMATS[name](rng, outputs, columns)
        for dtype in TYPES:
            x = inputs(rng, "normal", (rows, columns), dtype)
            y = product(isa, matrix, x)
            assert errors(y, x, matrix).max(initial=0) <= 1, (outputs, columns, rows, dtype)
            if matrix.is_integer:
                y = product(isa, matrix, x, rounded=True)
                off = errors(y, rounded(x, matrix.group), matrix)
                assert off.max(initial=0) <= 1, (outputs, columns, rows)
        if matrix.is_integer:
            codes = placed(rng.integers(-127, 128, (rows, columns)).astype(np.int8))
            y = product(isa, matrix, codes)
            assert errors(y, codes, matrix).max(initial=0) <= 1, (outputs, columns, rows)
        if columns < 1000:
            wide = dequantize(isa, matrix, np.float32)
            np.testing.assert_allclose(wide, matrix.numbers, rtol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_weight_equals_its_values(isa: str, name: str) -> None:
    """Widening gives the float64 values rounded to float32, and the bfloat16 result is the float32
    result rounded.
    """
    matrix = FORMATS[name](np.random.default_rng(7), 11, 330)
    wide, half = dequantize(isa, matrix, np.float32), dequantize(isa, matrix, bfloat16)
    np.testing.assert_allclose(wide, matrix.numbers, rtol=2e-7)
    assert half.tobytes() == wide.astype(bfloat16).tobytes()


def test_packed_bfloat16_product_equals_plain_bfloat16(isa: str) -> None:
    """Packed and plain bfloat16 weights with equal values give bit-identical products."""
    rng = np.random.default_rng(8)
    packed = FORMATS["bf16-packed"](rng, 33, 320)
    plain = FORMATS["bfloat16"](rng, 33, 320)
    plain.data[...], plain.numbers = packed.numbers.astype(bfloat16), packed.numbers
    for dtype, rows in ((d, r) for d in TYPES for r in (1, 4, 16, 40)):
        x = inputs(rng, "normal", (rows, 320), dtype)
        ours, same = product(isa, packed, x), product(isa, plain, x)
        assert ours.tobytes() == same.tobytes(), (dtype, rows)


def test_packed_ignores_out_of_range_escapes(isa: str) -> None:
    """Escapes outside the matrix are ignored; files are validated on read, but weights built by a
    program are not.
    """
    rng = np.random.default_rng(9)
    matrix = FORMATS["bf16-packed"](rng, 5, 200)
    _, _, begin, column, _ = matrix.packed
    begin[...] = [-(2**31), 2**31 - 1, -7, 0, 10**6, 2]
    column[::2] = 2**31 - 1
    column[1::2] = -(2**31)
    for rows in (1, 6):
        product(isa, matrix, inputs(rng, "normal", (rows, 200), bfloat16))
    dequantize(isa, matrix, bfloat16)


@pytest.mark.parametrize("name", [name for name in SPARSE if name in INTEGERS])
def test_sparse_int8_rounded_product_equals_dense(isa: str, name: str) -> None:
    """With rounded inputs, a sparse integer weight gives the same bits as the dense int8 weight of
    equal values.
    """
    rng = np.random.default_rng(11)
    sparse, dense = FORMATS[name](rng, 33, 640), FORMATS["int8"](rng, 33, 640)
    assert sparse.scale is not None and dense.scale is not None
    dense.data[...] = np.round(sparse.numbers / sparse.scale)
    dense.scale[...], dense.numbers = sparse.scale, sparse.numbers
    for dtype, rows in ((d, r) for d in TYPES for r in (1, 4, 40)):
        x = inputs(rng, "normal", (rows, 640), dtype)
        ours, same = (product(isa, m, x, rounded=True) for m in (sparse, dense))
        assert ours.tobytes() == same.tobytes(), (dtype, rows)


@pytest.mark.parametrize("name", [*INTEGERS, *SUPER, "mxfp4"])
def test_int8_input_product_sums_are_exact(isa: str, name: str) -> None:
    """Integer sums are exact and scaled once: bit for bit if a row has one scale, per group
    otherwise.
    """
    rng = np.random.default_rng(13)
    matrix = FORMATS[name](rng, 33, 1300)
    x = placed(rng.integers(-128, 128, (40, 1300)).astype(np.int8))
    x[1:3] = [[127], [-127]]  # the largest products, with weights of -128
    near = np.maximum(x, -127).astype(np.float32)
    single_row = product(isa, matrix, x[:1])
    for rows in (1, 3, 40):
        y = product(isa, matrix, x[:rows])
        assert y[:1].tobytes() == single_row.tobytes()
        assert errors(y, near[:rows], matrix).max() <= 1
    if matrix.scale is not None and matrix.scale.shape[1] == 1:
        scale = matrix.scale.astype(np.float32).reshape(1, -1)
        whole = np.round(near.astype(np.float64) @ (matrix.numbers / scale.T).T)
        assert (y == whole.astype(np.float32) * scale).all()


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_mask_out_of_range_reads_nothing(isa: str, name: str) -> None:
    """A mask that selects more values than exist causes no read outside them; only checkpoints are
    validated.
    """
    rng = np.random.default_rng(12)
    matrix = FORMATS[name](rng, 5, 700)
    assert matrix.mask is not None
    matrix.mask[...] = 255
    if matrix.begin is not None:
        matrix.begin[...] = [-(2**31), 2**31 - 1, len(matrix.data) - 129, 0, 10**6, 2]
    for rows, whole in ((1, False), (6, False), (1, True)):
        product(isa, matrix, inputs(rng, "normal", (rows, 700), bfloat16), rounded=whole)
    dequantize(isa, matrix, bfloat16)


@pytest.mark.parametrize("kind", [Kind.FLOAT32, Kind.BFLOAT16, Kind.FLOAT16, Kind.INT8])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_equals_brute_force(isa: str, kind: Kind, dtype: np.dtype) -> None:
    """Attention equals a float64 brute force for every cache type, batch layout, window and soft
    cap.
    """
    rng = np.random.default_rng(10)
    for B, T, N, K, H, S, window in (
        (1, 1, 4, 2, 20, 90, None), (3, 1, 4, 4, 32, 130, 7), (2, 19, 6, 2, 64, 70, None),
        (1, 1, 2, 1, 1, 3, None), (2, 3, 4, 2, 96, 0, None), (2, 0, 4, 2, 16, 5, None),
        (1, 1, 4, 2, 32, 1100, None),
    ):  # fmt: skip
        # Shared by all rows; shared with positions per row; separate for each row.
        rows = [(1, 1, 1), (1, 1, B), (B, B, 1), (B, 1, B)]
        parts = [cached(rng, kind, r, (S + i, K, H)) for i, r in enumerate(rows)]
        q = placed(rng.normal(0, 1, (B, T, N, H)).astype(dtype))
        at = placed(rng.integers(-1, 60, (B, T)).astype(np.int32))
        share = 5e-6 if dtype == np.float32 else 2**-7  # two roundings to 8 bits
        for cap in (None, 2.0):
            exact, size = brute_force(q, at, parts, 0.3, window, cap)
            y = attend(isa, q, at, parts, scale=0.3, window=window, cap=cap).astype(np.float64)
            assert (np.abs(y - exact) <= share * (size + 1e-3)).all(), (B, T, N, K, H, S, cap)
