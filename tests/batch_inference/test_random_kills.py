"""1,000 prompts, with workers and the command killed at random, equal one process's output."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.batch_inference.process_kills import run_with_random_kills, start_jaxllm

OPENINGS = ("Once upon a time", "One day", "There was a girl", "The little dog", "A boy named Tom")
OPTIONS = ("-n", 24, "--temperature", 0.9, "--seed", 11, "--group", 16)
NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'jaxllm[ray]'",
)
MODES = {
    "processes": ((), lambda line: "spawn_main" in line),
    "ray": (("--ray", "local"), lambda line: line.startswith("ray::MapWorker")),
}
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 rows, of which one in a hundred fails."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [
        {"id": f"row {n}", "prompt": f"{OPENINGS[n % 5]}, {n % 7}"}
        | ({"temperature": -1} if n % 100 == 50 else {})
        for n in range(1000)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def reference(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one uninterrupted process."""
    out = tmp_path_factory.mktemp("reference") / "out.jsonl"
    command = start_jaxllm(["batch", "demo:llama", prompts, *OPTIONS, "--workers", 1, "--out", out])
    _, err = command.communicate()
    assert command.returncode == 1, err.decode()  # rows have failed
    return out


@pytest.mark.parametrize("mode", ["processes", pytest.param("ray", marks=NEEDS_RAY)])
def test_random_kills_do_not_change_output(
    mode: str, prompts: Path, reference: Path, tmp_path: Path
) -> None:
    """With workers and drivers killed at random, 1,000 rows give the bytes of one uninterrupted
    process.
    """
    more, is_worker = MODES[mode]
    out = tmp_path / "out.jsonl"
    arguments = ["batch", "demo:llama", prompts, *OPTIONS, "--workers", 2, *more, "--out", out]
    parts = tmp_path / "out.jsonl.parts"
    workers, drivers = run_with_random_kills(
        arguments, parts, is_worker, workers=12, drivers=3, status=1
    )
    assert workers >= 3 and drivers >= 1  # a fast machine ends before all of them
    assert out.read_bytes() == reference.read_bytes()
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [f"row {n}" for n in range(1000)]
    assert sum("error" in answer for answer in answers) == 10
    assert list(tmp_path.iterdir()) == [out]
