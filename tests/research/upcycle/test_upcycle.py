"""Sparse upcycling: a mixture that equals its dense model, and the command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm import models
from jaxllm.errors import ConfigError
from jaxllm.research.upcycle.model import upcycle_model
from jaxllm.weights.paths import flatten
from jaxllm.weights.quantize import quantize
from tests.tiny_models import random_model, tokens
from tests.train.test_moe_training import lm_of

FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("family", "format"),
    [("llama", "float32"), pytest.param("llama", "int4", marks=FULL),
     pytest.param("qwen3", "int8", marks=FULL)],
)  # fmt: skip
def test_upcycled_model_equals_dense_model(family: str, format: str) -> None:
    """Expert weights of a token add up to 1 except for rounding, so logits agree to 1e-6; dense and
    expert rows may use different kernels.
    """
    model, params = random_model(family, num_hidden_layers=1)
    ids, some = tokens(2, 17), quantize(params, format)
    dense = logits(model, some, ids)
    mixture = upcycle_model(lm_of(model, some), 5, 2, seed=3)
    mixed = logits(mixture.model, mixture.params, ids)
    single_expert = upcycle_model(lm_of(model, some), 5, 1)
    one = logits(single_expert.model, single_expert.params, ids)
    for routed in (mixed, one):
        np.testing.assert_allclose(routed, dense, rtol=0, atol=1e-6 * np.abs(dense).max())
    expected = models.param_shapes(mixture.model)
    assert [p for p, _ in flatten(mixture.params)] == [p for p, _ in flatten(expected)]
    again = upcycle_model(lm_of(model, some), 5, 2, seed=3)
    router, same = (x.params["layers.0"]["mlp"]["gate"]["weight"] for x in (mixture, again))
    np.testing.assert_array_equal(same, router)


def logits(model: Any, params: Any, ids: np.ndarray) -> np.ndarray:
    return np.asarray(jaxllm.forward(model, params, None, ids).logits)


def test_upcycle_refuses_unsupported_models() -> None:
    for family, changes, experts, message in (
        ("gpt2", {}, 4, "a gpt2 cannot be upcycled"),
        ("llama", {"mlp_bias": True}, 4, "Mixtral does not support biases"),
        ("llama", {}, 1, r"num_experts_per_tok \(2\) exceeds num_experts \(1\)"),
    ):
        model, params = random_model(family, **changes)
        with pytest.raises(ConfigError, match=message):
            upcycle_model(lm_of(model, params), experts, 2)


@pytest.mark.usefixtures("demo_names")
def test_upcycle_command_and_info_count_active_parameters(run: Any, tmp_path: Path) -> None:
    """The upcycle command writes a mixture with the tokenizer, and info counts its parameters in
    total and per token.
    """
    mixture = tmp_path / "made"
    status, _, err = run("upcycle", "demo:llama", mixture, "--experts", 3)
    assert (status, "mixtral with 3 experts, 2 per token" in err) == (0, True), err
    assert jaxllm.load(mixture).tokenizer is not None
    status, printed, err = run("info", mixture, "--json")
    assert status == 0, err
    facts, dense = json.loads(printed), json.loads(run("info", "demo:llama", "--json")[1])
    mlp = 3 * dense["hidden_size"] * dense["intermediate_size"]  # per expert
    routers = 3 * dense["hidden_size"]
    layers = dense["num_hidden_layers"]
    assert facts["parameters"] == dense["parameters"] + layers * (2 * mlp + routers)
    assert facts["parameters_per_token"] == dense["parameters"] + layers * (mlp + routers)
    assert facts["bytes"] == 4 * facts["parameters"] * (1 if facts["dtype"] == "float32" else 0.5)
    assert "parameters_per_token" not in dense
