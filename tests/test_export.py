"""Exported steps: they run without the model code and equal `forward`; errors name the cause."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxllm
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.export import StepSignature, command_line as exporting, runtime
from jaxllm.ops import native
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision, cast
from jaxllm.weights.quantize import quantize
from tests.conftest import ROOT, Run, assert_refused, succeed
from tests.tiny_models import random_model, save_random, tokens

N, M = 4, 13
IDS = tokens(2, 8)
EXPLICIT = StepSignature(embeddings=True, rotary=True, mask="boolean")
# Family, dtype, weight format, step signature, step name.
SIGNATURES = {
    "explicit": ("llama", "float32", None, EXPLICIT, "prefill"),
    "additive-int4": ("gpt2", "float32", "int4-g32", StepSignature(mask="additive"), "prefill"),
    "bfloat16": ("llama", "bfloat16", None, StepSignature(), "decode"),
}  # fmt: skip

# Runs the export without the model: positions and slots by hand, prefill, then single tokens.
SCRIPT = """
import sys
import numpy as np
from jaxllm.export import runtime

directory, ids, out = sys.argv[1], np.load(sys.argv[2]), sys.argv[3]
steps = runtime.load(directory)
prefill, decode = steps["prefill"], steps["decode"]
width, inputs = prefill.inputs["input_ids"].shape[1], prefill.blank_inputs()
inputs["input_ids"][:, 1:] = ids[:, : width - 1]  # a column of padding on the left
inputs["position_ids"][:, 1:] = inputs["slots"][:, 1:] = np.arange(width - 1)
outputs = prefill(inputs)
logits = [np.asarray(outputs["logits"])[:, 1:]]
for column in range(width - 1, ids.shape[1]):
    inputs = {**decode.blank_inputs(), **decode.next_past(outputs)}
    inputs["input_ids"][:] = ids[:, column : column + 1]
    inputs["position_ids"][:] = inputs["slots"][:] = column
    outputs = decode(inputs)
    logits.append(np.asarray(outputs["logits"]))
np.save(out, np.concatenate(logits, axis=1))
foreign = [n for n in sys.modules if n.startswith(("jaxllm.", "flax"))]
print(*sorted(foreign))
"""


def export(model: Any, params: Any, directory: Path, *steps: str, **options: Any) -> Any:
    """Export the given steps, or both, for four new tokens of thirteen."""
    lengths = {"num_tokens": N, "max_tokens": M, "step_names": list(steps) or ["prefill", "decode"]}
    return exporting.export(model, params, directory, **{**lengths, **options})


def test_exported_steps_run_without_model_code(exported: Any, tmp_path: Path) -> None:
    """A new process that imports only the runtime modules gives the logits of forward."""
    _, model, params = exported
    rules = [("layers.0.*down_proj.*", "int4-g32"), ("layers.1.*o_proj.*", "int8"), (".*", None)]
    params, directory = quantize(params, rules), tmp_path / "mixed"
    export(model, params, directory, batch=2)
    np.save(tmp_path / "ids.npy", IDS)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, directory, tmp_path / "ids.npy", tmp_path / "logits.npy"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    needed = (
        "errors", "export", "export.runtime", "files", "runtime", "runtime.multihost",
        "runtime.schema", "runtime.signals", "runtime.validation", "weights", "weights.lazy",
        "weights.safetensors",
    )  # fmt: skip
    assert {n for n in done.stdout.split() if not n.startswith("jaxllm.files.")} == {
        f"jaxllm.{name}" for name in needed
    }
    expected = np.asarray(jaxllm.forward(model, params, None, IDS).logits)
    found = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_every_signature_equals_forward(name: str, tmp_path: Path) -> None:
    family, dtype, weights, form, what = SIGNATURES[name]
    layers: dict[str, Any] = {"n_layer" if family == "gpt2" else "num_hidden_layers": 1}
    model, params = random_model(family, precision=Precision.uniform(dtype), **layers)
    params = quantize(params, weights) if weights else cast(params, model.precision)
    export(model, params, tmp_path, what, signature=form)
    bar = 2e-2 if dtype == "bfloat16" else 1e-5
    assert exporting.compare_logits(model, params, tmp_path)[what] < bar


def test_compare_logits_detects_different_weights(tmp_path: Path) -> None:
    model, params = random_model("llama", num_hidden_layers=1)
    export(model, params, tmp_path)
    other = random_model("llama", seed=1, num_hidden_layers=1)[1]
    differences = exporting.compare_logits(model, other, tmp_path)
    assert set(differences) == {"prefill", "decode"}
    assert min(differences.values()) > 0.1


def test_manifest_matches_program(exported: Any) -> None:
    """StableHLO's arguments are the manifest's, in order and type; no weight is a constant."""
    directory, _, params = exported
    manifest = json.loads((directory / "manifest.json").read_text())
    names = {"float32": "f32", "int32": "i32", "bool": "i1"}
    weights = manifest["weights"]["tensors"]
    assert [w["name"] for w in weights] == sorted(path for path, _ in flatten(params))
    for name in ("prefill", "decode"):
        text = (directory / f"{name}.mlir").read_text()
        main = text[text.index("@main(") : text.index("->")]
        found = re.findall(r"%arg\d+: tensor<([^>]+)>", main)
        declared = [*weights, *manifest["steps"][name]["inputs"]]
        assert found == ["x".join([*map(str, w["shape"]), names[w["dtype"]]]) for w in declared]
        # Weights are inputs, never constants.
        sizes = re.findall(r"stablehlo.constant dense<.*?> : tensor<([\dx]*)x\w+>", text)
        counts = [np.prod([int(n) for n in size.split("x")]) for size in sizes if 'dense<"' in text]
        assert all(count < 100 for count in counts)
        assert len(text) < 400_000


def test_weights_are_stored_under_parameter_names(exported: Any) -> None:
    directory, _, params = exported
    stored = load_file(directory / "weights.safetensors")
    for path, leaf in flatten(params):
        np.testing.assert_array_equal(stored[path], np.asarray(leaf))


def test_export_supports_multiple_platforms(exported: Any, tmp_path: Path) -> None:
    _, model, params = exported
    export(model, params, tmp_path, "decode", platforms=["cpu", "cuda", "tpu"])
    assert exporting.compare_logits(model, params, tmp_path)["decode"] < 1e-5


def test_export_for_another_platform_is_refused(exported: Any, tmp_path: Path) -> None:
    _, model, params = exported
    export(model, params, tmp_path, "decode", platforms=["tpu"])
    with pytest.raises(CheckpointError, match="was exported for tpu; this process runs on cpu"):
        runtime.load(tmp_path)


def test_export_overwrites_nothing_and_is_atomic(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed or interrupted export leaves no files, existing files stay, and a folder without
    manifest does not load.
    """
    directory, model, params = exported
    with pytest.raises(CheckpointError, match="already holds an export"):
        export(model, params, directory, "decode")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "write_tensors", stop)
        with pytest.raises(KeyboardInterrupt):
            export(model, params, tmp_path / "half", "decode")
    assert not (tmp_path / "half").exists()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "mine").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "write_tensors", full)
        with pytest.raises(CheckpointError, match=r"cannot write .*: No space left"):
            export(model, params, tmp_path / "half", "decode")
    assert [f.name for f in (tmp_path / "half").iterdir()] == ["mine"]
    with pytest.raises(CheckpointError, match=r"has no manifest\.json: not an export"):
        runtime.load(tmp_path / "half")
    export(model, params, tmp_path / "half", "decode")
    assert list(runtime.load(tmp_path / "half").steps) == ["decode"]


