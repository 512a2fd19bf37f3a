"""The C++ kernels through XLA: shapes, transformations and refused inputs."""

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops import native
from jaxllm.weights.formats import as_format, to_dense
from jaxllm.weights.linear import embed, linear, linears, round_to_int8
from jaxllm.weights.types.arrays import contract
from tests.ops import samples
from tests.ops.ctypes_kernels import bfloat16, product
from tests.ops.samples import rounded

pytestmark = pytest.mark.usefixtures("kernels")

FORMATS = [
    "float32", "bfloat16", "float16", "bf16-packed", "int8", "int8-g32", "int8-g64-f16",
    "int8-g128", "int4-g32", "int4-g64", "int4-g128-zp", "int4-g32-zp-f16",
    "bfloat16-2:4", "float32-bitmap", "int8-2:4", "int8-bitmap",
]  # fmt: skip
apply = jax.jit(linear, static_argnames="int8_inputs")


def matrix(rng: np.random.Generator, shape: tuple[int, int], name: str) -> Any:
    numbers = rng.normal(0, 0.02, shape).astype(np.float32)
    if name.endswith(("2:4", "bitmap")):
        numbers[:, 1::2] = 0
    weight = jnp.asarray(numbers)
    if name.startswith("bf"):
        weight = weight.astype(jnp.bfloat16).at[0, 0].set(0)  # zero is an escape
    return as_format(weight, name)


