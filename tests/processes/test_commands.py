"""Commands that run a model over two processes print what a single process prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run, succeed
from tests.processes.conftest import Start, ended, kill, start_both, together
from tests.tiny_models import save_random

TALK = "Once upon a time\n/reset\n\nOne day\nAnd then?\n"


def approximate(value: Any, rel: float = 1e-3) -> Any:
    """Wrap every float of a JSON value in pytest.approx."""
    if isinstance(value, dict):
        return {name: approximate(x, rel) for name, x in value.items()}
    if isinstance(value, list):
        return [approximate(x, rel) for x in value]
    return pytest.approx(value, rel=rel, abs=1e-6) if isinstance(value, float) else value


@pytest.mark.full
def test_chat_over_two_processes_equals_single_process(
    start: Start, run: Run, shallow_demos: Path
) -> None:
    """Process 0 reads stdin and prints the replies of a single-process chat; process 1 ignores its
    stdin and prints nothing.
    """
    command = "chat", str(shallow_demos / "llama"), "-n", "8", "--seed", "0", "-t", "0.7"
    out_text, _ = succeed(run, *command, stdin=TALK)
    assert out_text.count("\n") == 3
    both = start_both(start, *command, "--mesh", "tensor=2")
    assert both[1].stdin is not None
    both[1].stdin.write("Something else\n")
    assert ended(both[0], TALK) == (0, out_text, "all messages removed\n")
    assert ended(both[1])[:2] == (0, "")


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_chat_ends_if_peer_is_killed(start: Start, shallow_demos: Path, killed: int) -> None:
    """If one process is killed while chat waits for input, the other exits with status 1 and an
    error.
    """
    command = "chat", str(shallow_demos / "llama"), "--mesh", "tensor=2", "-n", "3"
    both = start_both(start, *command)
    assert both[0].stdin is not None and both[0].stdout is not None
    both[0].stdin.write("Once\n")
    both[0].stdin.flush()
    both[0].stdout.read(1)  # it replies, and then waits for input
    kill(both[killed].pid)
    other = both[1 - killed]
    status = other.wait(60)
    assert status == 1 and other.stderr is not None
    assert "is lost" in other.stderr.read()


@pytest.mark.full
def test_verify_over_two_processes_equals_single_process(
    start: Start, run: Run, shallow_demos: Path, tmp_path: Path
) -> None:
    """verify reports the single-process result against transformers and another checkpoint, and
    fails in both on a missing one.
    """
    model = tmp_path / "model"
    save_random(model, "llama", num_hidden_layers=2)
    sizes = "--length", "12", "-n", "4", "--json"
    (status, out_text, err), other = together(
        start, "verify", str(model), "--mesh", "stage=2", *sizes
    )
    assert status == 0, err
    assert other[:2] == (0, "")
    report = json.loads(out_text)
    expected = json.loads(run("verify", model, *sizes)[1])
    assert report["holds"] and report["greedy"] == expected["greedy"]
    assert [s["name"] for s in report["stages"]] == [s["name"] for s in expected["stages"]]
    command = "verify", str(model), "--quantize", "int8", "--mesh", "tensor=2", "--against"
    status, out_text, err = run("verify", model, "--quantize", "int8", "--against", model, *sizes)
    assert status == 1, err
    found, other = together(start, *command, str(model), *sizes)
    assert found.status == 1 and other[:2] == (1, "")
    drifts = [
        [stage["relative_rms"] for stage in json.loads(text)["stages"]]
        for text in (found.out, out_text)
    ]
    assert drifts[0] == pytest.approx(drifts[1], rel=0.05, abs=1e-6)
    for failed in together(start, *command, str(tmp_path / "none"), *sizes):
        assert failed.status == 1 and failed.out == ""
        assert "none" in failed.err.splitlines()[-1], failed.err


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tensor=2", "stage=2"])
def test_vectors_agree_across_process_counts(
    start: Start, run: Run, tmp_path: Path, mesh: str
) -> None:
    """Vectors made by two processes pass the check in one process, and those made by one process
    pass it in two.
    """
    model, made, single = str(tmp_path / "model"), tmp_path / "made", tmp_path / "single"
    save_random(Path(model), "llama", num_hidden_layers=2)
    assert run("vectors", "make", model, single, "--from", "transformers")[0] == 0
    (status, _, err), other = together(start, "vectors", "make", model, str(made), "--mesh", mesh)
    assert (status, err) == (0, f"wrote {made}\n")
    assert other == (0, "", "")
    assert sorted(path.name for path in made.iterdir()) == ["vectors.json", "vectors.safetensors"]
    assert run("vectors", "check", model, made)[0] == 0
    command = "vectors", "check", model, str(single), "--mesh", mesh
    (status, out_text, err), other = together(start, *command)
    assert status == 0 and out_text.endswith("\nholds\n"), err + out_text
    assert other == (0, "", "")


@pytest.mark.full
def test_sensitivity_over_two_processes_equals_single_process(
    start: Start, run: Run, shallow_demos: Path, tmp_path: Path
) -> None:
    """The report equals that of one process up to rounding, and process 0 alone prints it."""
    text, plot = tmp_path / "text", tmp_path / "plot.png"
    text.write_text("Once upon a time there was a boat. " * 12)
    command = "sensitivity", str(shallow_demos / "llama"), "--text", f"@{text}", "--window", "32"
    arguments = *command, "--dtype", "float32", "--format", "int3-g32", "--json"
    out_text, err = succeed(run, *arguments)
    (status, found, err), other = together(
        start, *arguments, "--mesh", "stage=2", "--plot", str(plot)
    )
    assert status == 0, err
    assert other == (0, "", "")
    assert json.loads(found) == approximate(json.loads(out_text))
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_recall_over_two_processes_equals_single_process(
    start: Start, run: Run, shallow_demos: Path, tmp_path: Path
) -> None:
    """The cells equal those of one process up to rounding, and process 0 alone prints and writes
    them.
    """
    out = tmp_path / "recall.json"
    # In float16, the dtype of the file, a batch of two rows differs from one of four by 2e-4.
    command = "recall", str(shallow_demos / "llama"), "--lengths", "56,72", "--tries", "4"
    options = "--dtype float32 --texts story --policies full,heavy,pooled --depths 0,1 --slots 32"
    command = *command, *options.split(), "--json"
    out_text, err = succeed(run, *command)
    expected = json.loads(out_text)["cells"]
    (status, out_text, err), other = together(
        start, *command, "--mesh", "data=2", "--out", str(out)
    )
    assert status == 0, err
    assert other == (0, "", "")
    assert json.loads(out.read_text()) == json.loads(out_text)
    assert json.loads(out_text)["cells"] == approximate(expected, 1e-5)


@pytest.mark.full
def test_bench_over_two_processes_reports_once(start: Start, shallow_demos: Path) -> None:
    """bench measures over both processes, and process 0 alone prints the rows."""
    command = "bench", str(shallow_demos / "llama"), "--mesh", "stage=2", "--json"
    sizes = "--prompts", "8", "--decode", "4", "--depths", "0,8", "--batches", "1", "-r", "1"
    (status, out_text, err), other = together(start, *command, *sizes)
    assert status == 0, err
    assert other == (0, "", "")
    rows = json.loads(out_text)["rows"]
    assert [row["test"] for row in rows] == ["pp8", "tg4", "tg4 @ d8"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
