"""Training with static inputs: gradients equal PyTorch, converted integers equal training."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.research.qat.job import convert, prepare
from jaxllm.research.static_inputs.qat import StaticFakeQuantWeight, add_observed_grids, qat
from jaxllm.research.static_inputs.weight import add_input_grid, supports_input_grid
from jaxllm.train.partition import partition
from jaxllm.weights.formats import parse_format
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.precision import Precision, cast
from jaxllm.weights.quantize import quantize
from tests.compress.models import same
from tests.research.qat.test_qat import (
    MIXED,
    ONE_LAYER,
    assert_converted_bits_equal,
    assert_gradients_equal_torch,
    numbers,
)
from tests.tiny_models import random_model


def calibrated(params: Params) -> Params:
    """Return integers as calibration would: those of int8 get a grid of inputs."""

    def change(_: str, leaf: Any) -> Any:
        fits = supports_input_grid(getattr(leaf, "int_format", None))
        return add_input_grid(leaf, 0.03, -7) if fits else leaf

    return map_leaves(change, quantize(params, MIXED))


def test_static_linear_gradients_equal_torch() -> None:
    """Gradients to inputs, weights, scales and the step of the inputs equal torch."""
    w, to = jnp.asarray(numbers(5, 128)), parse_format("int8-g64")
    leaf: Any = StaticFakeQuantWeight(
        w, to.quantize(w).scale * 0.8, None,
        target_format=to, step=jnp.float32(0.011), middle=jnp.int32(5), learns_step=True,
    )  # fmt: skip
    assert_gradients_equal_torch(leaf, 0.011, 5.0)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("gpt2", "bfloat16")])
def test_converted_static_model_equals_forward_bitwise(family: str, dtype: str) -> None:
    """Converted at once, the weights are the observed ones; trained ones give the same logits."""
    learned = dtype == "bfloat16"
    precision = dataclasses.replace(Precision.uniform(dtype), int8_inputs=not learned)
    model, params = random_model(family, precision=precision, **ONE_LAYER[family])
    params = cast(params, precision)
    observed = calibrated(params)
    fake = prepare(params, MIXED, learn_scales=learned, dynamic_inputs=not learned)
    fake = add_observed_grids(fake, observed, learned)
    same(convert(fake), observed)
    assert any(path.endswith(".step") for path in partition(fake)[0]) == learned
    assert "static/int8" in assert_converted_bits_equal(model, fake, exact=True)


def test_job_trains_and_saves_static_inputs(tmp_path: Path) -> None:
    """A job begins at the observed model, and its result has the grids."""
    model, params = random_model("llama", num_hidden_layers=1)
    lm, observed = LM(model.config, model, params, None, {}, tmp_path), calibrated(params)
    job = qat(lm, MIXED, observed, dtype="bfloat16", learn_input_scales=True)
    assert job.compute_params is not None
    job.finish(job.params, tmp_path / "out")
    same(jaxllm.load(tmp_path / "out").params, observed)
    trained = partition(job.params, compute_params=job.compute_params)[0]
    name = "layers.0.mlp.down_proj.weight.step"
    np.testing.assert_array_equal(trained[name], np.float32(0.03))
    with pytest.raises(ConfigError, match="no input ranges were observed"):
        qat(lm, MIXED, params)
