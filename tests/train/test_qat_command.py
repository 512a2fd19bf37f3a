"""`jaxllm train qat`: from a float model and a text to an integer checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import jaxllm
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import ConfigError
from jaxllm.train.qat.job import qat
from jaxllm.weights.formats import weight_format
from jaxllm.weights.paths import flatten
from tests.conftest import Run

TEXT = "Lily saw a red ball. Her cat Max ran to the ball and she laughed. " * 12


def test_train_qat_writes_integer_checkpoint(
    run: Run, shallow: Callable[[str], Path], tmp_path: Path
) -> None:
    """The result has the formats of the rules and records its recipe."""
    (tmp_path / "text.txt").write_text(TEXT)
    rules = [[r"layers\.0\.mlp\..*", "int3-g32"], [r"layers\.1\.mlp\.up_proj", "int8"]]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    out = tmp_path / "small"
    status, printed, err = run(
        "train", "qat", shallow("llama"), out, "--data", tmp_path / "text.txt",
        "--rules", tmp_path / "rules.json", "--steps", 2, "--batch-size", 1, "--length", 32,
        "--eval-split", 0, "--learned-scales",
    )  # fmt: skip
    assert status == 0, err
    assert "loss" in printed
    loaded = jaxllm.load(out)
    formats = {path: weight_format(leaf) for path, leaf in flatten(loaded.params)}
    assert formats["layers.0.mlp.up_proj.weight"] == "int3-g32"
    assert formats["layers.1.mlp.up_proj.weight"] == "int8"
    assert formats["layers.1.mlp.down_proj.weight"] == "float32"
    assert open_checkpoint(out).recipe == ("train: qat by rules",)
    assert not out.with_name("small.parts").exists()


def test_qat_refuses_input_scales_without_observed_ranges(shallow: Callable[[str], Path]) -> None:
    lm = jaxllm.load(shallow("llama"), dtype="float32")
    with pytest.raises(ConfigError, match="needs observed input ranges"):
        qat(lm, "int8", learn_input_scales=True)
