"""The C++ kernels without XLA, on every available instruction set, against float64."""

import numpy as np
import pytest

from jaxllm.ops import native
from jaxllm.ops.native import Kind
from tests.ops.direct import attend, bfloat16, kernels, placed, product, widen
from tests.ops.samples import (
    FORMATS,
    INPUTS,
    brute_force,
    cached,
    errors,
    inputs,
    rounded,
)  # fmt: skip

# Outputs and columns: one, odd, a tile plus a remainder, groups and chunks that do not divide.
SHAPES = [(1, 1), (7, 100), (33, 200), (18, 1300)]
ROWS = (1, 2, 3, 5, 16, 40)
TYPES = [np.dtype(np.float32), bfloat16]
INTEGERS = [name for name in FORMATS if name.startswith("int")]
SPARSE = [name for name in FORMATS if name.endswith(("2:4", "bitmap"))]


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_exact_to_float32_and_a_row_alone_has_the_same_bits(
    isa: str, name: str
) -> None:
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


def test_a_set_with_a_matrix_unit_says_so(isa: str) -> None:
    """Of which `product` takes the unit, wherever it can."""
    assert bool(kernels(isa).many.takes) == native.has_matrix_unit()


@pytest.mark.parametrize("kind", INPUTS)
def test_whatever_its_inputs_are_like_a_product_is_exact_to_float32(isa: str, kind: str) -> None:
    """No input loses bits for a larger one, and no sum overflows that its scale brings back."""
    rng = np.random.default_rng(1)
    for name, draw in FORMATS.items():
        matrix = draw(rng, 9, 600)
        for dtype in TYPES:
            x = inputs(rng, kind, (6, 600), dtype)
            for rows in (1, 6):
                y = product(isa, matrix, x[:rows])
                assert errors(y, x[:rows], matrix).max() <= 1, (name, dtype, rows)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_giant_that_a_weight_of_zero_meets_takes_no_bits_from_the_others(
    isa: str, name: str
) -> None:
    rng = np.random.default_rng(2)
    matrix = FORMATS[name](rng, 5, 256)
    middle = np.argmin(np.abs(matrix.numbers), axis=1)
    column = middle[0]
    assert matrix.numbers[0, column] == 0
    for dtype, giant in ((d, g) for d in TYPES for g in (1e4, 1e30, 3e38)):
        x = inputs(rng, "normal", (1, 256), dtype)
        x[0, column] = giant
        assert errors(product(isa, matrix, x), x, matrix)[0, 0] <= 1, (dtype, giant)


