"""A run resumes after any interruption; changed settings are refused by name."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxllm.batch_inference.job import BatchJob, Group
from jaxllm.batch_inference.rows import read_lines
from jaxllm.batch_inference.runner import run_job
from jaxllm.batch_inference.worker import FileCrashCounter, GroupResult, Worker
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import lock_file

ROWS = read_lines([json.dumps({"prompt": [n], "id": f"row {n}"}) for n in range(10)])
JOB = BatchJob(task="generate", options={"max_new_tokens": 2}, group=3, metadata={"model": "one"})


class ScriptedWorkers:
    """Workers that answer groups in a given order, some twice, until they stop."""

    def __init__(self, *order: int, stop: int = 99, model: str = "m") -> None:
        self.order, self.stop, self.model = order, stop, model
        self.given: list[int] = []

    def answers(
        self, job: BatchJob, groups: Sequence[Group], folder: Path
    ) -> Iterator[GroupResult]:
        assert list(folder.iterdir()) == []
        self.given = [group.number for group in groups]
        there = {group.number: group for group in groups}
        for count, number in enumerate(self.order):
            if count == self.stop:
                raise KeyboardInterrupt
            rows = [
                {"id": r.id, "line": r.line, "text": f"{r.id}: {count}"} for r in there[number].rows
            ]
            yield GroupResult(number, self.model, rows)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_output_follows_input_order_without_duplicates(tmp_path: Path) -> None:
    """Output rows follow the input order, and of two results for a group the first one counts."""
    out = tmp_path / "out.jsonl"
    assert run_job(ROWS, JOB, ScriptedWorkers(2, 0, 3, 2, 1, 0), out) == (10, 0)
    assert ids(out) == [f"row {n}" for n in range(10)]
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert [text[-1] for text in texts] == list("1114440002")  # the first of two answers counts
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("damage", ["none", "cut", "header", "changed", "written"])
def test_interrupted_run_resumes(damage: str, tmp_path: Path) -> None:
    """A run resumes from its journal, also a truncated or damaged one, and recomputes only the
    missing groups.
    """
    out, messages = tmp_path / "out.jsonl", list[str]()
    journal = tmp_path / "out.jsonl.parts" / "journal"
    with pytest.raises(KeyboardInterrupt):
        run_job(ROWS, JOB, ScriptedWorkers(2, 0, 3, 1, stop=3), out)
    assert not out.exists()
    lines = journal.read_bytes().splitlines(keepends=True)
    left = {"none": [1], "cut": [1, 3], "header": [0, 1, 2, 3], "changed": [0, 1], "written": [1]}
    if damage == "cut":  # truncated within a line
        journal.write_bytes(b"".join(lines)[:-9])
    elif damage == "header":
        journal.write_bytes(lines[0][:20])
    elif damage == "changed":
        lines[2] = lines[2].replace(b"row 0", b"row 9")
        journal.write_bytes(b"".join(lines))
    elif damage == "written":  # killed after the output was written
        out.write_text("whole, but for the journal's end")
    with pytest.raises(CheckpointError, match="has an unfinished run: continue it with --resume"):
        run_job(ROWS, JOB, ScriptedWorkers(), out)
    workers = ScriptedWorkers(*left[damage])
    run_job(ROWS, JOB, workers, out, resume=True, log=messages.append)
    assert workers.given == left[damage]
    assert ids(out) == [f"row {n}" for n in range(10)]
    assert any("lines are damaged; their rows" in line for line in messages) == (
        damage == "changed"
    )
    assert any("rows are done" in line for line in messages) == (damage != "header")
    assert list(tmp_path.iterdir()) == [out]


def test_resume_refuses_another_run(tmp_path: Path) -> None:
    """Resuming with another model, option, input or worker model, or a locked or invalid journal,
    raises an error that names it.
    """
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_job(ROWS, JOB, ScriptedWorkers(2, 0, stop=1), out)
    facts: dict[str, Any] = {"task": "generate", "options": JOB.options, "group": 3}
    other = {
        "model was 'one', is 'two'": BatchJob(**facts, metadata={"model": "two"}),
        "option max_new_tokens was 2, is 3": BatchJob(
            **{**facts, "options": {"max_new_tokens": 3}}, metadata=JOB.metadata
        ),
        "threads was 1, is 2": BatchJob(**facts, metadata=JOB.metadata, threads=2),
        "group was 3, is 4": BatchJob(**{**facts, "group": 4}, metadata=JOB.metadata),
    }
    for difference, job in other.items():
        with pytest.raises(CheckpointError, match=f"another run: {difference}. Use the same"):
            run_job(ROWS, job, ScriptedWorkers(), out, resume=True)
    with pytest.raises(CheckpointError, match="another run: input was"):
        run_job(ROWS[:-1], JOB, ScriptedWorkers(), out, resume=True)
    with pytest.raises(CheckpointError, match="answers from another model, version or kernels"):
        run_job(ROWS, JOB, ScriptedWorkers(0, model="n"), out, resume=True)
    with (
        lock_file(tmp_path / "out.jsonl.parts" / "lock"),
        pytest.raises(CheckpointError, match="in use by another process"),
    ):
        run_job(ROWS, JOB, ScriptedWorkers(), out, resume=True)
    journal = tmp_path / "out.jsonl.parts" / "journal"
    original = journal.read_bytes()
    journal.write_bytes(original.replace(b"facts", b"fakes"))
    with pytest.raises(CheckpointError, match="is not a journal"):
        run_job(ROWS, JOB, ScriptedWorkers(), out, resume=True)
    journal.write_bytes(original)
    run_job(ROWS, JOB, ScriptedWorkers(0, 1, 3), out, resume=True)
    with pytest.raises(CheckpointError, match="exists: name another"):
        run_job(ROWS, JOB, ScriptedWorkers(), out, resume=True)
    with pytest.raises(ConfigError, match="no rows"):
        run_job([], JOB, ScriptedWorkers(), tmp_path / "none.jsonl")


def test_empty_run_leaves_no_files(tmp_path: Path) -> None:
    """A run interrupted before its first result leaves no files; one that misses rows keeps its
    journal and raises an error.
    """
    with pytest.raises(KeyboardInterrupt):
        run_job(ROWS, JOB, ScriptedWorkers(0, stop=0), tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        CheckpointError, match=r"7 of 10 rows were not answered, .* line 4; continue with --resume"
    ):
        run_job(ROWS, JOB, ScriptedWorkers(0), tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl.parts" / "journal").exists()


def test_unwritable_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write"):
        run_job(ROWS, JOB, ScriptedWorkers(0, 1, 2, 3), tmp_path / "nowhere" / "out.jsonl")


class SimulatedCrash(BaseException):
    """Simulated end of a worker that runs in this process."""


class CrashingWorker(Worker):
    """A worker that crashes on certain prompts, or on more rows than it can take."""

    def __init__(self, tries: FileCrashCounter, *deadly: int, most: int = 99) -> None:
        self._job, self._tries, self.model = JOB, tries, "m"
        self._deadly, self._most, self.ran = set(deadly), most, list[list[int]]()

    def _run_task(self, rows: Sequence[Any]) -> list[dict[str, Any]]:
        prompts = [row.request["prompt"][0] for row in rows]
        self.ran.append(prompts)
        if self._deadly & set(prompts) or len(rows) > self._most:
            raise SimulatedCrash
        return [{"text": str(p)} for p in prompts]


def answer_with_restarts(worker: CrashingWorker, group: Group) -> GroupResult:
    """Restart a crashed worker until it answers."""
    for _ in range(50):
        try:
            return worker.answer_group(group)
        except SimulatedCrash:
            pass
    raise AssertionError("the group is retried endlessly")


def test_crashing_rows_are_isolated_from_their_group(tmp_path: Path) -> None:
    """Repeated crashes isolate the crashing rows; the other rows of the group are answered,
    together where possible.
    """
    group = JOB.groups(ROWS)[1]  # rows 3, 4, 5
    for deadly, most in (((), 99), ((4,), 99), ((3, 4, 5), 99), ((), 1), ((5,), 1)):
        worker = CrashingWorker(FileCrashCounter(tmp_path), *deadly, most=most)
        found = answer_with_restarts(worker, group)
        assert [row["id"] for row in found.rows] == ["row 3", "row 4", "row 5"]
        for n, row in zip((3, 4, 5), found.rows, strict=True):
            expected = (
                {"error": f"line {n + 1} crashed its worker 3 times"}
                if n in deadly
                else {"text": str(n)}
            )
            assert row == {"id": f"row {n}", "line": n + 1, **expected}
        assert all(worker.ran.count([n]) == 3 for n in deadly)
        assert list(tmp_path.iterdir()) == [], "crash counters were left behind"
        rest = [n for n in (3, 4, 5) if n not in deadly]
        if deadly and most == 99 and rest:
            assert worker.ran[-1] == rest, "the remaining rows do not run together"
