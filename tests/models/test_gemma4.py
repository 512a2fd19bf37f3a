"""Gemma 4 with experts beside the MLP, and values that are the projections of the keys."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxllm
from jaxllm.compress.calibration import from_tokens
from jaxllm.compress.pipeline import compress
from jaxllm.convert.hf import open_hf, write_hf
from jaxllm.errors import ConfigError
from jaxllm.evaluate.parity.activations import JaxBackend, pad_case
from jaxllm.evaluate.parity.compare import verify
from jaxllm.evaluate.parity.transformers_backend import TransformersBackend
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.quantize import quantize
from jaxllm.weights.safetensors import open_tensors
from jaxllm.weights.types.base import WeightBase
from tests.compress.models import tiny
from tests.tiny_models import Twin, assert_close, make_twin, tokens

EXPERTS = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
TEXTS = [tokens(1, 9)[0].tolist(), tokens(1, 6, 1)[0].tolist()]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    yield make_twin(tmp_path_factory.mktemp("gemma4"), "gemma4_text", layers=2, **EXPERTS)


def test_stages_equal_transformers(twin: Twin) -> None:
    ours = JaxBackend("ours", twin.model, twin.params)
    theirs = TransformersBackend.load(twin.directory)
    report = verify(ours, theirs, pad_case(TEXTS), new_tokens=12)
    assert report.holds, report.first
    routers = [stage.name for stage in report.stages if stage.name.endswith("moe.proj")]
    assert routers == ["layers.0.moe.proj", "layers.1.moe.proj"]


def test_files_round_trip(twin: Twin, tmp_path: Path) -> None:
    """Stacks of experts are written as they were read, gate and up in one."""
    opened = open_hf(twin.directory)
    write_hf(tmp_path, opened)
    before, after = (open_tensors(d / "model.safetensors") for d in (twin.directory, tmp_path))
    assert before["model.layers.1.experts.gate_up_proj"].shape == (6, 64, 40)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor.read(), after[name].read())
    assert open_hf(tmp_path).config == opened.config


def test_quantized_experts_equal_their_floats(twin: Twin) -> None:
    params = quantize(twin.params, "int8")
    assert not isinstance(params["layers.0"]["moe"]["proj"]["weight"], WeightBase)  # the router
    floats = map_leaves(lambda _, leaf: getattr(leaf, "to_dense", lambda: leaf)(), params)
    ids = tokens(1, 9)
    found, exact = (jaxllm.forward(twin.model, p, None, ids).logits for p in (params, floats))
    assert_close(found, np.asarray(exact))


def test_experts_are_not_calibrated() -> None:
    lm = tiny("gemma4_text", **EXPERTS)
    with pytest.raises(ConfigError, match="calibration does not see theirs"):
        compress(lm, ["quantize: gptq int8"], calibration=from_tokens(tokens(2, 8)))
    rule = "on=.*self_attn.*"
    made = compress(lm, [f"quantize: gptq int8 {rule}"], calibration=from_tokens(tokens(2, 8)))
    changed = {p for p, x in flatten(made.params) if isinstance(x, WeightBase)}
    linears = {p for p, _ in flatten(lm.params) if "self_attn" in p and "_proj.weight" in p}
    assert changed == linears


def test_missing_sizes_of_experts_are_named(twin: Twin, tmp_path: Path) -> None:
    config = (twin.directory / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"top_k_experts": 2', '"top_k_experts": null')
    )
    with pytest.raises(ConfigError, match="enable_moe_block requires top_k_experts"):
        open_hf(tmp_path)
