"""Parts of the recurrent layers' arithmetic; the layers themselves are compared in tests/models."""

import numpy as np
import pytest

from jaxllm.ops.recurrent import CHUNK, _invert_unit_lower


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, CHUNK])
def test_an_inverse_of_equal_keys_does_not_cancel(size: int) -> None:
    """Of A = all ones, whose powers grow like binomials, and of random A."""
    ones = np.tril(np.ones((size, size)), -1)
    random = np.tril(np.random.default_rng(size).uniform(-1, 1, (size, size)), -1)
    lower = np.stack([ones, random])[None].astype(np.float32)
    want = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    error = np.abs(np.asarray(_invert_unit_lower(lower)) - want)
    assert (error <= 1e-6 * np.abs(want).max(axis=(-2, -1), keepdims=True)).all()
