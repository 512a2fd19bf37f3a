"""Commands on a mesh give the results of one device."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.adapters import LoraConfig, write_adapter
from jaxllm.cache import load_cache
from jaxllm.checkpoints import resolve
from jaxllm.weights.formats import as_weight
from jaxllm.weights.paths import flatten
from tests.adapters.random_adapters import random_adapter
from tests.conftest import Run, assert_refused, succeed

pytestmark = pytest.mark.devices
FULL = pytest.mark.full
SMALL = ("--length", 24, "--batch-size", 4, "--steps", 2, "--eval-split", 0, "--lr", 1e-3)


@pytest.fixture
def text(tmp_path: Path, shallow_demos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resolve, "DEMO_DIR", shallow_demos)
    file = tmp_path / "story.txt"
    file.write_text("".join(f"{n}. Once there was a red ball.\n" for n in range(9)), "utf-8")
    return file


def trained(run: Run, text: Path, out: Path, kind: str, *more: object) -> list[dict[str, Any]]:
    """Run a train command and return the steps of its report."""
    report = out.with_suffix(".json")
    given = ("--data", text, *SMALL, "--report", report)
    succeed(run, "train", kind, "demo:llama", out, *given, *more)
    steps: list[dict[str, Any]] = json.loads(report.read_text())["steps"]
    return steps


@pytest.mark.parametrize(
    ("kind", "mesh", "more"),
    [
        ("prompt", "data=2,tensor=2", ("--begin", "Once upon a time")),
        ("qat", "data=2,tensor=2", ("--format", "int4-g32", "--float-steps", 1)),
        pytest.param(
            "distill",
            "data=2,tensor=2",
            ("--layers", 1, "--hidden", "mse", "--on-policy", 0.5),
            marks=FULL,
        ),
        pytest.param("prompt", "data=2,tensor=2", ("--begin", "Once", "--entries"), marks=FULL),
        pytest.param("prompt", "stage=2,tensor=2", ("--begin", "Once upon"), marks=FULL),
        pytest.param("qat", "data=2", ("--format", "int8", "--learned-scales"), marks=FULL),
        pytest.param("qat", "tensor=2", ("--rules", "{rules}", "--learned-scales"), marks=FULL),
        pytest.param("qat", "data=2,stage=2", ("--format", "int8"), marks=FULL),
        pytest.param("distill", "stage=2", ("--channels", 192, "--top-k", 8), marks=FULL),
        pytest.param("distill", "data=2", ("--layers", 1, "--fsdp"), marks=FULL),
        pytest.param("lora", "data=2,tensor=2", ("--prefix", "{text}"), marks=FULL),
    ],
)
def test_train_on_mesh_equals_single_device(
    run: Run, text: Path, tmp_path: Path, kind: str, mesh: str, more: tuple[object, ...]
) -> None:
    """Losses, gradient norms and the written weights equal one device, up to single quantization
    steps in QAT.
    """
    single = [x for x in more if x != "--fsdp"]
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([[r".*\.(q|k|v|gate|up)_proj\.weight", "int8-g32"]]))
    named = {"{text}": text, "{rules}": rules}
    single, more = ([named.get(str(x), x) for x in some] for some in (single, more))
    outs = tmp_path / "one", tmp_path / "many"
    expected = trained(run, text, outs[0], kind, *single)
    found = trained(run, text, outs[1], kind, "--mesh", mesh, *more)
    assert len(found) == len(expected) == 2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["weight"] == theirs["weight"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-5)
        assert mine["norm"] == pytest.approx(theirs["norm"], rel=1e-3)
    if kind == "lora":
        return
    one, many = (
        load_cache(out, *_model()).tail.k if kind == "prompt" else _weights(out) for out in outs
    )
    for mine, theirs in zip(many, one, strict=True):
        # Rounding may change a quantized value by one step.
        error = np.abs(np.asarray(mine, np.float32) - np.asarray(theirs, np.float32))
        assert (error > 3e-3).mean() < (0.01 if kind == "qat" else 1e-9)


def _model() -> tuple[Any, Any]:
    lm = jaxllm.load("demo:llama", dtype="float32")
    return lm.model, lm.params


def _weights(out: Path) -> list[np.ndarray]:
    return [np.asarray(as_weight(leaf).to_dense()) for _, leaf in flatten(jaxllm.load(out).params)]


@pytest.mark.parametrize(
    ("family", "mesh"), [("llama", "data=2,tensor=2"), pytest.param("gpt2", "stage=2", marks=FULL)]
)
def test_sensitivity_on_mesh_equals_single_device(
    run: Run, text: Path, family: str, mesh: str
) -> None:
    given = ("--text", f"@{text}", "--by", "kind", "--window", 32, "--limit", 4, "--json")
    found = []
    for more in ((), ("--mesh", mesh)):
        out, _ = succeed(run, "sensitivity", f"demo:{family}", *given, "--dtype", "float32", *more)
        found.append({row["regex"]: row for row in json.loads(out)["groups"]})
    assert found[0].keys() == found[1].keys()
    for regex, row in found[0].items():
        mine = found[1][regex]
        assert mine["bytes_after"] == row["bytes_after"]
        assert mine["kl"] == pytest.approx(row["kl"], rel=1e-3, abs=1e-6), regex


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--format", "int8", "--mesh", "tensor=2"), "split a group of"),
        (("--mesh", "data=2", "--fsdp"), "--fsdp cannot be combined with train qat"),
        (("--mesh", "data=2", "--int8-inputs"), "cannot be trained on a mesh"),
    ],
)
def test_train_qat_refuses_unsupported_meshes(
    run: Run, text: Path, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    """QAT refuses a mesh that splits a quantization group, FSDP, and int8 inputs."""
    given = ("--data", text, *SMALL)
    assert_refused(run, message, "train", "qat", "demo:llama", tmp_path / "out", *given, *more)


def test_merge_on_mesh_writes_single_device_weights(run: Run, text: Path, tmp_path: Path) -> None:
    """On a mesh, merge measures the adapter's divergence like one device and writes bit-identical
    weights.
    """
    lm, adapter = jaxllm.load("demo:llama", dtype="float32"), tmp_path / "adapter"
    lora = LoraConfig(r=2, target_modules=("q_proj", "down_proj"))
    made = random_adapter(lm.config, lm.params, lora, spread=0.1)
    write_adapter(adapter, made, lm.config)
    found = []
    for name, more in (("one", ()), ("many", ("--mesh", "data=2,tensor=2"))):
        given = "--adapter", adapter, "--text", f"@{text}", "--dtype", "float32", "--format", "int8"
        _, err = succeed(run, "merge", "demo:llama", tmp_path / name, *given, *more)
        found.append(float(err.split("with the adapter: ")[1].split()[0]))
    assert found[1] == pytest.approx(found[0], rel=1e-2) and found[0] > 0
    for mine, theirs in zip(_weights(tmp_path / "many"), _weights(tmp_path / "one"), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_compress_refuses_mesh(run: Run, text: Path, tmp_path: Path) -> None:
    """compress runs on one device; the error suggests a mesh for the result."""
    recipe = ("--step", "quantize: gptq int4-g32", "--text", f"@{text}")
    command = "compress", "demo:llama", tmp_path / "out", *recipe, "--mesh", "data=2"
    assert_refused(run, "run the result with --mesh data=2", *command)


@FULL
def test_bench_prunes_and_shards_sparse_weights(run: Run, text: Path) -> None:
    """bench --step prunes the weights and runs them on a mesh."""
    times = ("--prompts", 8, "--decode", 2, "--depths", 0, "--batches", 1, "-r", 1, "--json")
    out, _ = succeed(
        run, "bench", "demo:llama", "--step", "prune: magnitude 2:4", "--step",
        "quantize: rtn bfloat16-2:4", "--mesh", "tensor=2", *times
    )  # fmt: skip
    assert len(json.loads(out)["rows"]) == 2


@FULL
@pytest.mark.parametrize("mesh", ["stage=2", "data=2,stage=2,tensor=2", "sequence=2"])
def test_verify_and_vectors_pass_on_mesh(run: Run, text: Path, tmp_path: Path, mesh: str) -> None:
    """verify passes on a mesh, and vectors of one device pass the check there, also for stacked
    stage caches.
    """
    succeed(run, "verify", "demo:llama", "--against", "demo:llama", "--mesh", mesh)
    assert run("vectors", "make", "demo:llama", tmp_path / "v", "-n", 2)[0] == 0
    succeed(run, "vectors", "check", "demo:llama", tmp_path / "v", "--mesh", mesh)
