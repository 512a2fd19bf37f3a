"""Non-finite numbers: the scan finds the first."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from jaxllm.weights import safetensors
from jaxllm.weights.safetensors import first_non_finite

FORMATS = (np.float32, np.float16, np.float64, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("block", [7, 1 << 17])
def test_first_non_finite_finds_first_index(
    dtype: type, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first inf or NaN is found in every dtype and block size."""
    monkeypatch.setattr(safetensors, "SCAN_BLOCK", block)
    largest = ml_dtypes.finfo(dtype).max
    clean = np.random.default_rng(0).standard_normal(77).astype(dtype)
    clean[:4] = largest, -largest, dtype(0), -dtype(0)
    assert first_non_finite(clean) is None
    for bad, at in itertools.product((np.inf, -np.inf, np.nan, -np.nan), (0, 6, 7, 76)):
        spoilt = clean.copy()
        spoilt[at:] = bad
        assert first_non_finite(spoilt.reshape(7, 11)) == at
