"""Queries and keys whose rotary dimensions lie in pairs."""

from typing import Any

import numpy as np
import pytest

from jaxllm.convert.hf import read_config
from jaxllm.convert.rotary_pairs import PAIRED_QUERIES_AND_KEYS, paired_rows
from jaxllm.errors import CheckpointError
from jaxllm.weights.lazy import LazyTensor
from tests.tiny_models import theirs

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


def test_invalid_tensors_are_refused() -> None:
    """Packed words of GPTQ, whose rows cannot be sorted, and a wrong number of rows."""
    config: Any = read_config(theirs("glm4").to_dict())[0]
    tensor = LazyTensor.from_array(np.zeros((96, 3), np.float32))
    (same,) = QUERIES.split_tensor("layers.0.self_attn.q_proj.weight", tensor, config)
    assert same.shape == tensor.shape
    for layout, path, message in (
        (QUERIES, "layers.0.self_attn.q_proj.qweight", "quantized ones in the format of GPTQ"),
        (KEYS, "layers.0.self_attn.k_proj.weight", "config.json implies 24 rows"),
    ):
        with pytest.raises(CheckpointError, match=message):
            layout.split_tensor(path, tensor, config)
