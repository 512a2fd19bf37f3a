"""Training over two processes: losses, state and results equal those of one process."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxllm
from tests.conftest import Run, succeed
from tests.processes import training
from tests.processes.conftest import (
    Start,
    ended,
    free_port,
    kill,
    run_both,
    start_both,
    together,
)
from tests.tiny_models import save_random

ADAPTER = "adapter_model.safetensors"
SIZES = {
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 256,
}  # shares are multiples of the group size
# The model computes their initial state, with different rounding on each mesh.
COMPUTED = ("dora", "after", "entries", "distill")
WRITTEN = {"lora": ADAPTER, "dora": ADAPTER, "after": ADAPTER, "prompt": "", "entries": ""}


def assert_equals_single_process(
    found: Any, expected: Any, out: Path, single: Path, kind: str
) -> None:
    for mine, theirs in zip(found["records"], expected["records"], strict=True):
        assert mine == pytest.approx(theirs, rel=5e-4)
    name = WRITTEN.get(kind, "model.safetensors")
    weights, others = (load_file(folder / name) for folder in (out, single))
    assert weights.keys() == others.keys()
    if kind == "qat":  # integers near a rounding boundary may differ by one
        assert sum((weights[n] != x).sum() for n, x in others.items() if "data" in n) < 50
        return
    for name, x in others.items():
        np.testing.assert_allclose(weights[name], x, rtol=0, atol=2e-4 * max(1, np.abs(x).max()))


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "kind", "hows"),
    [
        (1, "full", [{"mesh": "data=2", "fsdp": True, "stop": 2}, {"mesh": "tensor=2"}]),
        (1, "full", [{"mesh": "stage=2", "stop": 1}, {"mesh": "data=2"}]),
        (2, "full", [{"mesh": "data=2,tensor=2", "fsdp": True}]),
        (1, "lora", [{"mesh": "tensor=2", "stop": 2}, {"mesh": "data=2"}]),
        (1, "lora", [{"mesh": "stage=2"}]),
        (1, "dora", [{"mesh": "tensor=2", "stop": 1}, {"mesh": "tensor=2"}]),
        (1, "after", [{"mesh": "data=2", "stop": 1}, {"mesh": "data=2"}]),
        (1, "prompt", [{"mesh": "stage=2", "stop": 2}, {"mesh": "data=2"}]),
        (1, "entries", [{"mesh": "tensor=2", "stop": 1}, {"mesh": "tensor=2"}]),
        (1, "qat", [{"mesh": "tensor=2", "stop": 2}, {"mesh": "stage=2"}]),
        (1, "distill", [{"mesh": "tensor=2", "stop": 2}, {"mesh": "tensor=2"}]),
        (1, "recorded", [{"mesh": "tensor=2"}]),
    ],
)
def test_two_processes_train_and_resume_like_one(
    devices: int, kind: str, hows: list[dict[str, Any]], tmp_path: Path, shallow_demos: Path
) -> None:
    """Two processes, resuming on one mesh after another, reach the losses and weights of one
    process within tolerance.
    """
    model, single, out = (tmp_path / name for name in ("model", "single", "out"))
    if kind in ("distill", "recorded"):  # distillation compares tokenizers
        shutil.copytree(shallow_demos / "llama", model)
    else:
        save_random(model, "llama", num_hidden_layers=2, **SIZES)
    expected = training.run(str(model), single, kind=kind)
    assert kind in COMPUTED or training.run(str(model), out, kind=kind, stop=1) is None
    each = json.dumps([{"kind": kind, **how} for how in hows])
    program = ["-m", "tests.processes.training"]
    found, same = run_both(program, str(model), str(out), each, devices=devices)
    assert found == same
    assert found[:-1] == [None] * (len(hows) - 1)
    assert found[-1]["first_line"].startswith("resuming after step ")
    assert_equals_single_process(found[-1], expected, out, single, kind)
    assert not out.with_name("out.parts").exists()
    left = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".taught")
    assert left == ["model", "out", "single"]


@pytest.mark.full
def test_adapter_with_pipeline_stages_across_processes_is_refused(
    start: Start, tmp_path: Path
) -> None:
    """An adapter cannot be attached if other processes hold stages; the error suggests jaxllm merge
    or stage=1.
    """
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    save_random(model, "llama", num_hidden_layers=2)
    training.run(str(model), adapter, kind="lora")
    command = (
        "generate",
        str(model),
        "--adapter",
        str(adapter),
        "--mesh",
        "stage=2",
        "-p",
        "x",
    )
    for found in together(start, *command):
        assert (found.status, found.out) == (1, ""), found.err
        assert "jaxllm merge" in found.err and "stage=1" in found.err


STORY = "Once there was a little girl who had a red ball and a big dog.\n"


@pytest.fixture
def command(shallow_demos: Path, tmp_path: Path) -> tuple[str, ...]:
    """Return a train command without output directory and number of steps."""
    text = tmp_path / "story.txt"
    text.write_text("".join(f"{number}. {STORY}" for number in range(24)), "utf-8")
    given = "--data", str(text), "--length", "32", "--batch-size", "4", "--mesh", "data=2", "--fsdp"
    return "train", "full", str(shallow_demos / "llama"), *given


@pytest.mark.full
def test_train_writes_once_and_refuses_existing_output(
    start: Start, run: Run, command: tuple[str, ...], tmp_path: Path
) -> None:
    """Process 0 alone writes the single-process result, and a second run is refused in both
    processes.
    """
    train, kind, model, *more = command
    out, one, report, other, plot = (
        tmp_path / name for name in ("out", "one", "report.json", "other.json", "plot.png")
    )
    given = train, kind, model, str(out), *more, "--steps", "2"
    shown = "--report", str(report), "--plot", str(plot), "--sample", "Once"
    first, second = together(start, *given, *shown)
    assert first.status == 0, first.err
    assert first.out.startswith(f"{out}: loss ") and "  Once" in first.err
    assert second == (0, "", "")
    succeed(run, train, kind, model, one, *more[:-3], "--steps", "2", "--report", other)
    mine, theirs = (json.loads(file.read_text())["steps"] for file in (report, other))
    losses = [[step["loss"] for step in steps] for steps in (mine, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    learned, others = (jaxllm.load(folder).params["norm"]["weight"] for folder in (out, one))
    np.testing.assert_allclose(learned, others, atol=3e-4)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*part*"))
    for refused in together(start, *given):
        assert (refused.status, refused.out) == (1, "")
        assert refused.err.startswith(f"jaxllm: {out} already holds a result"), refused.err


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_train_ends_if_peer_is_killed(
    start: Start, command: tuple[str, ...], tmp_path: Path, killed: int
) -> None:
    """If one process is killed during training, the other exits with one line and
    writes no output.
    """
    train, kind, model, *more = command
    given = train, kind, model, str(tmp_path / "out"), *more
    every = start_both(start, *given, "--steps", "100000", "--eval-steps", "1")
    assert every[0].stderr is not None
    while not every[0].stderr.readline().startswith("step 1:"):
        assert every[0].poll() is None
    kill(every[killed].pid)
    status, _, err = ended(every[1 - killed])
    assert status == 1, err
    last = err.splitlines()[-1]
    assert last.startswith("jaxllm: ") and "is lost" in last, err
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_train_refuses_different_data_across_processes(
    start: Start, command: tuple[str, ...], tmp_path: Path
) -> None:
    folders, (train, kind, model, *more) = [tmp_path / "0", tmp_path / "1"], command
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "story.txt").write_text(STORY * (20 + number))
    given = train, kind, model, "out", "--data", "story.txt", *more[2:], "--steps", "2"
    port = free_port()
    for process in [start(port, 2, n, *given, cwd=folder) for n, folder in enumerate(folders)]:
        status, _, err = ended(process)
        assert status == 1, err
        assert "all processes must use identical inputs: data: " in err