@pytest.mark.parametrize("nonfinite", [np.nan, np.inf])
def test_what_is_no_number_shows_in_its_row_alone(isa: str, nonfinite: float) -> None:
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
def test_rounded_inputs_are_those_of_round_to_int8_bit_for_bit(isa: str, name: str) -> None:
    """Weights of 1 on the diagonal, and nothing else, give the rounded inputs themselves."""
    rng = np.random.default_rng(4)
    n = 640
    matrix = FORMATS[name](rng, n, n)
    matrix.scale[...] = 1
    if matrix.zero is not None:
        matrix.zero[...] = 8
    q = np.eye(n, dtype=np.int64) + (0 if matrix.kind == Kind.INT8 else 8)
    if matrix.kind == Kind.INT8:
        matrix.data[...] = q
    else:
        low, high = np.moveaxis(q.reshape(n, n // 32, 2, 16), 2, 0)
        matrix.data[...] = (low | high << 4).reshape(n, n // 2)
    for kind, dtype in ((k, d) for k in INPUTS for d in TYPES):
        x = inputs(rng, kind, (3, n), dtype)
        if kind == "normal":  # many values halfway between two integers
            x[2] = np.round(x[2].astype(np.float32) * 20) / 2
            x[2, ::512] = 127
        y = product(isa, matrix, x, rounded=True)
        assert (y == rounded(x)).all(), (kind, dtype)


@pytest.mark.parametrize("name", INTEGERS)
def test_products_of_rounded_inputs_are_exact_to_float32(isa: str, name: str) -> None:
    rng = np.random.default_rng(5)
    for shape in SHAPES:
        matrix = FORMATS[name](rng, *shape)
        for dtype, kind in ((d, k) for d in TYPES for k in INPUTS):
            x = inputs(rng, kind, (max(ROWS), shape[1]), dtype)
            single_row = product(isa, matrix, x[:1], rounded=True)
            for rows in (1, 3, 40):
                y = product(isa, matrix, x[:rows], rounded=True)
                assert errors(y, rounded(x[:rows]), matrix).max() <= 1, (shape, dtype, kind, rows)
                assert y[:1].tobytes() == single_row.tobytes(), (shape, dtype, kind, rows)


@pytest.mark.parametrize("name", FORMATS)
def test_no_rows_no_columns_no_outputs_and_rows_wider_than_a_cache(isa: str, name: str) -> None:
    rng = np.random.default_rng(6)
    for outputs, columns, rows in ((0, 64, 2), (3, 0, 1), (5, 0, 6), (3, 64, 0), (5, 131_328, 5)):
        matrix = FORMATS[name](rng, outputs, columns)
        for dtype in TYPES:
            x = inputs(rng, "normal", (rows, columns), dtype)
            y = product(isa, matrix, x)
            assert errors(y, x, matrix).max(initial=0) <= 1, (outputs, columns, rows, dtype)
            if name in INTEGERS:
                y = product(isa, matrix, x, rounded=True)
                assert errors(y, rounded(x), matrix).max(initial=0) <= 1, (outputs, columns, rows)
        if name in INTEGERS:
            codes = placed(rng.integers(-127, 128, (rows, columns)).astype(np.int8))
            y = product(isa, matrix, codes)
            assert errors(y, codes, matrix).max(initial=0) <= 1, (outputs, columns, rows)
        if columns < 1000:
            wide = widen(isa, matrix, np.float32)
            np.testing.assert_allclose(wide, matrix.numbers, rtol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_a_widened_weight_is_its_numbers(isa: str, name: str) -> None:
    matrix = FORMATS[name](np.random.default_rng(7), 11, 330)
    wide, half = widen(isa, matrix, np.float32), widen(isa, matrix, bfloat16)
    np.testing.assert_allclose(wide, matrix.numbers, rtol=2e-7)
    assert half.tobytes() == wide.astype(bfloat16).tobytes()


def test_packed_bfloat16_has_the_bits_of_bfloat16(isa: str) -> None:
    rng = np.random.default_rng(8)
    packed = FORMATS["bf16-packed"](rng, 33, 320)
    plain = FORMATS["bfloat16"](rng, 33, 320)
    plain.data[...], plain.numbers = packed.numbers.astype(bfloat16), packed.numbers
    for dtype, rows in ((d, r) for d in TYPES for r in (1, 4, 16, 40)):
        x = inputs(rng, "normal", (rows, 320), dtype)
        ours, same = product(isa, packed, x), product(isa, plain, x)
        assert ours.tobytes() == same.tobytes(), (dtype, rows)


def test_escapes_that_fit_no_matrix_are_left_out(isa: str) -> None:
    """Files are checked when they are read; a leaf that a program made is not."""
    rng = np.random.default_rng(9)
    matrix = FORMATS["bf16-packed"](rng, 5, 200)
    _, _, begin, column, _ = matrix.packed
    begin[...] = [-(2**31), 2**31 - 1, -7, 0, 10**6, 2]
    column[::2] = 2**31 - 1
    column[1::2] = -(2**31)
    for rows in (1, 6):
        product(isa, matrix, inputs(rng, "normal", (rows, 200), bfloat16))
    widen(isa, matrix, bfloat16)


@pytest.mark.parametrize("name", [name for name in SPARSE if name in INTEGERS])
def test_sparse_integers_times_rounded_inputs_have_the_bits_of_dense_ones(
    isa: str, name: str
) -> None:
    rng = np.random.default_rng(11)
    sparse, dense = FORMATS[name](rng, 33, 640), FORMATS["int8"](rng, 33, 640)
    assert sparse.scale is not None and dense.scale is not None
    dense.data[...] = np.round(sparse.numbers / sparse.scale)
    dense.scale[...], dense.numbers = sparse.scale, sparse.numbers
    for dtype, rows in ((d, r) for d in TYPES for r in (1, 4, 40)):
        x = inputs(rng, "normal", (rows, 640), dtype)
        ours, same = (product(isa, m, x, rounded=True) for m in (sparse, dense))
        assert ours.tobytes() == same.tobytes(), (dtype, rows)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_times_integers_are_whole_numbers_scaled_once(isa: str, name: str) -> None:
    """Exactly so where a row has one scale; elsewhere each group's sum is."""
    rng = np.random.default_rng(13)
    matrix = FORMATS[name](rng, 33, 1300)
    assert matrix.scale is not None
    x = placed(rng.integers(-128, 128, (40, 1300)).astype(np.int8))
    x[1:3] = [[127], [-127]]  # the largest products, with weights of -128
    near = np.maximum(x, -127).astype(np.float32)
    single_row = product(isa, matrix, x[:1])
    for rows in (1, 3, 40):
        y = product(isa, matrix, x[:rows])
        assert y[:1].tobytes() == single_row.tobytes()
        assert errors(y, near[:rows], matrix).max() <= 1
    if matrix.scale.shape[1] == 1:
        scale = matrix.scale.astype(np.float32).reshape(1, -1)
        whole = np.round(near.astype(np.float64) @ (matrix.numbers / scale.T).T)
        assert (y == whole.astype(np.float32) * scale).all()


@pytest.mark.parametrize("name", SPARSE)
def test_bits_that_fit_no_numbers_read_nothing_outside_them(isa: str, name: str) -> None:
    """As with escapes: a checkpoint is refused, a leaf that a program made is not."""
    rng = np.random.default_rng(12)
    matrix = FORMATS[name](rng, 5, 700)
    assert matrix.mask is not None
    matrix.mask[...] = 255
    if matrix.begin is not None:
        matrix.begin[...] = [-(2**31), 2**31 - 1, len(matrix.data) - 129, 0, 10**6, 2]
    for rows, whole in ((1, False), (6, False), (1, True)):
        product(isa, matrix, inputs(rng, "normal", (rows, 700), bfloat16), rounded=whole)
    widen(isa, matrix, bfloat16)


@pytest.mark.parametrize("kind", [Kind.FLOAT32, Kind.BFLOAT16, Kind.FLOAT16, Kind.INT8])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_equals_brute_force(isa: str, kind: Kind, dtype: np.dtype) -> None:
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
