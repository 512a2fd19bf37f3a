"""Commands that measure a model over two processes: what they say is what one process says."""

import json
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.processes.conftest import Start, together


@pytest.mark.full
def test_recall_counts_what_one_process_counts(
    start: Start, run: Run, shallow_demos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "recall.json"
    # In float16, as the file is, two rows of a batch alone differ from the same among four by 2e-4.
    asked = "recall", str(shallow_demos / "llama"), "--lengths", "56,72", "--tries", "4"
    more = (
        "--dtype",
        "float32",
        "--texts",
        "story",
        "--policies",
        "full,heavy,pooled",
        "--depths",
        "0,1",
        "--slots",
        "32",
    )
    status, said, err = run(*asked, *more, "--json")
    assert status == 0, err
    expected = json.loads(said)["cells"]
    (status, said, err), other = together(
        start, *asked, *more, "--json", "--mesh", "data=2", "--out", str(out)
    )
    assert status == 0, err
    assert other == (0, "", "")
    assert json.loads(out.read_text()) == json.loads(said)
    assert json.loads(said)["cells"] == [
        {
            name: pytest.approx(x, rel=1e-5, abs=1e-6) if isinstance(x, float) else x
            for name, x in cell.items()
        }
        for cell in expected
    ]


@pytest.mark.full
def test_bench_times_all_processes_and_one_says_it(start: Start, shallow_demos: Path) -> None:
    asked = "bench", "-m", str(shallow_demos / "llama"), "--mesh", "stage=2", "--output", "json"
    sizes = "--prompts", "8", "--decode", "4", "--depths", "0,8", "--batches", "1", "-r", "1"
    (status, said, err), other = together(start, *asked, *sizes)
    assert status == 0, err
    assert other == (0, "", "")
    rows = json.loads(said)["rows"]
    assert [row["test"] for row in rows] == ["pp8", "tg4", "tg4 @ d8"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
