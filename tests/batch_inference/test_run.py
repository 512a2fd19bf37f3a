"""A job resumes after any interruption, answers every row once, and refuses other settings."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.batch_inference.rows import BatchRow
from jaxllm.batch_inference.run import RunSummary, run_job
from jaxllm.batch_inference.tasks import Answer, BatchJob
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import lock_file

ROWS = [BatchRow(n + 1, f"row {n}", {"prompt": [n]}) for n in range(10)]
JOB = BatchJob(task="generate", options={"max_new_tokens": 2})
FACTS = {"model": "one"}


class Answerer:
    """Answers rows two by two, the later one first, until it is interrupted."""

    def __init__(self, stop: int = 99) -> None:
        self.stop, self.lines = stop, list[int]()

    def __call__(self, rows: Iterable[BatchRow]) -> Iterator[tuple[BatchRow, Answer]]:
        left = list(rows)
        for first in range(0, len(left), 2):
            for row in reversed(left[first : first + 2]):
                if len(self.lines) == self.stop:
                    raise KeyboardInterrupt
                self.lines.append(row.line)
                yield row, {"error": "no"} if row.line == 4 else {"text": f"é {row.id}"}


def run(out: Path, answer: Any, job: BatchJob = JOB, rows: Any = ROWS, **more: Any) -> RunSummary:
    return run_job(job, lambda: rows, answer, out, facts=FACTS, **more)


def ids(out: Path) -> list[str]:
    return [json.loads(line)["id"] for line in out.read_text(encoding="utf-8").splitlines()]


def test_answers_are_appended_as_rows_finish(tmp_path: Path) -> None:
    """Answers have their rows' ids, in the order of finishing; a finished job has no more to do."""
    out, messages = tmp_path / "out.jsonl", list[str]()
    assert run(out, Answerer()) == (10, 1)
    order = [2, 1, 4, 3, 6, 5, 8, 7, 10, 9]
    assert ids(out) == [f"row {n - 1}" for n in order]
    lines = out.read_text(encoding="utf-8").splitlines()
    assert lines[0] == '{"id": "row 1", "text": "é row 1"}'
    assert lines[2] == '{"id": "row 3", "error": "no"}'
    again = Answerer()
    assert run(out, again, log=messages.append) == (10, 1)
    assert again.lines == []
    assert messages == [f"{out}: 10 rows are done, 0 to go"]
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.job"}


def test_job_resumes_from_every_byte(tmp_path: Path) -> None:
    """An output that ends at any byte is completed: its whole lines stay, and every row has one."""
    out = tmp_path / "out.jsonl"
    run(out, Answerer())
    whole = out.read_bytes()
    for end in range(len(whole)):
        out.write_bytes(whole[:end])
        lines = whole[:end].count(b"\n")
        answerer = Answerer()
        assert run(out, answerer) == (10, 1)
        assert len(answerer.lines) == 10 - lines
        content = out.read_bytes()
        assert content.startswith(b"".join(whole.splitlines(keepends=True)[:lines]))
        assert sorted(ids(out)) == sorted(row.id for row in ROWS)


def test_interrupted_job_keeps_its_answers(tmp_path: Path) -> None:
    """An answer is in the file before the next row is answered. Without an answer no file stays."""
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(out, Answerer(stop=0))
    assert list(tmp_path.iterdir()) == []
    for stop, done in ((3, 3), (4, 7)):
        with pytest.raises(KeyboardInterrupt):
            run(out, Answerer(stop))
        assert len(ids(out)) == done
    assert run(out, Answerer()) == (10, 1)
    assert sorted(ids(out)) == sorted(row.id for row in ROWS)


def test_job_with_other_settings_is_refused(tmp_path: Path) -> None:
    """Another model, option or input is named in the error, and the answers stay unchanged."""
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(out, Answerer(stop=3))
    before = out.read_bytes()
    longer = BatchJob(task="generate", options={"max_new_tokens": 3})
    with pytest.raises(CheckpointError, match=r"max_new_tokens was 2, is 3\. Use the same"):
        run(out, Answerer(), longer)
    with pytest.raises(CheckpointError, match="belongs to another run: input was"):
        run(out, Answerer(), rows=ROWS[:-1])
    with pytest.raises(CheckpointError, match="model was 'one', is 'two'"):
        run_job(JOB, lambda: ROWS, Answerer(), out, facts={"model": "two"})
    with lock_file(out), pytest.raises(CheckpointError, match="in use by another process"):
        run(out, Answerer())
    assert out.read_bytes() == before
    smaller = BatchJob(task="generate", options=JOB.options, batch_size=1)
    assert run(out, Answerer(), smaller) == (10, 1)


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    """An error for another job's file or a changed line; the file stays as it was."""
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": 1}\n')
    with pytest.raises(CheckpointError, match="exists: name another"):
        run(out, Answerer())
    assert out.read_text() == '{"id": 1}\n'
    out.unlink()
    run(out, Answerer())
    changed = out.read_bytes().replace(b'{"id": "row 4"', b'{"id: "row 4"')
    out.write_bytes(changed)
    with pytest.raises(CheckpointError, match="line 6 is not an answer"):
        run(out, Answerer())
    assert out.read_bytes() == changed
    with pytest.raises(CheckpointError, match="cannot write"):
        run(tmp_path / "nowhere" / "out.jsonl", Answerer())


def test_lost_rows_are_reported(tmp_path: Path) -> None:
    """Rows without an answer raise an error after the others are saved; equal ids do before."""
    out = tmp_path / "out.jsonl"
    with pytest.raises(
        CheckpointError, match=r"not every row was answered: 9 of 10 answers are in"
    ):
        run(out, lambda rows: [(row, {"text": ""}) for row in rows if row.line != 5])
    assert len(ids(out)) == 9
    with pytest.raises(ConfigError, match="line 10 has the id of an earlier row"):
        run(tmp_path / "twice.jsonl", Answerer(), rows=[*ROWS, ROWS[-1]])
    assert not (tmp_path / "twice.jsonl").exists()
