"""Blocks of every type against the `gguf` package, bit for bit."""

import gguf
import numpy as np
import pytest

from jaxllm.convert.gguf.blocks import BLOCKS, BY_NAME, WRITTEN, Block

QUANTIZED = [block for block in BLOCKS.values() if block.dtype is None]


def theirs(block: Block) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(block.number)


def random_rows(block: Block, rows: int = 7, blocks: int = 5, seed: int = 0) -> np.ndarray:
    """Random bytes, their float16 finite: `[rows, row_bytes]`."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * blocks, block.nbytes), np.uint8)
    halves = {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2]}
    for at in halves.get(block.name, [0]):
        scale = rng.standard_normal((len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    return raw.reshape(rows, -1)


def test_the_table_has_the_sizes_of_the_package() -> None:
    for block in BLOCKS.values():
        assert block.name == theirs(block).name
        assert (block.columns, block.nbytes) == gguf.GGML_QUANT_SIZES[theirs(block)]


@pytest.mark.parametrize("block", QUANTIZED, ids=lambda block: block.name)
def test_random_blocks_are_dequantized_bit_for_bit(block: Block) -> None:
    raw = random_rows(block)
    expected = gguf.quants.dequantize(raw, theirs(block))
    ours = block.dequantized(raw)
    assert ours.dtype == np.float32 and ours.shape == expected.shape
    np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_quantized_bit_for_bit(name: str) -> None:
    rng, block = np.random.default_rng(1), BY_NAME[name]
    x = (rng.standard_normal((9, 96)) * np.exp2(rng.integers(-8, 8, (9, 96)))).astype(np.float32)
    x[0], x[1, :32], x[2, ::2] = 0, -x[1, :32], 0.5  # nothing but zeros, and halves of steps
    x[3] = np.arange(96) / 2 - 24
    expected = gguf.quants.quantize(x, theirs(block))
    np.testing.assert_array_equal(block.quantized(x), expected.view(np.uint8))
    np.testing.assert_array_equal(
        block.dequantized(block.quantized(x)), gguf.quants.dequantize(expected, theirs(block))
    )
