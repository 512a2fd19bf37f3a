"""The `jaxllm compress` command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.cli.compress import CalibrationOptions
from jaxllm.compress import registry
from jaxllm.compress.calibration import Calibration
from jaxllm.compress.pipeline import compress
from jaxllm.compress.recipe import ModelState, StepContext, StepSpec
from jaxllm.compress.report import StepEvaluator
from jaxllm.errors import CheckpointError, NonFiniteError, TokenError
from jaxllm.weights.paths import map_leaves
from tests.compress.models import halve, same
from tests.conftest import Run, assert_refused, succeed

STORY = "Once upon a time there was a little girl who had a red ball and a big dog.\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "story.txt"
    file.write_text("".join(f"{number}. {STORY}" for number in range(40)), encoding="utf-8")
    return file


pytestmark = pytest.mark.usefixtures("demo_names")
SEEN: list[Calibration] = []


def calibrated(work: StepContext[Any]) -> ModelState:
    SEEN.append(work.calibration)
    return halve(work)


@pytest.fixture
def halving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a step that needs calibration data."""
    SEEN.clear()
    step = StepSpec("scale", "halve", calibrated, "half of it")
    monkeypatch.setattr(registry, "STEPS", (*registry.STEPS, step))


def test_command_applies_reports_and_records_recipe(run: Run, text: Path, tmp_path: Path) -> None:
    """The command applies a recipe, writes report and plot, and stores the recipe, which a repeated
    step needs --again for.
    """
    out, report, plot = (tmp_path / name for name in ("out", "report.json", "costs.png"))
    recipe = tmp_path / "recipe.txt"
    recipe.write_text("quantize: rtn int8  # first\nquantize: rtn int4-g32 on=layers\n")
    arguments = ("compress", "demo:llama", out, "--recipe", recipe, "--text", f"@{text}")
    arguments = (*arguments, "--window", 64, "--limit", 2)
    stdout, err = succeed(run, *arguments, "--report", report, "--plot", plot, "--no-speed")
    lines = ["quantize: rtn int8", "quantize: rtn int4-g32 on=layers"]
    names = [line.split("  ")[0] for line in stdout.splitlines()]
    assert names == ["step", "original", *lines]
    assert "1 of 2: quantize: rtn int8: MB " in err
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(report.read_text())
    assert found["recipe"] == lines
    assert [row["step"] for row in found["rows"]] == ["original", *lines]
    assert found["rows"][0]["kl"] == 0 < found["rows"][1]["kl"] < found["rows"][2]["kl"]
    assert found["rows"][0]["bytes"] > found["rows"][1]["bytes"] > found["rows"][2]["bytes"]
    assert found["evaluation"]["windows"] == 2
    made = jaxllm.load(out)
    assert made.recipe == tuple(lines)
    assert made.tokenizer is not None
    same(made.params, compress(jaxllm.load("demo:llama"), lines).params)
    assert list(tmp_path.glob("*.parts")) == []

    _, stdout, _ = run("info", out)
    assert "quantize: rtn int4-g32 on=layers\n" in stdout
    assert json.loads(run("info", out, "--json")[1])["recipe"] == lines
    assert_refused(run, f"{out} already holds a checkpoint", *arguments)
    again = ("compress", out, tmp_path / "again", "--step", lines[0], "--no-speed")
    assert_refused(run, "was already applied to this model: --again", *again)
    status, stdout, err = run(*again, "--again", "--json")
    assert status == 0
    assert "quality is not measured: give --eval FILE" in err
    assert json.loads(stdout)["recipe"] == [*lines, lines[0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --recipe FILE or --step"),
        (("--step", "quantize: rtn int8", "--recipe", "x"), "give either"),
        (("--step", "quantize: rtm int8"), "quantize has no method 'rtm'"),
        (("--step", "quantize: rtn int8 on=nothing"), "on=nothing matches no matrix"),
        (("--recipe", "missing"), "missing"),
        (("--step", "quantize: rtn int8", "--report", "nowhere/x.json"), "nowhere is not a dir"),
        (("--step", "quantize: rtn int8", "--plot", "x.png"), "--plot requires evaluation data"),
        (("--step", "quantize: rtn int8", "--text", "a", "--samples", "2"), "give one of --text"),
        (("--step", "quantize: rtn int8", "--text", "@missing"), "missing"),
        (("--step", "scale: halve"), "needs calibration data: give --text @FILE, --documents FILE"),
        # 899 and the begin-of-text token.
        (("--step", "scale: halve", "--text", "@story.txt", "--length", "900"), "899"),
        (("--step", "scale: halve", "--text", "@short.txt"), "1 tokens"),
    ],
)
@pytest.mark.usefixtures("halving")
def test_invalid_arguments_are_refused_before_work(
    run: Run,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    """Invalid arguments end with one line on stderr, before any step runs or any file
    is written.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("it")
    assert_refused(run, message, "compress", "demo:llama", "out", *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt", "story.txt"]
    assert SEEN == []


def test_list_option_prints_every_step(run: Run) -> None:
    status, out, _ = run("compress", "--list")
    assert status == 0
    assert out.splitlines()[::2] == [step.usage for step in registry.find_steps()]
    assert "prune: wanda N:M|SHARE% [on=" in out
    assert out.count("(needs calibration data)") == sum(
        step.needs_calibration for step in registry.find_steps()
    )


@pytest.mark.usefixtures("halving")
def test_interrupted_run_resumes_with_same_rows(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that failed while saving resumes from its finished steps and evaluations and gives the
    same model.
    """
    arguments = ("--step", "scale: halve", "--step", "quantize: rtn int8", "--text", f"@{text}")
    arguments = (*arguments, "--calibration-rows", 3, "--length", 16, "--window", 64, "--no-speed")

    out, report = tmp_path / "out", tmp_path / "report.json"

    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("cannot write out: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(jaxllm.LM, "save", full)
        status, stdout, err = run("compress", "demo:llama", out, *arguments)
    assert (status, stdout) == (1, "")
    parts = tmp_path / "out.parts"
    assert f"No space left on device; finished work is in {parts}" in err
    assert not out.exists()
    kept = {path.name for path in parts.glob("*.part")}
    assert kept == {"1.whole.part", *(f"{step}.row.numbers.part" for step in "012")}
    with monkeypatch.context() as patched:
        patched.setattr(StepEvaluator, "measure", None)  # every row is in the journal
        succeed(run, "compress", "demo:llama", out, *arguments, "--report", report)
    assert len(SEEN) == 1
    rows = json.loads(report.read_text())["rows"]
    assert [row["kl"] > 0 for row in rows] == [False, True, True]
    assert not parts.exists()
    lm = jaxllm.load("demo:llama")
    half = map_leaves(lambda p, x: x * 0.5 if p.startswith("layers") else x, lm.params)
    same(jaxllm.load(out).params, jaxllm.quantize(half, "int8"))


def test_failed_step_leaves_no_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails before anything is finished leaves no files."""

    def fails(work: StepContext[Any]) -> ModelState:
        raise NonFiniteError("layers.0 makes NaN of the text")

    command = ("compress", "demo:llama", tmp_path / "o", "--no-speed", "--step")
    for method, line, message in (
        ("", "go: x", "got 'go: x', expected 'go:'"),
        ("on", "go: on", "jaxllm: layers.0 makes NaN of the text"),
    ):
        step = StepSpec("go", method, fails, "wrong", needs_calibration=False)
        monkeypatch.setattr(registry, "STEPS", (step,))
        status, out, err = run(*command, line)
        assert (status, out) == (1, "")
        assert message in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_calibration_excludes_evaluation_text(text: Path, tmp_path: Path) -> None:
    """Calibration uses the first 90% of the text up to a line end; the rest is the
    evaluation text.
    """
    source = CalibrationOptions(text=f"@{text}", calibration_rows=4, length=8)
    head, tail = source.read(None)
    whole = text.read_text()
    assert isinstance(head, str)
    assert head + str(tail) == whole
    assert head.endswith("\n")
    assert 0.85 * len(whole) < len(head) <= 0.9 * len(whole)
    other = tmp_path / "other.txt"
    other.write_text("another")
    assert source.read(other) == (whole, "another")
    assert CalibrationOptions().read(None) == (None, None)
    lm = jaxllm.load("demo:llama")
    made = source.calibrate(lm, head)
    assert made.token_NT.shape == (4, 8)
    assert lm.tokenizer is not None
    seen = np.array(lm.tokenizer.encode(head))
    assert (made.token_NT[:, 0] == lm.tokenizer.bos_id).all()
    windows = np.lib.stride_tricks.sliding_window_view(seen, 7)
    assert all((windows == row).all(axis=1).any() for row in made.token_NT[:, 1:])
    assert made.source["file"] == "story.txt"


def test_token_documents_are_split_by_tokens(tmp_path: Path) -> None:
    """Rows of token documents begin with the begin-of-text token, once."""
    file = tmp_path / "ids.jsonl"
    file.write_text('{"tokens": [1, 2, 3, 4, 5, 6]}\n{"tokens": [7, 8, 9, 10]}\n')
    source = CalibrationOptions(documents=file, calibration_rows=2, length=9)
    head, tail = source.read(None)
    assert (head, tail) == ([*range(1, 10)], [10])
    made = source.calibrate(jaxllm.load("demo:llama"), head)
    assert made.token_NT.tolist() == [[*range(1, 10)]] * 2  # 1 begins the document already
    source = CalibrationOptions(documents=file, calibration_rows=8, length=3)
    made = source.calibrate(jaxllm.load("demo:llama"), head)
    assert {(row[0], row[2] - row[1]) for row in made.token_NT.tolist()} == {(1, 1)}
    file.write_text('{"tokens": [1]}\n')
    with pytest.raises(TokenError, match="too short to split"):
        source.read(None)


@pytest.mark.usefixtures("halving")
def test_samples_are_evaluated_on_other_samples(run: Run, tmp_path: Path) -> None:
    """Without a text the model generates calibration rows, and the reported perplexity is that of
    other samples, which no step used.
    """
    command = ("compress", "demo:llama", tmp_path / "out", "--step", "scale: halve", "--no-speed")
    plot = tmp_path / "costs.png"
    stdout, _ = succeed(run, *command, "--samples", 3, "--length", 8, "--json", "--plot", plot)
    found = json.loads(stdout)
    original, halved = found["rows"]
    assert original["kl"] == 0 < halved["kl"]
    assert plot.exists()
    assert found["evaluation"]["windows"] == found["evaluation"]["documents"] == 3
    assert found["evaluation"]["text_tokens"] == 3 * 8  # with the begin-of-text token
    lm, rows = jaxllm.load("demo:llama"), SEEN[0].token_NT
    assert lm.tokenizer is not None
    # Recomputed on rows of another seed, none of which the step has used.
    other = CalibrationOptions(samples=3, length=8).sample_eval_rows(lm, 40)
    assert not any((rows == row).all(axis=1).any() for row in other)
    ids = np.array(other, np.int32)
    assert (rows[:, 0] == lm.tokenizer.bos_id).all() and (ids[:, 0] == lm.tokenizer.bos_id).all()
    logits = np.asarray(jaxllm.forward(lm.model, lm.params, None, ids).logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    likely = np.take_along_axis(log_p[:, :-1], ids[:, 1:, None], -1)
    assert original["perplexity"] == pytest.approx(np.exp(-likely.mean()), rel=1e-4)
