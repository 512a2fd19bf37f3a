"""The C++ kernels, on every instruction set that this machine runs, against float64."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops import native
from jaxllm.weights.formats import as_format, dense
from jaxllm.weights.linear import embed, linear, linears
from tests.ops.isa import each_isa

pytestmark = pytest.mark.usefixtures("kernels")

FORMATS = [
    "float32", "bfloat16", "float16", "bf16-packed", "int8", "int8-g32", "int8-g64-f16",
    "int8-g128", "int4-g32", "int4-g64", "int4-g128-zp", "int4-g32-zp-f16",
]  # fmt: skip
# Output rows and columns: one, odd, a tile and a rest, groups and chunks that do not divide.
SHAPES = [(1, 1), (7, 100), (33, 200), (130, 384)]
ROWS = (1, 2, 3, 5, 16)

apply = jax.jit(linear, static_argnames="int8_inputs")


def matrix(rng: np.random.Generator, shape: tuple[int, int], name: str) -> Any:
    weight = jnp.asarray(rng.normal(0, 0.02, shape).astype(np.float32))
    if name.startswith("bf"):
        weight = weight.astype(jnp.bfloat16).at[0, 0].set(0)  # zero is an escape
    return as_format(weight, name)


def in_float64(x: Any, weight: Any) -> tuple[np.ndarray, np.ndarray]:
    """The product, and the sum of the products' magnitudes, which bounds the rounding."""
    x, w = (np.asarray(a.astype(jnp.float32)).astype(np.float64) for a in (x, dense(weight)))
    return x @ w.T, np.abs(x) @ np.abs(w).T


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_exact_to_float32_and_a_row_alone_has_the_same_bits(
    name: str, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        weight = matrix(rng, shape, name)
        x = jnp.asarray(rng.normal(0, 1, (16, shape[1])).astype(np.float32)).astype(dtype)
        expected, bound = in_float64(x, weight)
        for isa in each_isa():
            alone = None
            for rows in ROWS:
                y = np.asarray(apply(x[:rows], weight))
                assert (np.abs(y - expected[:rows]) <= 1e-6 * bound[:rows]).all(), (isa, shape)
                alone = y[:1] if alone is None else alone
                assert y[:1].tobytes() == alone.tobytes(), (isa, shape, rows)
    with native.disabled():
        y = np.asarray(apply(x, weight))
    assert (np.abs(y - expected) <= 1e-6 * bound).all(), "plain JAX"


def test_packed_bfloat16_has_the_bits_of_bfloat16() -> None:
    rng = np.random.default_rng(1)
    packed = matrix(rng, (64, 320), "bf16-packed")
    assert packed.widest > 0
    for dtype, rows in itertools.product(("float32", "bfloat16"), (1, 4, 16)):
        x = jnp.asarray(rng.normal(0, 1, (rows, 320)).astype(np.float32)).astype(dtype)
        for isa in each_isa():
            ours, plain = apply(x, packed), apply(x, packed.dense())
            assert np.asarray(ours).tobytes() == np.asarray(plain).tobytes(), (isa, dtype, rows)


@pytest.mark.parametrize("name", ["int8", "int8-g128", "int8-g32", "int4-g64", "int4-g32-zp"])
def test_int8_inputs_are_rounded_in_blocks_of_512(name: str) -> None:
    rng = np.random.default_rng(2)
    weight = matrix(rng, (41, 1300), name)
    x = rng.normal(0, 1, (3, 1300)).astype(np.float32)
    x[1] *= np.linspace(1e-3, 1e3, 1300, dtype=np.float32)
    rounded = np.zeros_like(x)
    for r, begin in itertools.product(range(3), range(0, 1300, 512)):
        block = x[r, begin : begin + 512]
        step = np.abs(block).max() / 127
        rounded[r, begin : begin + 512] = np.round(block / step) * step
    expected, bound = in_float64(jnp.asarray(rounded), weight)
    for isa in each_isa():
        y = np.asarray(apply(jnp.asarray(x), weight, int8_inputs=True))
        assert (np.abs(y - expected) <= 1e-6 * bound).all(), isa
    with native.disabled():
        y = np.asarray(apply(jnp.asarray(x), weight, int8_inputs=True))
    assert (np.abs(y - expected) <= 1e-6 * bound).all(), "plain JAX"
    many = jnp.asarray(np.tile(x, (7, 1)))
    y = np.asarray(apply(many, weight, int8_inputs=True))
    assert (np.abs(y - np.tile(expected, (7, 1))) <= 1e-6 * np.tile(bound, (7, 1))).all(), "many"


@pytest.mark.parametrize("name", ["int8", "int8-g32", "int4-g64", "int4-g32-zp"])
def test_extremes_keep_float32s_precision(name: str) -> None:
    """Sizes of inputs far apart, subnormal ones, the largest, zeros; and what is not a number."""
    rng = np.random.default_rng(3)
    weight = matrix(rng, (9, 256), name)
    x = np.stack([
        np.where(rng.random(256) < 0.02, 1e4, 1.0) * rng.normal(0, 1, 256),
        rng.normal(0, 1, 256) * 1e-38,
        rng.uniform(-1, 1, 256) * 3e38 / 256,
        np.where(np.arange(256) < 128, 0.0, rng.normal(0, 1, 256)),
        np.nextafter(np.float32(1), np.float32(0)) * np.ones(256),
    ]).astype(np.float32)  # fmt: skip
    expected, bound = in_float64(jnp.asarray(x), weight)
    for isa in each_isa():
        y = np.asarray(apply(jnp.asarray(x), weight))
        assert (np.abs(y - expected) <= 2e-6 * bound + 1e-37).all(), isa
        for wrong in (np.nan, np.inf):
            bad = x[:2].copy()
            bad[0, 5] = wrong
            y = np.asarray(apply(jnp.asarray(bad), weight))
            assert not np.isfinite(y[0]).any() and np.isfinite(y[1]).all(), isa


@pytest.mark.parametrize("name", ["bf16-packed", "int8", "int4-g32-zp"])
def test_many_rows_go_through_the_expanded_weight(name: str) -> None:
    rng = np.random.default_rng(4)
    weight = matrix(rng, (50, 200), name)
    x = jnp.asarray(rng.normal(0, 1, (40, 200)).astype(np.float32))
    expected, bound = in_float64(x, weight)
    for isa in each_isa():
        y = np.asarray(apply(x, weight))
        assert (np.abs(y - expected) <= 2e-6 * bound).all(), isa
        half = np.asarray(apply(x.astype(jnp.bfloat16), weight))
        assert (np.abs(half - expected) <= 2**-7 * bound).all(), isa


def test_no_rows_no_outputs_and_addresses_of_any_kind() -> None:
    weight = as_format(jnp.ones((5, 128)), "int8")
    assert apply(jnp.ones((0, 128)), weight).shape == (0, 5)
    assert apply(jnp.ones((2, 128)), as_format(jnp.ones((0, 128)), "int8")).shape == (2, 0)
    raw = np.zeros(4 * 130 + 4, np.uint8)
    x = raw[4:].view(np.float32).reshape(1, 130)  # on a 4-byte boundary
    x[:] = 1
    y = apply(jax.device_put(x), jax.device_put(np.ones((3, 130), np.float32)))
    np.testing.assert_array_equal(np.asarray(y), np.full((1, 3), 130, np.float32))


def test_vmap_scan_and_derivatives_are_those_of_plain_jax() -> None:
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(0, 1, (3, 2, 160)).astype(np.float32))
    weight = matrix(rng, (20, 160), "int4-g32")
    plain = np.asarray(x) @ np.asarray(weight.dense()).T
    np.testing.assert_allclose(jax.vmap(linear, (0, None))(x, weight), plain, atol=1e-5)
    np.testing.assert_allclose(jax.lax.map(lambda a: linear(a, weight), x), plain, atol=1e-5)
    stack = jax.tree.map(lambda *a: jnp.stack(a), weight, weight, weight)
    np.testing.assert_allclose(jax.vmap(linear)(x, stack), plain, atol=1e-5)
    rounded = partial(linear, int8_inputs=True)
    each = [rounded(a, weight) for a in x]
    np.testing.assert_allclose(jax.vmap(rounded)(x, stack), each, atol=1e-5)
    assert np.abs(np.asarray(each) - plain).max() > 1e-4

    def loss(x: jax.Array, weight: Any) -> jax.Array:
        return jnp.square(linear(x, weight)).sum()

    ours = jax.jit(jax.grad(loss))(x, weight)
    np.testing.assert_allclose(ours, jax.grad(loss)(x, weight.dense()), rtol=1e-4, atol=1e-4)
    by_weight = jax.grad(loss, 1)(x, weight.dense())
    with native.disabled():
        np.testing.assert_allclose(by_weight, jax.grad(loss, 1)(x, weight.dense()), rtol=1e-4)
    by_scale = jax.grad(lambda s: loss(x, weight.replace(scale=s)))(weight.scale)
    step = 1e-3 * jnp.zeros_like(weight.scale).at[3, 1].set(1.0)
    rise = loss(x, weight.replace(scale=weight.scale + step))
    fall = loss(x, weight.replace(scale=weight.scale - step))
    np.testing.assert_allclose(by_scale[3, 1], (rise - fall) / 2e-3, rtol=1e-2)


