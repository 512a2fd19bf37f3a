"""NF4's kernel through XLA: scales, products, memory, and a model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.ops import native
from jaxllm.weights.formats import as_format, weight_format
from jaxllm.weights.linear import linear
from jaxllm.weights.paths import flatten
from jaxllm.weights.types.nf4 import DYNAMIC

pytestmark = pytest.mark.usefixtures("kernels")


def quantized(rows: int, columns: int, name: str = "nf4") -> Any:
    numbers = np.random.default_rng(0).normal(0.001, 0.02, (rows, columns))
    return as_format(jnp.asarray(numbers.astype(np.float32)), name)


def test_nf4_scales_are_rounded_once(isa: str) -> None:
    """Where all codes are of level 1, the kernel returns the scales: the float64 formula rounded to
    float32, bit for bit, also where a factor's 256 scales end within a row.
    """
    weight = quantized(11, 64 * 50)
    assert weight.scale.shape == (3,)
    ones = weight.replace(data=jnp.full_like(weight.data, 255)).native_matrix()
    factor = np.repeat(np.asarray(weight.scale, np.float64), 256)[: 11 * 50]
    exact = DYNAMIC.astype(np.float64)[np.asarray(weight.absmax)] * factor + np.float64(weight.mean)
    dense = native.dequantize(ones, jnp.dtype(jnp.float32), columns=64 * 50)
    blocks = np.asarray(dense).reshape(11 * 50, 64)
    np.testing.assert_array_equal(blocks, np.tile(exact.astype(np.float32)[:, None], 64))
    (y,) = native.linear(jnp.ones((1, 64 * 50)), [ones], columns=64 * 50)
    np.testing.assert_allclose(y[0], blocks.astype(np.float64).sum(1).reshape(11, 50).sum(1), 1e-6)


@pytest.mark.parametrize("name", ["nf4", "nf4-f32"])
def test_nf4_products_equal_dense_weights(name: str) -> None:
    """Products of few and many rows, by the kernel and by dequantized weights, are those of the
    dense weights; rows that share blocks have no kernel.
    """
    weight, rng = quantized(33, 192, name), np.random.default_rng(1)
    with native.disable_kernels():
        dense = np.asarray(weight.to_dense(), np.float64)
    assert "jaxllm_linear" in jax.jit(linear).lower(jnp.ones((1, 192)), weight).as_text()
    for rows, dtype in ((1, "float32"), (5, "bfloat16"), (16, "bfloat16"), (40, "float32")):
        x = jnp.asarray(rng.normal(0, 1, (rows, 192)), dtype)
        wide = np.asarray(x.astype(jnp.float32), np.float64)
        bound = 1e-6 * np.abs(wide) @ np.abs(dense).T
        assert (np.abs(jax.jit(linear)(x, weight) - wide @ dense.T) <= bound).all(), (rows, dtype)
    with native.use_one_path(True):
        many, one = (np.asarray(jax.jit(linear)(x[:rows], weight)) for rows in (40, 1))
    assert many[:1].tobytes() == one.tobytes()
    assert quantized(33, 200, name).native_matrix() is None


def test_nf4_steps_hold_no_dequantized_weights() -> None:
    """A loop of steps over layers takes less temporary memory than one layer's codes."""
    weights = [quantized(512, 512) for _ in range(4)]

    def run(x: jax.Array, weights: list[Any]) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for weight in weights:
                x = linear(x, weight).astype(x.dtype)
            return x, None

        return jax.lax.scan(step, x, length=3)[0]

    compiled = jax.jit(run).lower(jnp.ones((1, 512), jnp.bfloat16), weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < weights[0].data.nbytes / 4


def test_nf4_model_equals_its_dequantized_model() -> None:
    lm = jaxllm.load("demo:llama", dtype="float32", quantize="nf4")
    some = [leaf for _, leaf in flatten(lm.params) if weight_format(leaf) == "nf4"]
    assert some and all(leaf.native_matrix() is not None for leaf in some)
    ids = np.random.default_rng(2).integers(0, lm.config.vocab_size, (2, 9)).astype(np.int32)
    dense = jaxllm.dequantize(lm.params)
    ours, plain = (jaxllm.forward(lm.model, p, None, ids).logits for p in (lm.params, dense))
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)
