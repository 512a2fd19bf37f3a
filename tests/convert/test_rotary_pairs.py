"""Queries and keys whose rotary dimensions lie in pairs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.convert.hf import read_config
from jaxllm.convert.rotary_pairs import PAIRED_QUERIES_AND_KEYS, paired_rows
from jaxllm.errors import CheckpointError
from jaxllm.weights.lazy import LazyTensor
from tests.conftest import Run
from tests.tiny_models import save_random, theirs, tokens

QUERIES, KEYS = PAIRED_QUERIES_AND_KEYS


@pytest.mark.parametrize(("first", "width"), [(0, 8), (0, 4), (3, 6)])
def test_halves_rotate_as_pairs_do(first: int, width: int) -> None:
    """A head in the file's order, whose pairs are rotated, has the numbers of ours, whose halves
    are, with all numbers outside of the rotated ones in place.
    """
    size, heads = 10, 3
    rows = paired_rows(heads, size, first, width)
    head_NH = np.random.default_rng(0).standard_normal((heads, size))
    turn = np.exp(1j * np.arange(1, width // 2 + 1))  # an angle for each pair
    pairs = head_NH.copy()
    z = (pairs[:, first : first + width : 2] + 1j * pairs[:, first + 1 : first + width : 2]) * turn
    pairs[:, first : first + width : 2], pairs[:, first + 1 : first + width : 2] = z.real, z.imag
    ours = head_NH.reshape(-1)[rows].reshape(heads, size)
    half = first + width // 2
    z = (ours[:, first:half] + 1j * ours[:, half : first + width]) * turn
    ours[:, first:half], ours[:, half : first + width] = z.real, z.imag
    np.testing.assert_allclose(ours, pairs.reshape(-1)[rows].reshape(heads, size))


def test_wrong_number_of_rows_is_refused() -> None:
    config: Any = read_config(theirs("glm4").to_dict())[0]
    tensor = LazyTensor.from_array(np.zeros((96, 3), np.float32))
    (same,) = QUERIES.split_tensor("layers.0.self_attn.q_proj.weight", tensor, config)
    assert same.shape == tensor.shape
    with pytest.raises(CheckpointError, match=r"config\.json implies 24 rows"):
        KEYS.split_tensor("layers.0.self_attn.k_proj.weight", tensor, config)


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_exported_integers_load_in_our_order(method: str, tmp_path: Path, run: Run) -> None:
    """Integers, whose words hold several rows, give the same logits after a round trip."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    save_random(tmp_path / "a", "ernie4_5", head_dim=32, num_hidden_layers=1, **sizes)
    lm = jaxllm.load(tmp_path / "a", quantize=[(r".*proj\.weight", "int4-g32-zp")])
    lm.save(tmp_path / "own")
    flags = ("--to-hf", "--keep-quantized", method)
    assert run("convert", tmp_path / "own", tmp_path / "hf", *flags)[0] == 0
    again, ids = jaxllm.load(tmp_path / "hf"), tokens(1, 9)
    ours, theirs = (jaxllm.forward(x.model, x.params, None, ids).logits for x in (lm, again))
    np.testing.assert_array_equal(ours, theirs)
