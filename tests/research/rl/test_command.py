"""`jaxllm train rl` end to end, on the first layers of a demo model."""

import json
from pathlib import Path

import pytest

import jaxllm
from tests.conftest import Run, succeed

pytestmark = pytest.mark.usefixtures("demo_names")
SMALL = ("--batch-size", 2, "--group-size", 3, "-n", 5, "--steps", 2)
REWARDS = """
def score(prompt, answer, line):
    return answer.count(line["wanted"]) / (1 + len(answer))

def fail(prompt, answer, line):
    raise KeyError("wanted")
"""


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"{day} day a girl", "wanted": "a"} for day in ("One", "Some", "Next")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "rewards_of_test.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return file


def test_train_rl_writes_model_report_and_plot(run: Run, prompts: Path, tmp_path: Path) -> None:
    out, report, plot = (tmp_path / name for name in ("out", "report.json", "rewards.png"))
    out_text, err = succeed(
        run, "train", "rl", "demo:llama", out, "--data", prompts, *SMALL, "--lr", 1e-2,
        "--reward", "rewards_of_test:score", "-o", "top_p=0.9", "--report", report, "--plot", plot,
    )  # fmt: skip
    assert out_text.startswith(f"{out}: reward ")
    assert "3 prompts of up to" in err
    assert "reward" in err
    found = json.loads(report.read_text())
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert found["steps"][0]["also"].keys() == {"reward", "length", "drift", "clipped"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    before, after = jaxllm.load("demo:llama", dtype="float32"), jaxllm.load(out)
    assert (before.params["norm"]["weight"] != after.params["norm"]["weight"]).any()


def test_train_rl_trains_adapter_on_scored_answers(run: Run, prompts: Path, tmp_path: Path) -> None:
    scored, out = tmp_path / "scored.jsonl", tmp_path / "out"
    lines = [
        {"prompt": day, "completion": text, "reward": score}
        for day in ("One day", "Some day")
        for text, score in ((" a dog", 1), (" a cat", 0))
    ]
    scored.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("train", "rl", "demo:llama", out, "--data", scored, "--scored", "--rank", 2)
    out_text, _ = succeed(run, *arguments, "--batch-size", 2, "--steps", 2, "--beta", 0.1)
    assert out_text.startswith(f"{out}: reward 0.5")
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--reward", "rewards_of_test:fail"), "reward function raised KeyError: 'wanted'"),
        ((), "either --reward MODULE:FUNCTION or --scored"),
        (("--reward", "rewards_of_test:score", "--scored"), "either --reward"),
        (
            ("--reward", "rewards_of_test:score", "--group-size", 1),
            "--group-size must be 2 or more",
        ),
        (("--reward", "rewards_of_test:score", "--no-pack"), "No such option: --no-pack"),
        (("--reward", "rewards_of_test:score", "--prompts", "x"), "use --data"),
        (("--scored",), "line 1"),
    ],
)
def test_train_rl_bad_input_gives_one_line_error(
    arguments: tuple[object, ...], message: str, run: Run, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    status, _, err = run("train", "rl", "demo:llama", out, "--data", prompts, *SMALL, *arguments)
    assert status in (1, 2)
    assert message in err
    assert "Traceback" not in err
    assert not out.exists()
