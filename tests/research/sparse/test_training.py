"""Training sparse weights: the stored values train, and the pattern stays."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.research.pruning.magnitude import prune_magnitude
from jaxllm.research.pruning.sparsity import Sparsity
from jaxllm.research.sparse.weight import to_sparse
from jaxllm.train.constraints import KeepZeros
from jaxllm.train.partition import partition
from jaxllm.weights.linear import linear
from jaxllm.weights.quantize import quantize
from tests.train.test_constraints import (
    WEIGHT,
    assert_saved_in_formats,
    pruned_model,
    regress,
    rng_array,
)


@pytest.mark.parametrize("pattern", ["2:4", "bitmap"])
def test_sparse_weight_training_equals_dense_with_zeros(pattern: str) -> None:
    """Training the stored values gives the losses and weights of the dense matrix with
    fixed zeros.
    """
    dense = prune_magnitude(rng_array(24, 40), Sparsity(0.5, (2, 4)))
    sparse = to_sparse(dense, pattern)
    found, losses = regress(sparse)
    expected_weight, expected = regress(dense, KeepZeros((WEIGHT,)))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(found.mask, sparse.mask)
    np.testing.assert_allclose(found.to_dense(), expected_weight, atol=1e-4)


@pytest.mark.parametrize("pattern", ["2:4", "bitmap"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparse_linear_gradient_equals_dense(pattern: str, dtype: str) -> None:
    """d(sum of y * c)/dW = c^T x, where there are weights."""
    dense = prune_magnitude(rng_array(24, 40), Sparsity(0.5, (2, 4))).astype(dtype)
    leaf, x, c = to_sparse(dense, pattern), rng_array(5, 40, seed=1), rng_array(5, 24, seed=2)

    def total(values: jax.Array) -> jax.Array:
        return (linear(x.astype(dtype), leaf.replace(values=values)) * c).sum()

    gradient = jax.grad(total)(leaf.values)
    expected = np.asarray(c).T @ np.asarray(x.astype(dtype).astype("float32"))
    found = leaf.replace(values=gradient).to_dense("float32")
    expected_weight = np.where(np.asarray(dense, np.float32) == 0, 0, expected)
    np.testing.assert_allclose(found, expected_weight, atol=1e-5 if dtype == "float32" else 0.06)


def test_partition_refuses_trainable_sparse_integers() -> None:
    _, params = pruned_model()
    integers = quantize(params, [(r".*c_attn\.weight", "int8-bitmap")])
    with pytest.raises(ConfigError, match=r"h\.0\.attn\.c_attn\.weight is int8-bitmap"):
        partition(integers)
    trained, _ = partition(integers, ((r".*c_attn", False), (".*", True)))
    assert not any("c_attn.weight" in path for path in trained)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_sparse_weights_are_saved_in_their_formats(dtype: str, tmp_path: Path) -> None:
    formats = {"mlp.gate_proj": "float32-2:4", "mlp.up_proj": "float32-bitmap"}
    assert_saved_in_formats({**formats, "self_attn.o_proj": "int8"}, dtype, tmp_path)
