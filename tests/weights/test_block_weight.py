"""Weights in GGUF's blocks: the values, products and rows of the integer weights that they hold."""

from contextlib import nullcontext
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.ops import native
from jaxllm.weights.formats import parse_format, to_dense, weight_format
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.linear import linear, round_to_int8
from jaxllm.weights.types.block_weight import (
    BLOCK_TYPES,
    MAX_BYTES,
    BlockWeight,
    fits_in_place,
    map_blocks,
)
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
    return plain, BlockWeight(jnp.asarray(raw), f"Q{bits}_0", COLUMNS)


def draw_super(type: str) -> tuple[np.ndarray, BlockWeight]:
    """Return the float32 values, as ggml's package reads them, of random blocks, and these."""
    rng, size = np.random.default_rng(5), BLOCK_TYPES[type].nbytes
    raw = rng.integers(0, 256, (ROWS * 2, size), np.uint8)
    for at in [208] if type == "Q6_K" else [0, 2]:
        raw[:, at : at + 2] = rng.normal(0, 0.01, (len(raw), 1)).astype(np.float16).view(np.uint8)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])
    data = np.concatenate([np.full(BEFORE, 77, np.uint8), raw.reshape(-1)])
    return values.reshape(ROWS, 2 * COLUMNS), BlockWeight(jnp.asarray(data), type, 2 * COLUMNS)


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K", "Q6_K", "Q4_K split", "Q6_K split"])
def test_super_blocks_hold_ggml_values(type: str) -> None:
    """Dense values, rows, slices and what kernels dequantize have the bits of ggml's package, also
    of blocks that are split for a GPU's kernels, and those have the same files.
    """
    type, _, split = type.partition(" ")
    values, blocks = draw_super(type)
    if split:
        stored, blocks = blocks, blocks.split_bytes()
        np.testing.assert_array_equal(blocks.arrays()[".blocks"], stored.arrays()[".blocks"])
        assert blocks.nbytes == stored.nbytes - BEFORE and blocks.native_matrix() is None
    assert blocks.shape == values.shape
    np.testing.assert_array_equal(to_dense(blocks), values)
    np.testing.assert_array_equal(blocks.take(jnp.array([6, 0, 3])), values[[6, 0, 3]])
    assert np.isnan(np.asarray(blocks.take(jnp.array([-1, ROWS])))).all()
    cut = blocks.concatenate([blocks.with_rows(np.arange(2, 5)), blocks], 0)
    np.testing.assert_array_equal(to_dense(cut), np.concatenate([values, values[2:5], values]))
    cut = blocks.with_columns(256, 512).concatenate([blocks.with_columns(0, 256)], 1)
    np.testing.assert_array_equal(to_dense(cut), np.roll(values, 256, 1))
    assert weight_format(blocks) == type.lower()
    if native.is_enabled() and not split:
        dense = native.dequantize(blocks.native_matrix(), jnp.dtype("float32"), columns=512)
        np.testing.assert_array_equal(dense, values)


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K", "Q6_K"])
def test_super_block_products_equal_float64(type: str) -> None:
    """Products are those of ggml's values, by kernels and in plain JAX, also of rounded inputs and
    of codes; a vmap and a gradient too.
    """
    values, blocks = draw_super(type)
    rng = np.random.default_rng(1)
    for dtype, rows, int8 in (
        ("float32", 1, False), ("bfloat16", 5, False), ("float32", 20, False), ("float32", 5, True),
        ("int8", 5, False),
    ):  # fmt: skip
        some = rng.normal(0, 1, (rows, 512)) * (40 if dtype == "int8" else 1)
        x = jnp.asarray(some, dtype)
        near = np.asarray(round_to_int8(x, 32) if int8 else x, np.float64)
        bound = 2e-6 * (np.abs(near) @ np.abs(values).T)
        for path in (nullcontext, native.disable_kernels):
            with path():
                y = np.asarray(apply(x, blocks, int8_inputs=int8))
            assert (np.abs(y - near @ values.T) <= bound).all(), (dtype, rows, int8, path)
    x = jnp.asarray(rng.normal(0, 1, (3, 2, 512)), jnp.float32)
    np.testing.assert_allclose(
        jax.vmap(linear, (0, None))(x, blocks), np.asarray(x) @ values.T, atol=1e-3
    )
    slope = jax.grad(lambda x: linear(x, blocks).sum())(x[0])
    np.testing.assert_allclose(slope, np.tile(values.sum(0), (2, 1)), atol=1e-4)


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
    """Products are bit for bit those of separate scales, by kernels and in plain JAX; but with
    rounded inputs kernels may add blocks in another order.
    """
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
            close = {"rtol": 1e-5, "atol": 1e-5} if int8 and path == "kernels" else {"rtol": 0}
            np.testing.assert_allclose(*pair, **close, err_msg=f"{dtype} {rows} {int8} {path}")


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
    for blocks, at in (
        (draw(8)[1], 34), (draw_super("Q4_K")[1], 144 + 2), (draw_super("Q6_K")[1], 208),
    ):  # fmt: skip
        raw, format = np.asarray(blocks.data).copy(), parse_format(blocks.format)
        good = "w", format, blocks.shape, LazyTensor.from_array(raw.copy())
        assert map_blocks(*good, passed=False).shape == blocks.shape
        raw[BEFORE + at : BEFORE + at + 2] = np.array([np.inf], np.float16).view(np.uint8)
        arguments = "w", format, blocks.shape, LazyTensor.from_array(raw)
        with pytest.raises(CheckpointError, match=r"w\.scale holds NaN or infinity"):
            map_blocks(*arguments, passed=False)
        assert map_blocks(*arguments, passed=True).shape == blocks.shape


def test_blocks_fit_in_place_in_whole_chunks() -> None:
    """Rows of part of a chunk, stacks, and more bytes than indices reach are not read in place."""
    assert fits_in_place("Q4_0", (7, 256)) and fits_in_place("Q8_0", (1, 128))
    assert not any(fits_in_place("Q4_0", shape) for shape in ((7, 96), (7, 0), (2, 7, 128), (128,)))
    assert fits_in_place("Q8_0", (MAX_BYTES // 136 - 1, 128))
    assert not fits_in_place("Q8_0", (MAX_BYTES // 136, 128))
    assert fits_in_place("Q6_K", (7, 512)) and not fits_in_place("Q6_K", (7, 384))
    assert not fits_in_place("Q5_0", (7, 256)) and not fits_in_place("F32", (7, 256))