def in_float64(x: Any, weight: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the product, and the sum of the products' magnitudes, which bounds the rounding."""
    x, w = (np.asarray(a.astype(jnp.float32)).astype(np.float64) for a in (x, to_dense(weight)))
    return x @ w.T, np.abs(x) @ np.abs(w).T


@pytest.mark.parametrize("name", FORMATS)
def test_linear_equals_float64_with_and_without_kernels(name: str) -> None:
    """linear is within float32 rounding of float64, through XLA kernels and in plain JAX."""
    rng = np.random.default_rng(0)
    weight = matrix(rng, (33, 200), name)
    for dtype, rows in (("float32", 5), ("bfloat16", 5), ("float32", 40)):
        x = jnp.asarray(rng.normal(0, 1, (rows, 200)).astype(np.float32)).astype(dtype)
        expected, bound = in_float64(x, weight)
        y = np.asarray(apply(x, weight))
        assert (np.abs(y - expected) <= 1e-6 * bound).all(), (dtype, rows)
    with native.disable_kernels():
        for some in (x, x[:1]):
            y = np.asarray(apply(some, weight))
            assert (np.abs(y - expected[: len(some)]) <= 1e-6 * bound[: len(some)]).all(), (
                "plain JAX"
            )


@pytest.mark.parametrize("name", ["int8", "int4-g32-zp"])
def test_linear_keeps_precision_for_any_input_range(name: str) -> None:
    """Inputs of extreme ranges keep float32 precision on every path, with and without kernels."""
    rng = np.random.default_rng(3)
    weight = matrix(rng, (9, 256), name)
    x = rng.normal(0, 1, (3, 256))
    x[0] *= np.exp2(rng.uniform(-60, 60, 256))
    x[1, ::50] = 3e37  # its sum overflows float32 with integers, but not with weights
    column = int(np.argmin(np.abs(np.asarray(to_dense(weight))[0])))
    x[2, column] = 1e30
    for dtype, rows in (("float32", 1), ("bfloat16", 1), ("float32", 3), ("bfloat16", 40)):
        if name != "int8" and rows == 40:
            continue  # weights of many bfloat16 rows are rounded to bfloat16
        for first in range(3 if rows == 1 else 1):
            some = jnp.asarray(np.resize(np.roll(x, -first, 0), (rows, 256)), dtype)
            expected, bound = in_float64(some, weight)
            for path in (nullcontext, native.disable_kernels):
                if rows == 40 and path is native.disable_kernels:
                    continue
                with path():
                    y = np.asarray(apply(some, weight))
                assert (np.abs(y - expected) <= 1e-6 * bound).all(), (dtype, rows, first, path)


def test_inputs_are_rounded_to_int8_consistently() -> None:
    """Eager, jitted and NumPy rounding agree bit for bit, and linear with int8_inputs uses the same
    values.
    """
    rng = np.random.default_rng(2)
    x = rng.normal(0, 1, (3, 1300)).astype(np.float32)
    x[1] *= np.linspace(1e-3, 1e3, 1300, dtype=np.float32)
    x[2] = 0
    for dtype in (jnp.float32, jnp.bfloat16):
        some = jnp.asarray(x, dtype)
        once = np.asarray(jax.jit(round_to_int8, static_argnums=1)(some, 64))
        assert once.tobytes() == np.asarray(round_to_int8(some, 64)).tobytes()
        np.testing.assert_array_equal(once, rounded(np.asarray(some), 64))
    weight = matrix(rng, (41, 1300), "int4-g64")
    expected, bound = in_float64(jnp.asarray(rounded(x, 64)), weight)
    for rows, path in ((3, nullcontext), (30, nullcontext), (3, native.disable_kernels)):
        with path():
            y = np.asarray(apply(jnp.asarray(np.tile(x, (rows // 3, 1))), weight, int8_inputs=True))
        many = [np.tile(a, (rows // 3, 1)) for a in (expected, bound)]
        assert (np.abs(y - many[0]) <= 1e-6 * many[1]).all(), (rows, path)


def test_linear_handles_empty_shapes_and_unaligned_buffers() -> None:
    """Inputs without rows, outputs or columns work, and so does a buffer on a 4-byte boundary."""
    weight = as_format(jnp.ones((5, 128)), "int8")
    assert apply(jnp.ones((0, 128)), weight).shape == (0, 5)
    assert apply(jnp.ones((2, 128)), as_format(jnp.ones((0, 128)), "int8")).shape == (2, 0)
    for dtype in ("float32", "bfloat16", "float16"):  # an empty sum is zero
        y = linear(jnp.ones((5, 0), jnp.float32), jnp.ones((4, 0), dtype))
        np.testing.assert_array_equal(np.asarray(y), np.zeros((5, 4), np.float32))
    raw = np.zeros(4 * 130 + 4, np.uint8)
    x = raw[4:].view(np.float32).reshape(1, 130)  # on a 4-byte boundary
    x[:] = 1
    y = apply(jax.device_put(x), jax.device_put(np.ones((3, 130), np.float32)))
    np.testing.assert_array_equal(np.asarray(y), np.full((1, 3), 130, np.float32))


def test_linear_supports_vmap_scan_and_grad() -> None:
    """vmap, scan and gradients equal plain JAX; the scale gradient equals a finite difference."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(0, 1, (3, 2, 160)).astype(np.float32))
    weight = matrix(rng, (20, 160), "int4-g32")
    plain = np.asarray(x) @ np.asarray(weight.to_dense()).T
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
    np.testing.assert_allclose(ours, jax.grad(loss)(x, weight.to_dense()), rtol=1e-4, atol=1e-4)
    by_weight = jax.grad(loss, 1)(x, weight.to_dense())
    with native.disable_kernels():
        plain_by_weight = jax.grad(loss, 1)(x, weight.to_dense())
    np.testing.assert_allclose(by_weight, plain_by_weight, rtol=1e-4, atol=1e-4)
    by_scale = jax.grad(lambda s: loss(x, weight.replace(scale=s)))(weight.scale)
    step = 1e-3 * jnp.zeros_like(weight.scale).at[3, 1].set(1.0)
    rise = loss(x, weight.replace(scale=weight.scale + step))
    fall = loss(x, weight.replace(scale=weight.scale - step))
    np.testing.assert_allclose(by_scale[3, 1], (rise - fall) / 2e-3, rtol=1e-2)


def test_disable_kernels_removes_custom_calls() -> None:
    """Under disable_kernels the lowered program has no jaxllm call, although the same function was
    compiled before.
    """
    x, weight = jnp.ones((1, 64)), jnp.ones((8, 64))
    function = jax.jit(linear)  # the same function, compiled for both
    assert "jaxllm_linear" in function.lower(x, weight).as_text()
    with native.disable_kernels():
        assert "jaxllm" not in function.lower(x, weight).as_text()
    assert "jaxllm_linear" in function.lower(x, weight).as_text()


def test_linears_fuses_calls_and_keeps_bits() -> None:
    """Products of one input lower to one call (two with a matrix unit), each with the bits of
    linear.
    """
    rng = np.random.default_rng(8)
    for dtype, rows in itertools.product(("float32", "bfloat16"), (1, 16)):
        x = jnp.asarray(rng.normal(0, 1, (rows, 200)), dtype)
        biases = [None, jnp.asarray(rng.normal(0, 1, 34), jnp.float32), *[None] * 6]
        names = ("int8", "int8", "int4-g32", "int4-g64", "int4-g64-zp")
        names += ("bf16-packed", "bfloat16", "float32")
        terms = [
            (matrix(rng, (33 + i, 200), name), bias)
            for i, (name, bias) in enumerate(zip(names, biases, strict=True))
        ]
        fused = jax.jit(lambda x, terms: linears(x, terms))
        calls = fused.lower(x, terms).as_text().count("@jaxllm_linear(")
        # With many bfloat16 rows, a matrix unit takes all weights but float32: a second call.
        unit = native.has_matrix_unit() and (dtype, rows) == ("bfloat16", 16)
        assert calls == (2 if unit else 1), (dtype, rows)
        for term in terms:  # traced before the instruction set changes, as `fused` is
            apply(x, *term)
        for isa in native.available_isas():
            native.isa(isa)
            for y, term in zip(fused(x, terms), terms, strict=True):
                assert np.asarray(y).tobytes() == np.asarray(apply(x, *term)).tobytes(), isa


@pytest.mark.parametrize("name", ["float32", "int8", "int4-g64", "bf16-packed"])
def test_linear_refuses_mismatched_width(name: str) -> None:
    """linear raises if the input width differs from the weight width."""
    weight = matrix(np.random.default_rng(3), (8, 100), name)
    for columns in (99, 101, 120):
        with pytest.raises(ValueError, match="does not match x of shape"):
            linear(jnp.ones((1, columns)), weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_embed_reads_table_rows_without_copy(dtype: str) -> None:
    """embed copies no table, gives NaN out of range, counts -1 from the end, and supports grad and
    vmap.
    """
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
    gradient = jax.grad(lambda x: embed(x, token_BT[0]).astype(jnp.float32).sum())(table)
    assert gradient.dtype == dtype
    assert np.asarray(gradient, np.float32).sum(axis=1).nonzero()[0].tolist() == [0, 3, 4095]
    each = jax.vmap(embed, in_axes=(None, 0))(table, token_BT)
    np.testing.assert_array_equal(np.asarray(each, np.float32), rows)


def test_matrix_unit_kernel_equals_direct_call(isa: str) -> None:
    """With matrix_unit=True, the XLA call has the bits of the direct kernel call on every
    instruction set.
    """
    rng = np.random.default_rng(9)
    x = np.asarray(rng.normal(0, 1, (40, 200)), bfloat16)
    for name in ("bfloat16", "int8", "int4-g64", "q4_k", "q5_k", "q6_k"):
        sample = samples.FORMATS[name](rng, 70, 200)
        pieces = [jnp.asarray(a) for a in (sample.data, sample.scale) if a is not None]
        weight = native.Matrix(sample.kind, pieces, sample.group or None)
        if sample.kind >= native.Kind.Q4_K:  # less than a row of other bytes may come before
            data = np.concatenate([np.zeros(32, np.uint8), sample.data.reshape(-1)])
            weight = native.Matrix(sample.kind, [jnp.asarray(data)], 32, 70)
        y = native.linear(jnp.asarray(x), [weight], columns=200, matrix_unit=True)[0]
        assert np.asarray(y).tobytes() == product(isa, sample, x).tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", list(itertools.product((0, 1), (0, 1))))
def test_contract_equals_float64(axes: tuple[int, int], dtype: str) -> None:
    """A product of two matrices over either axis is within rounding of float64, in several blocks
    and at their ends.
    """
    rng, run = np.random.default_rng(15), jax.jit(contract, static_argnums=(2, 3))
    for rows, depth, columns in ((300, 601, 70), (33, 32, 600), (257, 47, 49)):
        a, b = (
            jnp.asarray(rng.normal(0, 1, size if axis else size[::-1]), dtype)
            for axis, size in zip(axes, ((rows, depth), (columns, depth)), strict=True)
        )
        left, right = (
            np.asarray(x if axis else x.T, np.float64) for axis, x in zip(axes, (a, b), strict=True)
        )
        exact, bound = left @ right.T, 1e-6 * np.abs(left) @ np.abs(right).T
        y = run(a, b, *axes)
        assert y.dtype == dtype
        bound += np.abs(exact) / 256 if dtype == "bfloat16" else 0
        assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()
        if native.has_matrix_unit():
            direct = jax.jit(native.multiply, static_argnums=(2, 3))
            whole = np.asarray(direct(a, b, *axes), np.float64)
            part = direct(a[40:55] if axes[0] else a[:, 40:55], b, *axes) if rows > 55 else None
            assert (np.abs(whole - exact) <= bound).all()
            assert part is None or (np.asarray(part, np.float64) == whole[40:55]).all()


def test_int8_input_product_is_exact() -> None:
    """With one scale a row, kernels, plain JAX and exact integer arithmetic agree bit for bit;
    otherwise to float32.
    """
    rng = np.random.default_rng(14)
    x = rng.integers(-128, 128, (3, 200)).astype(np.int8)
    near = np.maximum(x, -127).astype(np.int64)
    for name in ("int8", "int8-2:4", "int4-g64", "float32"):
        weight = matrix(rng, (33, 200), name)
        if name == "int8":  # rounding never gives -128, but a file may contain it
            weight = weight.replace(data=weight.data.at[::3].set(-128))
        w = np.asarray(to_dense(weight), np.float64)
        here = np.asarray(apply(jnp.asarray(x), weight))
        with native.disable_kernels():
            plain = np.asarray(apply(jnp.asarray(x), weight))
        if name.startswith("int8"):
            scale = np.asarray(weight.scale).T
            expected = (near @ np.round(w / scale.T).astype(np.int64).T).astype(np.float32) * scale
            assert (here == expected).all() and (plain == expected).all(), name
        exact = (near if name.startswith("int") else x) @ w.T
        bound = 1e-6 * (np.abs(x) @ np.abs(w).T)
        for y in (here, plain):
            assert (np.abs(y - exact) <= bound).all(), name