def test_disabled_leaves_no_kernel_in_a_program() -> None:
    x, weight = jnp.ones((1, 64)), jnp.ones((8, 64))
    function = jax.jit(linear)  # the same function, compiled for both
    assert "jaxllm_linear" in function.lower(x, weight).as_text()
    with native.disabled():
        assert "jaxllm" not in function.lower(x, weight).as_text()
    assert "jaxllm_linear" in function.lower(x, weight).as_text()


def test_products_of_one_input_are_one_call_with_the_bits_of_each_alone() -> None:
    rng = np.random.default_rng(8)
    for dtype, rows in itertools.product(("float32", "bfloat16"), (1, 16)):
        x = jnp.asarray(rng.normal(0, 1, (rows, 200)), dtype)
        biases = [None, jnp.asarray(rng.normal(0, 1, 34), jnp.float32), *[None] * 5]
        names = ("int8", "int8", "int4-g32", "int4-g64", "bf16-packed", "bfloat16", "float32")
        terms = [
            (matrix(rng, (33 + i, 200), name), bias)
            for i, (name, bias) in enumerate(zip(names, biases, strict=True))
        ]
        for isa in each_isa():
            together = jax.jit(lambda x, terms: linears(x, terms))
            calls = together.lower(x, terms).as_text().count("@jaxllm_linear(")
            assert calls == 1, (isa, dtype, rows)
            for y, term in zip(together(x, terms), terms, strict=True):
                assert np.asarray(y).tobytes() == np.asarray(apply(x, *term)).tobytes(), isa


