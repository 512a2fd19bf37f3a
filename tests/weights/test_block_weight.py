"""Weights in GGUF's blocks: the values, products and rows of the integer weights that they hold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.ops import native
from jaxllm.weights.formats import parse_format, to_dense, weight_format
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.linear import linear
from jaxllm.weights.types.block_weight import MAX_BYTES, BlockWeight, fits_in_place, map_blocks
from jaxllm.weights.types.int_weight import IntWeight
from tests.ops.samples import join_blocks

ROWS, COLUMNS, BEFORE = 7, 256, 32  # BEFORE: bytes of another tensor that precede the first row
apply = jax.jit(linear, static_argnames="int8_inputs")


def draw(bits: int, rows: int = ROWS) -> tuple[IntWeight, BlockWeight]:
    """Return a weight of random codes and scales, and the same in blocks."""
    rng = np.random.default_rng(bits)
    scale = rng.normal(0, 0.01, (rows, COLUMNS // 32)).astype(np.float16)
    data = rng.integers(0, 256, (rows, COLUMNS * bits // 8)).astype(np.uint8)
    plain = IntWeight(
        jnp.asarray(data.view(np.int8) if bits == 8 else data), jnp.asarray(scale), None, bits, 32,
        COLUMNS,
    )  # fmt: skip
    raw = np.concatenate([np.full(BEFORE, 77, np.uint8), join_blocks(scale, data).reshape(-1)])
    return plain, BlockWeight(jnp.asarray(raw), bits, COLUMNS)


@pytest.mark.parametrize("bits", [4, 8])
def test_block_weight_equals_int_weight(bits: int) -> None:
    """Values, arrays, rows and slices are those of the same weight with separate scales."""
    plain, blocks = draw(bits)
    assert blocks.shape == (ROWS, COLUMNS) and weight_format(blocks) == weight_format(plain)
    np.testing.assert_array_equal(to_dense(blocks), to_dense(plain))
    for name, array in plain.arrays().items():
        np.testing.assert_array_equal(blocks.arrays()[name], array)
    index = jnp.array([[6, 0], [3, 3]])
    np.testing.assert_array_equal(blocks.take(index), plain.take(index))
    assert np.isnan(np.asarray(blocks.take(jnp.array([-1, ROWS])))).all()
    halves = blocks.with_rows(np.arange(3)), blocks.with_rows(np.arange(3, ROWS))
    np.testing.assert_array_equal(to_dense(halves[0].concatenate([halves[1]], 0)), to_dense(plain))
    sides = blocks.with_columns(0, 128), blocks.with_columns(128, 256)
    np.testing.assert_array_equal(to_dense(sides[0].concatenate([sides[1]], 1)), to_dense(plain))
    np.testing.assert_array_equal(
        to_dense(blocks.concatenate([blocks], 0)), to_dense(plain.concatenate([plain], 0))
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_block_products_have_the_bits_of_int_weight(bits: int) -> None:
    """Products are bit for bit those of separate scales, by kernels and in plain JAX."""
    plain, blocks = draw(bits)
    rng = np.random.default_rng(1)
    for dtype, rows, int8 in (
        ("float32", 1, False), ("bfloat16", 5, False), ("bfloat16", 20, False),
        ("float32", 20, True),
    ):  # fmt: skip
        x = jnp.asarray(rng.normal(0, 1, (rows, COLUMNS)), dtype)
        for path in ("kernels", "plain JAX"):
            if path == "kernels":
                pair = [apply(x, weight, int8_inputs=int8) for weight in (plain, blocks)]
            else:
                with native.disable_kernels():
                    pair = [apply(x, weight, int8_inputs=int8) for weight in (plain, blocks)]
            np.testing.assert_array_equal(*pair, err_msg=f"{dtype} {rows} {int8} {path}")


def test_block_weight_has_gradients_for_inputs() -> None:
    """Adapters train over weights that are read in place."""
    plain, blocks = draw(4)
    x = jnp.asarray(np.random.default_rng(2).normal(0, 1, (3, COLUMNS)), jnp.float32)

    def loss(x: jax.Array, weight: Any) -> jax.Array:
        return jnp.square(linear(x, weight)).sum()

    slopes = [jax.jit(jax.grad(loss))(x, weight) for weight in (plain, blocks)]
    np.testing.assert_allclose(slopes[1], slopes[0], rtol=1e-5)


def test_map_blocks_refuses_nonfinite_scales() -> None:
    """A scale that is not finite is refused, unless the file is known to hold none."""
    _, blocks = draw(8)
    raw = np.asarray(blocks.data).copy()
    raw[BEFORE + 34 : BEFORE + 36] = np.array([np.inf], np.float16).view(np.uint8)
    arguments = "w", parse_format("int8-g32-f16"), (ROWS, COLUMNS), LazyTensor.from_array(raw)
    with pytest.raises(CheckpointError, match=r"w\.scale holds NaN or infinity"):
        map_blocks(*arguments, passed=False)
    assert map_blocks(*arguments, passed=True).shape == (ROWS, COLUMNS)


def test_blocks_fit_in_place_in_whole_chunks() -> None:
    """Rows of part of a chunk, stacks, and more bytes than indices reach are not read in place."""
    assert fits_in_place(4, (7, 256)) and fits_in_place(8, (1, 128))
    assert not any(fits_in_place(4, shape) for shape in ((7, 96), (7, 0), (2, 7, 128), (128,)))
    assert fits_in_place(8, (MAX_BYTES // 136 - 1, 128))
    assert not fits_in_place(8, (MAX_BYTES // 136, 128))
