"""Frozen weights: equal losses, and gradients only for the trained parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.adapters import LoraConfig, attach_new_lora
from jaxllm.train.objective import NextToken
from jaxllm.train.partition import combine, partition
from jaxllm.train.step import FrozenWeight, freeze_params
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision, cast
from jaxllm.weights.quantize import quantize
from tests.tiny_models import random_model
from tests.train.test_step import BATCHES, KEY

ADAPTERS = ((r".*\.weight\.(a|b)", True),)


@pytest.mark.parametrize(
    ("dtype", "format"), [("float32", None), ("float32", "nf4"), ("bfloat16", "int4")]
)
def test_frozen_weights_keep_loss_and_gradients(dtype: str, format: str | None) -> None:
    """With frozen dense, nf4 or int4 weights, the loss is identical and the adapter gradients equal
    those without freezing.
    """
    model, params = random_model("llama", num_hidden_layers=1)
    precision = Precision.uniform(dtype)
    model, params = model.clone(precision=precision), cast(params, precision)
    params = params if format is None else quantize(params, format)
    lora = LoraConfig(r=2, target_modules=("q_proj", "down_proj"))
    trained, rest = partition(attach_new_lora(model.config, params, lora, KEY), ADAPTERS)
    trained = {
        path: 0.1 * jax.random.normal(jax.random.fold_in(KEY, n), x.shape)
        for n, (path, x) in enumerate(sorted(trained.items()))
    }

    def gradients(rest: Any) -> Any:
        def loss(trained: Any) -> jax.Array:
            return NextToken()(model, combine(trained, rest), None, BATCHES[0], KEY).total

        return jax.jit(jax.value_and_grad(loss))(trained)

    frozen_rest = freeze_params(rest)
    kinds = {path: type(leaf) for path, leaf in flatten(frozen_rest)}
    assert kinds["layers.0.mlp.up_proj.weight"] is FrozenWeight
    assert kinds["norm.weight"] is not FrozenWeight
    expected, found = gradients(rest), gradients(frozen_rest)
    assert float(found[0]) == float(expected[0])
    for path, gradient in expected[1].items():
        scale = float(jnp.abs(gradient).max())
        near = 1e-5 if dtype == "float32" else 0.05  # the gradient product is in bfloat16
        np.testing.assert_allclose(found[1][path], gradient, atol=near * scale, err_msg=path)


def test_freeze_params_skips_trained_and_small_weights() -> None:
    """Trained weights and norms stay as they are; every other matrix becomes a FrozenWeight."""
    _, params = random_model("llama", num_hidden_layers=1)
    _, rest = partition(params, ((r"layers\.0\.mlp", True),))
    kinds = {path: isinstance(leaf, FrozenWeight) for path, leaf in flatten(freeze_params(rest))}
    assert not any(kinds[path] for path in kinds if ".mlp." in path or "norm" in path)
    assert kinds["lm_head.weight"]
    assert kinds["layers.0.self_attn.q_proj.weight"]
