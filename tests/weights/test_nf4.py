"""NF4: levels, double quantization, products, and saving."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.weights.formats import as_format, parse_format
from jaxllm.weights.linear import linear
from jaxllm.weights.types.nf4 import ABSMAX_BLOCK, BLOCK, DYNAMIC, LEVELS, Nf4Weight
from tests.weights.products import assert_products_equal

SHAPE = (7, 150)  # 1050 weights: 16 blocks and 26 weights; blocks continue across rows


def numbers(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.001, 0.02, shape).astype(np.float32)


def quantize_nf4(array: np.ndarray, name: str = "nf4") -> Nf4Weight:
    weight = as_format(jnp.asarray(array), name)
    assert isinstance(weight, Nf4Weight)
    return weight


def blocks(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1).astype(np.float64)
    return np.pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)


def codes(weight: Nf4Weight) -> np.ndarray:
    data = np.asarray(weight.data)
    return np.concatenate([data & 15, data >> 4], axis=-1)


def test_dynamic_map_equals_bitsandbytes() -> None:
    """Its ends and smallest levels are those that bitsandbytes.functional.create_dynamic_map
    prints.
    """
    assert len(set(DYNAMIC.tolist())) == 256
    np.testing.assert_allclose(DYNAMIC[:3], [-0.99296875, -0.97890625, -0.96484375], rtol=1e-6)
    np.testing.assert_allclose(DYNAMIC[-3:], [0.97890625, 0.99296875, 1.0], rtol=1e-6)
    least = [-3.25e-6, -5.5e-7, 0, 5.5e-7, 3.25e-6, 7.75e-6]
    np.testing.assert_allclose(DYNAMIC[125:131], least, rtol=1e-6)


@pytest.mark.parametrize("name", ["nf4", "nf4-f32"])
def test_nf4_codes_are_nearest_levels(name: str) -> None:
    """By brute force, each code is the nearest level of its block, and zeros stay zero."""
    array = numbers()
    array[2] = 0  # two blocks of zeros
    weight, values = quantize_nf4(array, name), blocks(array)
    absmax = np.abs(values).max(1, keepdims=True)
    distance = np.abs(values[..., None] / np.where(absmax == 0, 1, absmax)[..., None] - LEVELS)
    code = codes(weight)
    chosen = np.take_along_axis(distance, code[..., None].astype(int), -1)[..., 0]
    assert (chosen <= distance.min(-1) + 1e-7).all()
    assert (code[absmax[:, 0] == 0] == 7).all(), "zeros are zero"
    if name == "nf4-f32":
        by_hand = (np.asarray(LEVELS)[code] * absmax).reshape(-1)[: array.size]
        np.testing.assert_allclose(weight.to_dense(), by_hand.reshape(SHAPE), rtol=1e-6)


def test_nf4_double_quantization_equals_formula() -> None:
    """Mean, scale and codes of the block maxima follow the docstring's formula with
    nearest codes.
    """
    array = numbers((300, 64))  # 300 blocks: two of absmax
    weight = quantize_nf4(array)
    absmax = np.abs(blocks(array)).max(1)
    rest, scale = absmax - absmax.mean(), np.asarray(weight.scale, np.float64)
    np.testing.assert_allclose(weight.mean, absmax.mean(), rtol=1e-6)
    first, second = rest[:ABSMAX_BLOCK], rest[ABSMAX_BLOCK:]
    np.testing.assert_allclose(scale, [np.abs(first).max(), np.abs(second).max()], rtol=1e-5)
    distance = np.abs((rest / np.repeat(scale, ABSMAX_BLOCK)[:300])[:, None] - DYNAMIC[None])
    code = np.asarray(weight.absmax).astype(int)
    chosen = np.take_along_axis(distance, code[:, None], 1)[:, 0]
    assert (chosen <= distance.min(1) + 1e-5).all()
    decoded_absmax = DYNAMIC[code] * np.repeat(scale, ABSMAX_BLOCK)[:300] + absmax.mean()
    by_hand = np.asarray(LEVELS)[codes(weight)] * decoded_absmax[:, None]
    np.testing.assert_allclose(weight.to_dense(), by_hand, rtol=1e-4, atol=1e-8)
    assert np.abs(decoded_absmax / absmax - 1).max() < 0.02


def test_nf4_bits_per_weight_match_paper() -> None:
    """QLoRA, section 3: 0.5 bits of absmax become 8/64 + 32/(64 * 256) = 0.127."""
    weight = quantize_nf4(numbers((256, 256)))
    assert weight.nbytes * 8 / weight.size == 4 + 8 / 64 + 32 / (64 * 256) + 32 / 256**2
    assert quantize_nf4(numbers((256, 256)), "nf4-f32").nbytes * 8 == 4.5 * 256**2


def test_nf4_and_int4_errors_on_normal_weights() -> None:
    """Mean squared errors on N(0, 1) in blocks of 64, computed in float64, as in the table of
    METHODS, to 1 percent.
    """
    w = np.random.default_rng(0).normal(0, 1, (1024, 256)).astype(np.float32)

    def error(name: str, **scale: Any) -> float:
        return float(np.square(np.asarray(as_format(jnp.asarray(w), name).to_dense()) - w).mean())

    assert error("nf4-f32") == pytest.approx(0.00846, rel=0.01)
    assert error("nf4") == pytest.approx(0.00846, rel=0.015), "double quantization costs little"
    assert error("int4-g64") == pytest.approx(0.00903, rel=0.01), "Q4_0's: 8 steps below zero"
    assert error("int4-g64-zp") == pytest.approx(0.00830, rel=0.01)
    kind: Any = parse_format("int4-g64")
    grouped = jnp.asarray(w.reshape(1024, 4, 64))
    step = jnp.abs(grouped).max(-1) / 7  # the usual symmetric grid, which leaves one level unused
    middle = jnp.full(step.shape, 8, jnp.uint8)
    q = kind.to_codes(grouped, step[..., None], middle[..., None])
    symmetric = kind.from_codes(q.reshape(w.shape), step).to_dense()
    assert float(np.square(np.asarray(symmetric) - w).mean()) == pytest.approx(0.01161, rel=0.01)


@pytest.mark.parametrize(("name", "shape"), [("nf4", SHAPE), ("nf4-f32", (5, 192))])
def test_nf4_rows_and_products_equal_dense(name: str, shape: tuple[int, int]) -> None:
    weight = quantize_nf4(numbers(shape), name)
    dense = np.asarray(weight.to_dense())
    assert_products_equal(weight, dense, rows=(1, 17))
    half = jnp.asarray(numbers((17, shape[1]), 1) * 100).astype(jnp.bfloat16)
    exact = np.asarray(half.astype(jnp.float32)).astype(np.float64) @ dense.T
    np.testing.assert_allclose(linear(half, weight), exact, rtol=0.02, atol=0.02)


def test_nf4_gradient_reaches_only_inputs() -> None:
    weight, x = quantize_nf4(numbers()), jnp.asarray(numbers((3, SHAPE[1]), 1))

    def total(x: jax.Array, mean: jax.Array) -> jax.Array:
        return linear(x, weight.replace(mean=mean)).sum()

    assert weight.mean is not None
    to_x, to_mean = jax.grad(total, argnums=(0, 1))(x, weight.mean)
    expected = np.broadcast_to(np.asarray(weight.to_dense()).sum(0), x.shape)
    np.testing.assert_allclose(to_x, expected, rtol=1e-5, atol=1e-6)
    assert to_mean == 0
