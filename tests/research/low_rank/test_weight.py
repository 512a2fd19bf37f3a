"""Low-rank weights: optimal approximation, products with the factors, saving and loading."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.checkpoints.native import load_params, open_native
from jaxllm.errors import CheckpointError, ConfigError, JaxllmError
from jaxllm.research.low_rank.weight import LowRankWeight
from jaxllm.weights.formats import as_format, parse_format, to_dense, weight_format
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.linear import embed, linear
from jaxllm.weights.safetensors import open_tensors, write_tensors
from tests.tiny_models import assert_close, random_model, tokens
from tests.weights.products import plain_product

ROWS, COLUMNS, K = 37, 29, 11  # coprime


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, (ROWS, COLUMNS)).astype(np.float32)


def test_low_rank_error_equals_truncated_spectrum(matrix: np.ndarray) -> None:
    """Eckart and Young: the error is the root of the sum of the squared omitted singular values;
    the factors are balanced.
    """
    made: Any = as_format(jnp.asarray(matrix), f"rank{K}/float32")
    assert (made.shape, made.rank, made.format) == ((ROWS, COLUMNS), K, f"rank{K}/float32")
    assert made.nbytes == 4 * K * (ROWS + COLUMNS)
    sigma = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    left, right = (np.asarray(x, np.float64) for x in (made.left, made.right))
    error = np.linalg.norm(matrix - left @ right)
    np.testing.assert_allclose(error, np.sqrt((sigma[K:] ** 2).sum()), rtol=1e-6)
    np.testing.assert_allclose(left.T @ left, np.diag(sigma[:K]), atol=1e-5)  # balanced
    np.testing.assert_allclose(right @ right.T, np.diag(sigma[:K]), atol=1e-5)


@pytest.mark.parametrize(
    ("inner", "rows"),
    [("float32", 1), ("bfloat16", 70), ("bf16-packed", 70), ("int8", 1), ("int4-g32-zp", 70)],
)
def test_low_rank_products_and_rows_equal_factors(
    matrix: np.ndarray, inner: str, rows: int
) -> None:
    made: Any = as_format(jnp.asarray(matrix), f"rank{K}/{inner}")
    assert weight_format(made.left) == weight_format(made.right) == parse_format(inner).name
    x_RI = np.random.default_rng(1).normal(0, 1, (rows, COLUMNS)).astype(np.float32)
    left, right = (
        np.asarray(to_dense(x, jnp.float32), np.float64) for x in (made.left, made.right)
    )
    assert_close(linear(jnp.asarray(x_RI), made), x_RI @ right.T @ left.T)
    assert_close(plain_product(jnp.asarray(x_RI), made), x_RI @ right.T @ left.T)
    assert_close(made.to_dense(), left @ right)
    token_BT = jnp.array([[0, ROWS - 1], [5, ROWS]])
    taken = np.asarray(embed(made, token_BT))
    assert_close(taken[0], (left @ right)[[0, ROWS - 1]])
    assert np.isnan(taken[1, 1]).all() and not np.isnan(taken[1, 0]).any()


def test_low_rank_gradients_reach_inputs_and_factors(matrix: np.ndarray) -> None:
    made: Any = as_format(jnp.asarray(matrix), f"rank{K}/float32")
    x_RI = jnp.asarray(np.random.default_rng(2).normal(0, 1, (5, COLUMNS)).astype(np.float32))
    cotangent_RO = np.random.default_rng(3).normal(0, 1, (5, ROWS)).astype(np.float32)

    def loss(x_RI: jax.Array, weight: Any) -> jax.Array:
        return (linear(x_RI, weight) * cotangent_RO).sum()

    for x, weight in (jax.jit(jax.grad(loss, argnums=(0, 1)))(x_RI, made),):
        assert_close(x, cotangent_RO @ np.asarray(made.left) @ np.asarray(made.right))
        assert isinstance(weight, LowRankWeight)
        assert_close(weight.left, cotangent_RO.T @ np.asarray(x_RI) @ np.asarray(made.right).T)
        assert_close(weight.right, np.asarray(made.left).T @ cotangent_RO.T @ np.asarray(x_RI))


def test_low_rank_model_equals_dequantized_model() -> None:
    model, params = random_model("llama", num_hidden_layers=1)
    rules = [(r".*(q|o)_proj\.weight", "rank9/float32"), (r".*up_proj.*", "rank13/int8")]
    made = jaxllm.quantize(params, rules)
    assert weight_format(made["layers.0"]["mlp"]["up_proj"]["weight"]) == "rank13/int8"
    token_BT = tokens(2, 24)
    theirs = jaxllm.forward(model, jaxllm.dequantize(made), None, token_BT).logits
    assert_close(jaxllm.forward(model, made, None, token_BT).logits, np.asarray(theirs))
    assert np.abs(theirs - jaxllm.forward(model, params, None, token_BT).logits).max() > 0.05


def test_invalid_ranks_are_refused(tmp_path: Path, shallow: Any) -> None:
    """Ranks that are zero, too large, misspelled or different from the checkpoint's tensors are
    refused.
    """
    with pytest.raises(ConfigError, match="rank must be at least 1"):
        parse_format("rank0/int8")
    with pytest.raises(ConfigError, match="format of the factors must be simple"):
        parse_format("rank8/rank4/int8")
    with pytest.raises(ConfigError, match="got float32 and int8"):
        weight_format(LowRankWeight(jnp.ones((4, 2)), as_format(jnp.ones((2, 3)), "int8")))
    for unknown in (
        "rank8",
        "rank8/",
        "rank-1/int8",
        "rank08/int8",
        "rank8/int7",
        "rank9999999/int8",
    ):
        with pytest.raises(ConfigError, match="weight format"):
            parse_format(f"rank{unknown}")
    with pytest.raises(ConfigError, match=rf"rank30/int8: rank 30 exceeds {COLUMNS}"):
        as_format(jnp.ones((ROWS, COLUMNS)), "rank30/int8")

    lm = jaxllm.load(shallow("llama"), quantize=[(r".*up_proj\.weight", "rank20/float32")])
    lm.save(tmp_path / "made")
    settings = json.loads((tmp_path / "made" / "config.json").read_text())
    path = "layers.1.mlp.up_proj.weight"
    settings["formats"][path] = "rank21/float32"
    (tmp_path / "made" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"up_proj.weight.left has shape \(384, 20\)"):
        open_native(tmp_path / "made")
    settings["formats"][path] = "rank200/float32"  # in the file too
    (tmp_path / "made" / "config.json").write_text(json.dumps(settings))
    file = tmp_path / "made" / "model.safetensors"
    tensors = {name: tensor.read() for name, tensor in open_tensors(file).items()}
    tensors[f"{path}.left"] = np.zeros((384, 200), np.float32)
    tensors[f"{path}.right"] = np.zeros((200, 128), np.float32)
    write_tensors(file, {name: LazyTensor.from_array(x) for name, x in tensors.items()})
    with pytest.raises(JaxllmError, match=r"layers.1.mlp.up_proj.weight: rank 200 exceeds 128"):
        load_params(open_native(tmp_path / "made"), lm.model.precision)


def test_low_rank_of_nan_matrix_is_nan() -> None:
    made = as_format(jnp.full((4, 3), jnp.nan), "rank2/float32")
    assert np.isnan(np.asarray(to_dense(made))).all()
