"""1,000 prompts while workers and the command are killed: row for row what one process answers."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.batch_inference.killing import killed_at_random, started

OPENINGS = ("Once upon a time", "One day", "There was a girl", "The little dog", "A boy named Tom")
OPTIONS = ("-n", 24, "--temperature", 0.9, "--seed", 11, "--group", 16)
NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'jaxllm[ray]'",
)
WAYS = {
    "processes": ((), lambda line: "spawn_main" in line),
    "ray": (("--ray", "local"), lambda line: line.startswith("ray::MapWorker")),
}
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 rows, one in a hundred of which fails."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [
        {"id": f"row {n}", "prompt": f"{OPENINGS[n % 5]}, {n % 7}"}
        | ({"temperature": -1} if n % 100 == 50 else {})
        for n in range(1000)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def whole(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one process in one go."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    command = started(["batch", "demo:llama", prompts, *OPTIONS, "--workers", 1, "--out", out])
    _, err = command.communicate()
    assert command.returncode == 1, err.decode()  # rows have failed
    return out


@pytest.mark.parametrize("way", ["processes", pytest.param("ray", marks=NEEDS_RAY)])
def test_killed_at_random_it_is_row_for_row_the_same(
    way: str, prompts: Path, whole: Path, tmp_path: Path
) -> None:
    more, is_worker = WAYS[way]
    out = tmp_path / "out.jsonl"
    arguments = ["batch", "demo:llama", prompts, *OPTIONS, "--workers", 2, *more, "--out", out]
    parts = tmp_path / "out.jsonl.parts"
    killed = killed_at_random(arguments, parts, is_worker, workers=12, drivers=3, status=1)
    assert killed == (12, 3)
    assert out.read_bytes() == whole.read_bytes()
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [f"row {n}" for n in range(1000)]
    assert sum("error" in answer for answer in answers) == 10
    assert list(tmp_path.iterdir()) == [out]