@pytest.mark.parametrize("name", ["float32", "int8", "int4-g64", "bf16-packed"])
def test_an_input_of_another_width_is_refused(name: str) -> None:
    weight = matrix(np.random.default_rng(3), (8, 100), name)
    for columns in (99, 101, 120):
        with pytest.raises(ValueError, match="does not fit"):
            linear(jnp.ones((1, columns)), weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_of_a_table_are_read_without_a_copy_of_it(dtype: str) -> None:
    table = jax.random.normal(jax.random.key(0), (4096, 256)).astype(dtype)
    token_BT = jnp.array([[3, 4095, 0], [4096, -1, 3]])
    rows = np.asarray(embed(table, token_BT).astype(jnp.float32))
    assert rows[0].tolist() == np.asarray(table, np.float32)[[3, 4095, 0]].tolist()
    assert np.isnan(rows[1, :2]).all() and not np.isnan(rows[1, 2]).any()

    def loop(table: jax.Array, token_N: jax.Array) -> jax.Array:
        step = lambda carry, t: (carry, embed(table, t[None, None]).astype(jnp.float32))  # noqa: E731
        return jax.lax.scan(step, None, token_N)[1]

    compiled = jax.jit(loop).lower(table, jnp.arange(9)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes / 8
    slope = jax.grad(lambda x: embed(x, token_BT[0]).astype(jnp.float32).sum())(table)
    assert slope.dtype == dtype
    assert np.asarray(slope, np.float32).sum(axis=1).nonzero()[0].tolist() == [0, 3, 4095]
    each = jax.vmap(embed, in_axes=(None, 0))(table, token_BT)
    np.testing.assert_array_equal(np.asarray(each, np.float32), rows)
