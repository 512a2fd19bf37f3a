"""The C++ kernels, on every instruction set that this machine runs, against float64."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import ops
from jaxllm.errors import ConfigError
from jaxllm.ops import native
from jaxllm.weights.formats import as_format, dense
from jaxllm.weights.linear import linear

FORMATS = [
    "float32", "bfloat16", "float16", "bf16-packed", "int8", "int8-g32", "int8-g64-f16",
    "int8-g128", "int4-g32", "int4-g64", "int4-g128-zp", "int4-g32-zp-f16",
]  # fmt: skip
# Output rows and columns: one, odd, a tile and a rest, groups and chunks that do not divide.
SHAPES = [(1, 1), (7, 100), (33, 200), (130, 384)]
ROWS = (1, 2, 3, 5, 16)
INSTRUCTION_SETS = ("portable", "avx2", "avx512")

apply = jax.jit(linear, static_argnames="int8_inputs")


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    if native.isa() is None:
        pytest.skip("jaxllm is installed without its native kernels")
    before = native.isa()
    yield
    native.isa(before)


def each_isa() -> Iterator[str]:
    """Takes one instruction set after the other, leaving out what the machine has not."""
    for name in INSTRUCTION_SETS:
        try:
            native.isa(name)
        except ConfigError:
            continue
        yield name


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


@pytest.mark.parametrize("name", ["int8", "int8-g32", "int4-g64", "int4-g32-zp"])
def test_int8_inputs_are_rounded_in_blocks_of_128(name: str) -> None:
    rng = np.random.default_rng(2)
    weight = matrix(rng, (40, 300), name)
    x = rng.normal(0, 1, (3, 300)).astype(np.float32)
    rounded = np.zeros_like(x)
    for r, begin in itertools.product(range(3), range(0, 300, 128)):
        block = x[r, begin : begin + 128]
        step = np.abs(block).max() / 127
        rounded[r, begin : begin + 128] = np.round(block / step) * step
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


def brute_force(
    q: np.ndarray, at: np.ndarray, parts: Any, scale: float, window: int | None
) -> np.ndarray:
    """Softmax attention, one query and head at a time, in float64."""
    B, T, N, H = q.shape
    out = np.zeros((B, T, N, H))
    for b, t, n in itertools.product(range(B), range(T), range(N)):
        scores, values = [], []
        for part in parts:
            k, v, position = (x[b if x.shape[0] == B else 0] for x in part)
            for s, p in enumerate(position):
                if 0 <= p <= at[b, t] and (window is None or at[b, t] - p < window):
                    head = n // (N // k.shape[1])
                    scores.append(scale * q[b, t, n].astype(np.float64) @ k[s, head])
                    values.append(v[s, head])
        if scores:
            weights = np.exp(np.array(scores) - max(scores))
            out[b, t, n] = weights @ np.array(values) / weights.sum()
    return out


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "float16", "int8"])
def test_attention_reads_the_cache_in_place(kept: str) -> None:
    rng = np.random.default_rng(6)
    for B, T, N, K, H, S, window in (
        (1, 1, 4, 2, 20, 90, None),
        (3, 1, 4, 4, 16, 30, 7),
        (2, 5, 6, 2, 16, 70, None),
    ):

        def part(
            rows: int, slots: int, places: int | None = None, K: int = K, H: int = H
        ) -> ops.Part:
            x = rng.normal(0, 1, (2, rows, slots, K, H)).astype(np.float32)
            used = rng.random((places or rows, slots)) < 0.7
            position = np.where(used, rng.integers(0, 60, slots), -1)
            if places is None:
                x[:, ~used] = np.nan  # what an empty slot holds is nobody's business
            k, v = (ops.keep_as(jnp.asarray(a), jnp.dtype(kept)) for a in x)
            return ops.Part(k, v, jnp.asarray(position.astype(np.int32)))

        # Shared by all rows; seen differently by each; every row's own; the new tokens.
        parts = [part(1, S), part(1, 20, B), part(B, 40), part(B, T)]
        parts.append(part(B, 30, B)._replace(v_BSKH=part(1, 30, B).v_BSKH))  # keys of their own
        q = rng.normal(0, 1, (B, T, N, H)).astype(np.float32)
        at = rng.integers(-1, 60, (B, T)).astype(np.int32)
        plain = [
            (*(np.asarray(ops.dense(x).astype(jnp.float32)) for x in p[:2]), np.asarray(p[2]))
            for p in parts
        ]
        expected = brute_force(q, at, plain, 0.3, window)
        attend = jax.jit(partial(ops.attend, scale=0.3, window=window))
        for isa in each_isa():
            out = attend(jnp.asarray(q), jnp.asarray(at), parts)[0]
            np.testing.assert_allclose(out, expected, atol=5e-6, err_msg=isa)
            bad = jnp.asarray(q).at[0, 0, 0, 0].set(jnp.nan)
            out = np.asarray(attend(bad, jnp.asarray(at), parts)[0])
            assert np.isnan(out[0, 0, 0]).all() or at[0, 0] < 0
            np.testing.assert_allclose(out[0, 0, 1], expected[0, 0, 1], atol=5e-6)
