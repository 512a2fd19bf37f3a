"""Exported steps: damaged or foreign files and invalid inputs raise errors that name them."""

import dataclasses
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.export import StepSignature, command_line as exporting, input_shapes, runtime
from tests.tiny_models import random_model

N, M = 4, 13


@pytest.fixture
def copy(exported: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported[0], tmp_path / "copy"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change(directory: Path, edit: Callable[[Any], object]) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    edit(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def foreign_weights(directory: Path) -> None:
    path = directory / "weights.safetensors"
    stored = load_file(path)
    stored["norm.weight"] = stored["norm.weight"][:-1]
    save_file(stored, path)
    change(directory, lambda m: m["weights"].update(sha256=runtime.digest(path)))


def foreign_step(directory: Path) -> None:
    """Install another model's code with its hash: only the program reveals the mismatch."""
    model, params = random_model("llama", hidden_size=48)
    other = directory.parent / "other"
    exporting.export(
        model, params, other, num_tokens=N, max_tokens=M, batch=2, step_names=["prefill"]
    )
    path = directory / "prefill.stablehlo"
    shutil.copyfile(other / "prefill.stablehlo", path)
    change(directory, lambda m: m["steps"]["prefill"].update(sha256=runtime.digest(path)))


def not_stablehlo(directory: Path) -> None:
    path = directory / "decode.stablehlo"
    path.write_bytes(b"nonsense")
    change(directory, lambda m: m["steps"]["decode"].update(sha256=runtime.digest(path)))


def broken_code(directory: Path) -> None:
    """Flip bits of the code and update its hash: MLIR's reader can crash on such input."""
    path = directory / "decode.stablehlo"
    content, rng = bytearray(path.read_bytes()), random.Random(158)
    for _ in range(64):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    change(directory, lambda m: m["steps"]["decode"].update(sha256=runtime.digest(path)))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "has no manifest.json"),
    "no JSON": (lambda d: (d / "manifest.json").write_text("{"), "is not valid JSON"),
    "format": (lambda d: change(d, lambda m: m.update(format="onnx")), "has format 'onnx'"),
    "version": (lambda d: change(d, lambda m: m.update(version=9)), ".export format 9;"),
    "key": (lambda d: change(d, lambda m: m.pop("weights")), "missing required field weights"),
    "kind": (lambda d: change(d, lambda m: m.update(steps=[])), "steps must be an object"),
    "step bit": (lambda d: flip(d / "decode.stablehlo"), "decode.stablehlo is damaged"),
    "weights bit": (lambda d: flip(d / "weights.safetensors"), "weights.safetensors is damaged"),
    "step gone": (
        lambda d: (d / "prefill.stablehlo").unlink(),
        "copy: prefill.stablehlo is missing",
    ),
    "outside": (
        lambda d: change(d, lambda m: m["weights"].update(file="../weights.safetensors")),
        "not a plain file name",
    ),
    "weights": (foreign_weights, "tensors differ from those in manifest.json"),
    "step": (foreign_step, "prefill.stablehlo: not a valid step"),
    "nonsense": (not_stablehlo, "decode.stablehlo: not a valid step"),
    "code": (broken_code, "decode.stablehlo: not a valid step"),
    "shape": (
        lambda d: change(d, lambda m: m["steps"]["decode"]["inputs"][0].update(shape=[-1])),
        r"steps\[\.\.\.\]\.inputs\[0\]\.shape\[0\] must be a whole number >= 0",
    ),
    "dtype": (
        lambda d: change(d, lambda m: m["weights"]["tensors"][0].update(dtype="float1")),
        "Invalid enum value 'float1'",
    ),
    "memory": (
        lambda d: change(
            d, lambda m: m["steps"]["decode"]["inputs"][0].update(shape=[1 << 39] * 3)
        ),
        "this machine has",
    ),
    "feeds": (
        lambda d: change(d, lambda m: m["steps"]["decode"]["feeds"].update(nothing="slots")),
        "feeds names unknown arrays, nothing to slots",
    ),
    "link": (
        lambda d: (
            (d / "manifest.json").rename(d.parent / "m"),
            (d / "manifest.json").symlink_to(d.parent / "m"),
        ),
        "manifest.json is a link that leaves the directory",
    ),
    "convention": (
        lambda d: change(d, lambda m: m.update(calling_convention_version=2)),
        "version 2 of JAX's calling convention",
    ),
    "kernels": (
        lambda d: change(d, lambda m: m.update(custom_calls=["jaxllm_nothing"])),
        "calls native kernels \\(jaxllm_nothing\\)",
    ),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_load_refuses_damaged_or_foreign_files(
    copy: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """load refuses an export with a damaged, missing or foreign file, and the error names the file
    and the problem.
    """
    apply, message = DAMAGE[damage]
    apply(copy)
    monkeypatch.delitem(sys.modules, runtime.NATIVE, raising=False)
    with pytest.raises(CheckpointError, match=message):
        runtime.load(copy)


def test_step_refuses_missing_unknown_and_misshapen_inputs(exported: Any) -> None:
    """A step reports all missing, unknown or misshapen inputs at once; blanks write to no slot."""
    steps = runtime.load(exported[0])
    with pytest.raises(ConfigError, match="no step 'generate' was exported"):
        steps["generate"]
    step = steps["decode"]
    assert (step.blank_inputs()["slots"] == M - N).all()  # padding writes to no slot
    inputs: dict[str, Any] = {**step.blank_inputs(), "mask": np.zeros(1)}
    inputs["input_ids"] = np.zeros((2, 2), np.int32)
    inputs["slots"] = np.zeros((2, 1), np.int64)
    del inputs["position_ids"]
    with pytest.raises(ConfigError) as caught:
        step(inputs)
    for problem in (
        "position_ids is missing",
        "mask is not an input",
        "input_ids must be int32 (2, 1), got int32 (2, 2)",
        "slots must be int32 (2, 1), got int64 (2, 1)",
    ):
        assert problem in str(caught.value)


def test_token_inputs_refuses_invalid_tokens_start_and_signature(
    exported: Any, tmp_path: Path
) -> None:
    """token_inputs refuses invalid ids and shapes, a start beyond the past slots, and steps with
    another signature.
    """
    directory, model, _ = exported
    step = runtime.load(directory)["prefill"]
    for tokens, start, message in (
        ([1, 2], 0, r"tokens must be \[2, 1 to 4\], got \[2\]"),
        ([[1]], 0, r"got \[1, 1\]"),
        ([[1] * 5] * 2, 0, r"got \[2, 5\]"),
        ([[], []], 0, r"got \[2, 0\]"),
        ([[0.5], [1]], 0, "must be an array of integers"),
        ([[1], [131]], 0, "token id 131 is outside the vocabulary of 131"),
        ([[1], [-1]], 0, "token id -1 is outside"),
        ([[1], [2]], M - N + 1, f"start must be a whole number from 0 to {M - N}"),
        ([[1], [2]], -1, "start must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            step.token_inputs(tokens, start)
    for form in (
        StepSignature(embeddings=True),
        StepSignature(rotary=True),
        StepSignature(mask="boolean"),
    ):
        inputs = input_shapes(model, form, batch=2, num_tokens=N, capacity=M - N)
        with pytest.raises(ConfigError, match="does not take token ids and positions"):
            dataclasses.replace(step, inputs=inputs).token_inputs([[1], [2]])
