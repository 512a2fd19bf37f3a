"""Integer weights of 8, 4, 3 and 2 bits: packing, quantization grid and column order."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.formats import as_format, parse_format, weight_format
from jaxllm.weights.linear import linear, round_to_int8
from jaxllm.weights.types.int_weight import IntFormat, IntWeight
from jaxllm.weights.types.permuted import PermutedWeight
from tests.weights.products import assert_products_equal

ROWS, COLUMNS = 7, 150  # two chunks of 128, the second with 106 columns too many
NEW = ["int3-g32", "int3-g128-zp-f16", "int2-g64-f16", "int2-g32-zp", "int8-zp", "int8-g64-zp"]
ALL = ["int8", "int4-g64", "int4-g32-zp", *NEW]
MORE = ["int8-f16", "int8-g32", "int8-g128", "int4-g32", "int4-g64-f16", "int4-g128"]


def numbers(rows: int = ROWS, seed: int = 0) -> np.ndarray:
    array = np.random.default_rng(seed).normal(0.004, 0.02, (rows, COLUMNS)).astype(np.float32)
    array[3] = 0
    array[5] = np.abs(array[5])
    return array


def quantize_to(name: str, array: np.ndarray) -> tuple[Any, IntWeight]:
    weight: Any = as_format(jnp.asarray(array), name)
    return parse_format(name), weight


def code(weight: IntWeight, o: int, i: int) -> int:
    """Return the code of one weight, unpacked by the documented byte layout."""
    row = np.asarray(weight.data)[o].astype(int)
    if weight.bits == 8:
        return int(row[i])
    if weight.bits == 4:
        return int(row[16 * (i // 32) + i % 16]) >> (4 if i % 32 >= 16 else 0) & 15
    begin, block, j = i // 128 * 16 * weight.bits, i // 32 % 4, i % 16
    shift = 4 if i % 32 >= 16 else 0
    lower = int(row[begin + 16 * (block // 2) + j]) >> (shift + 2 * (block % 2)) & 3
    if weight.bits == 2:
        return lower
    return lower + 4 * (int(row[begin + 32 + j]) >> (shift + block) & 1)


def by_hand(weight: IntWeight) -> np.ndarray:
    """Evaluate the docstring's formula entry by entry in float64."""
    scale = np.asarray(weight.scale).astype(np.float64)
    group = weight.group or 256
    default = {8: 0, 4: 8, 3: 4, 2: 2}[weight.bits]
    zero = np.full(scale.shape, default) if weight.zero is None else np.asarray(weight.zero)
    return np.array(
        [
            [(code(weight, o, i) - int(zero[o, i // group])) * scale[o, i // group]
             for i in range(weight.shape[1])]
            for o in range(weight.shape[0])
        ]
    )  # fmt: skip


@pytest.mark.parametrize("name", [*ALL, *MORE, "int4-g64-zp-f16"])
def test_int_weight_equals_formula_with_nearest_codes(name: str) -> None:
    """Dequantized values equal the docstring's formula, and by brute force no other level of a
    group is nearer.
    """
    array = numbers()
    kind, weight = quantize_to(name, array)
    assert weight_format(weight) == kind.name
    assert weight.shape == array.shape
    assert weight.data.nbytes == ROWS * 256 * kind.bits // 8
    formula = by_hand(weight)
    np.testing.assert_allclose(np.asarray(weight.to_dense()), formula, rtol=1e-6)
    assert (formula[3] == 0).all()
    np.testing.assert_array_equal(np.asarray(weight.to_dense(jnp.bfloat16))[3], 0)
    # Brute force: no other level of the group is nearer.
    scale, group = np.asarray(weight.scale, np.float64), weight.group or 256
    zero = (
        np.asarray(weight.zero) if weight.zero is not None else np.full(scale.shape, kind.zero_code)
    )
    least, most = kind.code_range
    levels = (np.arange(least, most + 1) - zero[..., None]) * scale[..., None]  # [O, G, L]
    each = np.repeat(levels, group, axis=1)[:, :COLUMNS]
    nearest = np.abs(each - array[..., None]).min(-1)
    np.testing.assert_allclose(np.abs(formula - array), nearest, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("name", "bits"), [("int3-g32", 3), ("int2-g32", 2), ("int4-g32", 4)])
def test_symmetric_grid_uses_all_levels(name: str, bits: int) -> None:
    """The value of largest magnitude gets the lowest level, so that the scale may be negative and
    2^bits levels round-trip.
    """
    half = 2 ** (bits - 1)
    levels = np.resize(np.arange(-half, half), 128).astype(np.float32)
    _, weight = quantize_to(name, np.stack([levels * 0.5, levels * -3.0]))  # a negative scale too
    np.testing.assert_array_equal(np.asarray(weight.to_dense()), [levels * 0.5, levels * -3.0])
    np.testing.assert_array_equal(np.asarray(weight.scale), [[0.5] * 4, [-3.0] * 4])
    assert weight.zero is None


@pytest.mark.parametrize(
    ("name", "most"), [("int3-g32-zp", 7), ("int2-g32-zp", 3), ("int8-zp", 255)]
)
def test_zero_point_grid_spans_whole_range(name: str, most: int) -> None:
    levels = np.resize(np.arange(most + 1), 256).astype(np.float32) - 1
    _, weight = quantize_to(name, levels[None] * 0.25)
    np.testing.assert_array_equal(np.asarray(weight.to_dense()), levels[None] * 0.25)
    assert (np.asarray(weight.zero) == 1).all()
    assert (np.asarray(weight.scale) == 0.25).all()


@pytest.mark.parametrize("name", ALL)
def test_int_codes_round_trip_and_equal_grid_functions(name: str) -> None:
    """from_codes restores the weight bit for bit; choose_grid, to_codes and to_values give the
    codes and values of quantize.
    """
    kind, weight = quantize_to(name, numbers())
    again = jax.jit(kind.from_codes)(weight.codes[:, :COLUMNS], weight.scale, weight.zero)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(weight), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert again.format == kind.name

    # choose_grid, to_codes and to_values, which GPTQ calls one by one, agree with quantize.
    wide = jnp.pad(jnp.asarray(numbers()), ((0, 0), (0, 256 - COLUMNS)))
    w_OGg = wide.reshape(ROWS, -1, kind.group_size(COLUMNS))

    @jax.jit
    def rounded(w_OGg: jax.Array) -> Any:
        scale, zero = kind.choose_grid(w_OGg)
        codes = kind.to_codes(w_OGg, scale[..., None], zero[..., None])
        return scale, codes, kind.to_values(codes, scale[..., None], zero[..., None])

    scale, codes, values = rounded(w_OGg)
    np.testing.assert_array_equal(np.asarray(scale), np.asarray(weight.scale))
    np.testing.assert_array_equal(np.asarray(codes).reshape(ROWS, -1), np.asarray(weight.codes))
    values = np.asarray(values).reshape(ROWS, -1)[:, :COLUMNS]
    np.testing.assert_array_equal(values, np.asarray(weight.to_dense()))


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int3-g32-zp", "int8-g32-zp-f16"])
def test_shrunk_grid_equals_grid_of_smaller_range(name: str) -> None:
    """With a shrink factor, choose_grid returns the grid of the scaled weights, and values outside
    are clipped.
    """
    w_OGg = jnp.asarray(np.random.default_rng(3).normal(0, 1, (2, 3, 32)).astype(np.float32))
    shrink, kind = jnp.asarray([[0.5, 1.0, 0.25]] * 2), parse_format(name)
    assert isinstance(kind, IntFormat)
    scale, zero = kind.choose_grid(w_OGg, shrink)
    smaller, zero_smaller = kind.choose_grid(w_OGg * shrink[..., None])  # powers of two: exact
    np.testing.assert_array_equal(np.asarray(scale), np.asarray(smaller))
    np.testing.assert_array_equal(np.asarray(zero), np.asarray(zero_smaller))
    least, most = kind.code_range
    codes = kind.to_codes(w_OGg, scale[..., None], zero[..., None]).astype(jnp.int32)
    assert int(codes.min()) == least
    assert int(codes.max()) == most, "values outside are clipped"


@pytest.mark.parametrize("name", NEW)
def test_int_linear_and_embed_equal_dense(name: str) -> None:
    _, weight = quantize_to(name, numbers())
    dense = np.asarray(weight.to_dense())
    assert_products_equal(weight, dense)
    x = np.random.default_rng(4).normal(0, 1, (5, COLUMNS)).astype(np.float32)
    y = jax.jit(partial(linear, int8_inputs=True))(jnp.asarray(x), weight)
    expected = (
        np.asarray(round_to_int8(jnp.asarray(x), weight.group or 128)).astype(np.float64) @ dense.T
    )
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", ["int3-g32", "int4-g32-zp", "float32"])
def test_permuted_weight_restores_column_order(inner: str) -> None:
    """Dense values, rows, products and saved arrays of an act-order weight equal the unpermuted
    matrix; invalid orders are refused.
    """
    rng = np.random.default_rng(6)
    array, order = numbers(), rng.permutation(COLUMNS).astype(np.int32)
    stored = as_format(jnp.asarray(array), inner)
    weight = PermutedWeight(stored, jnp.asarray(order))
    dense = np.zeros_like(array)
    dense[:, order] = np.asarray(stored.to_dense() if inner != "float32" else stored)
    np.testing.assert_array_equal(np.asarray(weight.to_dense()), dense)
    assert weight.format == f"ordered/{inner}"
    assert_products_equal(weight, dense)
    x = rng.normal(0, 1, (5, COLUMNS)).astype(np.float32)
    if inner == "int4-g32-zp":  # the same int8 inputs, with permuted blocks
        y = jax.jit(partial(linear, int8_inputs=True))(jnp.asarray(x), weight)
        again = linear(jnp.asarray(x[:, order]), stored, int8_inputs=True)
        np.testing.assert_allclose(np.asarray(y), np.asarray(again), rtol=1e-5, atol=1e-6)

    kind = parse_format(weight.format)
    pieces = {name: np.asarray(piece) for name, piece in weight.arrays().items()}
    assert {n: (p.shape, p.dtype) for n, p in pieces.items()} == kind.array_specs(weight.shape)
    again = kind.from_file("w", weight.shape, pieces)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(weight), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    assert as_format(weight, weight.format) is weight
    np.testing.assert_array_equal(np.asarray(as_format(weight, "float32")), dense)
    for wrong in (0, COLUMNS, -1):
        pieces[".order"] = np.where(order == 1, wrong, order).astype(np.int32)
        with pytest.raises(CheckpointError, match="not a permutation of 150 columns"):
            kind.from_file("w", weight.shape, pieces)
    with pytest.raises(ConfigError, match="cannot be made without an order"):
        as_format(jnp.asarray(array), weight.format)
    with pytest.raises(ConfigError, match="format after ordered/ must be simple"):
        parse_format(f"ordered/{weight.format}")


def test_parse_format_completes_names() -> None:
    assert parse_format("int3").name == "int3-g64"
    assert parse_format("int2-zp-f16").name == "int2-g64-zp-f16"
    assert parse_format("int8-zp") == IntFormat(8, None, True)
    assert parse_format("ordered/int4").name == "ordered/int4-g64"