def test_native_kernels_are_omitted_or_listed(exported: Any, tmp_path: Path) -> None:
    """By default the program has no native calls; with native=keep, the manifest lists them."""
    _, model, params = exported
    left = json.loads((exported[0] / "manifest.json").read_text())
    assert left["custom_calls"] == []
    assert "custom_call @jaxllm" not in (exported[0] / "decode.mlir").read_text()
    if native.load_kernels() is None:
        pytest.skip("no native kernels were built")
    manifest = export(model, params, tmp_path, "decode", native="keep", write_mlir=True)
    assert "jaxllm_linear" in manifest["custom_calls"]
    text = (tmp_path / "decode.mlir").read_text()
    assert set(re.findall(r"custom_call @(jaxllm_\w+)", text)) == set(manifest["custom_calls"])
    assert exporting.compare_logits(model, params, tmp_path)["decode"] < 1e-5


def test_unknown_custom_call_is_refused(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, params = exported

    def step(model: Any, form: Any, params: Any, inputs: Any) -> Any:
        slots = inputs["slots"]
        return {"logits": jax.ffi.ffi_call("a_stranger", slots)(slots)}

    monkeypatch.setattr(exporting, "run_step", step)
    with pytest.raises(ConfigError, match=r"cannot be exported.*a_stranger"):
        export(model, params, tmp_path, "decode")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 0}, "num_tokens must be"),
        ({"max_tokens": N}, r"max_tokens \(4\) must exceed"),
        ({"batch": 0}, "batch must be"),
        ({"step_names": []}, "a step must be one of prefill, decode; got none"),
        ({"step_names": ["train"]}, "got 'train'"),
        ({"platforms": ["npu"]}, "a platform must be one of cpu, cuda, rocm, tpu; got 'npu'"),
        ({"native": "maybe"}, "native must be one of keep, leave-out; got 'maybe'"),
    ],
)
def test_export_refuses_invalid_options(
    exported: Any, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    _, model, params = exported
    with pytest.raises(ConfigError, match=message):
        export(model, params, tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


def test_export_command_exports_and_checks(run: Run, tmp_path: Path) -> None:
    """The command exports, compares with --check, applies --precision, refuses in one line."""
    run = partial(run, "export")
    save_random(tmp_path / "model", "gpt2", n_layer=1)
    base = (tmp_path / "model", tmp_path / "a", "--num-tokens", 4, "--max-tokens", 12)
    out, _ = succeed(
        run,
        *base, "--what", "prefill", "--form", "boolean", "--quantize", "int8", "--dtype", "float32",
        "--check", "--json", "--mlir",
    )  # fmt: skip
    report = json.loads(out)
    assert report["difference"]["prefill"] < 1e-5
    assert report["weights"] == (tmp_path / "a" / "weights.safetensors").stat().st_size
    table = tmp_path / "formats.json"
    table.write_text(json.dumps([["h.0.mlp.c_fc", {"weights": "int4"}]]))
    out, _ = succeed(
        run,
        base[0], tmp_path / "b", *base[2:], "--what", "decode", "--precision", table, "--check",
        "--json",
    )  # fmt: skip
    assert json.loads(out)["difference"]["decode"] < 1e-5
    kinds = {name: x.dtype for name, x in load_file(tmp_path / "b/weights.safetensors").items()}
    assert [name for name, kind in kinds.items() if kind == np.uint8] == [
        "h.0.mlp.c_fc.weight.data"
    ]
    for options, message in {
        (): "already holds an export",
        ("--form", "rotary"): "gpt2 has no RoPE",
        ("--form", "square"): "--form must be one of tokens, embeddings",
        ("--form", "boolean,additive"): "additive contradicts",
        ("--what", "train"): "--what must be one of prefill, decode",
        ("--quantize", "int5"): "int5",
    }.items():
        there = base if not options else (base[0], tmp_path / "c", *base[2:])
        assert_refused(run, message, *there, *options)
