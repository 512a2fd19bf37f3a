"""`jaxllm train`, as a newcomer uses it; README's test runs each kind of training once more."""

import json
from pathlib import Path

import pytest

import jaxllm
from jaxllm import located
from tests.conftest import Run

STORY = "Once upon a time there was a little girl who had a red ball and a big dog.\n"
SMALL = ("--length", 32, "--batch", 2, "--steps", 2)


@pytest.fixture(autouse=True)
def _shallow_demos(shallow_demos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(located, "DEMOS", shallow_demos)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "story.txt"
    file.write_text("".join(f"{number}. {STORY}" for number in range(12)), encoding="utf-8")
    return file


def test_a_run_is_reported_drawn_and_kept_until_it_is_written(
    run: Run, text: Path, tmp_path: Path
) -> None:
    out, report, plot = (tmp_path / name for name in ("out", "report.json", "losses.png"))
    arguments = ("train", "full", "demo:llama", out, "--data", text, *SMALL, "--only", "norm")
    status, said, err = run(*arguments, "--report", report, "--plot", plot, "--sample", "One")
    assert status == 0, err
    assert said.startswith(f"{out}: loss ")
    assert "held-out" in err
    assert "  One" in err
    found = json.loads(report.read_text())
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert found["data"]["width"] == 32
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out.parts").exists()
    before, after = jaxllm.load("demo:llama", dtype="float32"), jaxllm.load(out)
    assert (before.params["norm"]["weight"] != after.params["norm"]["weight"]).any()
    table = "embed_tokens"
    assert (before.params[table]["weight"] == after.params[table]["weight"]).all()
    status, _, err = run(*arguments)
    assert (status, f"{out} already holds" in err) == (1, True), err


def test_an_adapter_goes_on_after_a_prefix_and_from_another(
    run: Run, text: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / "prefix.txt"
    prefix.write_text("Once upon a time")
    arguments = ("train", "lora", "demo:llama", tmp_path / "a", "--data", text, *SMALL)
    arguments = (*arguments, "--target", "q_proj", "--rank", 2, "--quantize", "int8", "--dora")
    status, _, err = run(*arguments, "--prefix", prefix)
    assert status == 0, err
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["use_dora"]) == (2, True)
    again = ("train", "lora", "demo:llama", tmp_path / "b", "--data", text, *SMALL)
    status, _, err = run(*again, "--adapter", tmp_path / "a")
    assert status == 0, err
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert (config["r"], config["use_dora"]) == (2, True)
    arguments = ("train", "lora", "demo:llama", tmp_path / "c", "--data", text, *SMALL)
    status, _, err = run(*arguments, "--prefix", prefix, "--length", 510)
    assert (status, "exceed the model's context of 512" in err) == (1, True), err


def test_a_prompt_becomes_a_cache_file(run: Run, text: Path, tmp_path: Path) -> None:
    file, begin = tmp_path / "prompt.cache", "Once upon a time"
    arguments = ("train", "prompt", "demo:llama", file, "--data", text, *SMALL, "--begin", begin)
    status, _, err = run(*arguments, "--dtype", "float32")
    assert status == 0, err
    more = ("-p", f"{begin} there", "-n", 2, "--dtype", "float32")
    status, _, err = run("generate", "-m", "demo:llama", *more, "--prompt-cache", file)
    assert status == 0, err
    assert "of the prompt's" in err
    status, _, err = run(*arguments)
    assert (status, f"{file} exists" in err) == (1, True)


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ("", (), "there is no data to train on"),
        ('{"text": "a b c"}\n{"words": "d"}\n', (), "line 2"),
        ('{"prompt": "a b c", "completion": ""}\n', (), "line 1: the completion is empty"),
        ('{"tokens": [5, 6, 7], "labels": [-100, -100, -100]}\n', (), "none is learned"),
        ("x", ("--only", "layer.0"), "no parameter that can be trained has a path like"),
        ("x", ("--keep-zeros",), "no zeros to keep"),
        ("x", ("--length", 5000), "ask for narrower rows"),
        ("x", ("--held-out", 0, "--patience", 1), "--patience waits for the held-out loss"),
        ("x", ("--rate", -1), "rate must be above 0"),
    ],
)
def test_bad_input_is_one_clear_line(
    content: str, arguments: tuple[object, ...], said: str, run: Run, text: Path, tmp_path: Path
) -> None:
    file = text
    if content != "x":
        file = tmp_path / ("data.jsonl" if content else "data.txt")
        file.write_text(content)
        arguments = ("--held-out", 0)
    status, _, err = run(
        "train", "full", "demo:llama", tmp_path / "out", "--data", file, *SMALL, *arguments
    )
    assert status == 1
    assert said in err
    assert len(err.strip().splitlines()[-1:]) == 1
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_what_is_no_matrix_no_layer_or_no_adapter_is_refused(
    run: Run, text: Path, tmp_path: Path
) -> None:
    kinds = (
        ("lora", ("--target", "nothing"), "nothing"),
        ("lora", ("--adapter", tmp_path), "has no adapter_config.json"),
        ("qat", ("--format", "bf16-packed"), "no format of integers"),
        ("distill", (), "give --student DIR, or what of the teacher stays"),
        ("distill", ("--layers", 9), "of 2 layers 1 to 2 can stay"),
    )
    for kind, arguments, said in kinds:
        out = tmp_path / "out"
        status, _, err = run("train", kind, "demo:llama", out, "--data", text, *SMALL, *arguments)
        assert (status, said in err) == (1, True), err
        assert not out.exists()
