"""A whole run: answers every row once and writes the output in input order.

Answers are appended to a journal in `OUT.parts` as their groups finish. At the end the output is
written atomically and the journal is removed. After a kill, at any time, the same call resumes, and
the output has the same bits as that of an uninterrupted run.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxllm.batch_inference.job import BatchJob, Group
from jaxllm.batch_inference.output import check_out, write_answers
from jaxllm.batch_inference.rows import Row
from jaxllm.batch_inference.tasks import Answer, check_task
from jaxllm.batch_inference.worker import GroupResult
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import JsonLog, lock_file, path_exists
from jaxllm.runtime import signals
from jaxllm.runtime.progress import status_bar

JOURNAL = "journal"


class Workers(Protocol):
    """Answers groups: `InProcessWorkers`, `Processes`, `RayWorkers`."""

    def answers(
        self, job: BatchJob, groups: Sequence[Group], folder: Path
    ) -> Iterator[GroupResult]:
        """Yield each group once, in any order. folder: an empty one, for crash counters."""


class RunSummary(NamedTuple):
    """The number of rows in the output, and of those that are errors."""

    rows: int
    failed: int


class SavedAnswers:
    """Finished groups in a journal, one line each; of several for a group the first counts.

    model: the hash of the model that answered. lines: the line of each group.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], log: Callable[[str], None]) -> None:
        """Open or create the journal. Raises CheckpointError for that of another run."""
        self.journal, self.model = JsonLog(path, facts), ""
        self.lines: dict[int, int] = {}
        damaged = 0
        for number, record in enumerate(self.journal):
            if record is None:
                damaged += 1
                continue
            self.model = self.model or record["model"]
            self.lines.setdefault(record["group"], number)
        if damaged:
            log(f"{path}: {damaged} lines are damaged; their rows run again")

    def put(self, result: GroupResult) -> None:
        """Append a group's answers, unless they are there. Returns after they are on the disk.

        Raises CheckpointError if they are from another model than the answers before.
        """
        if self.model and result.model != self.model:
            raise CheckpointError(
                f"{self.journal.path} has answers from another model, version or kernels: use the"
                " same ones, or remove it"
            )
        self.model = result.model
        if result.group not in self.lines:
            self.lines[result.group] = len(self.journal)
            self.journal.append(result._asdict())

    def rows(self, group: int) -> list[Answer]:
        """Read a group's answers. Raises CheckpointError if they were changed."""
        record = self.journal[self.lines[group]]
        if record is None:
            raise CheckpointError(f"{self.journal.path} was changed while it was read")
        rows: list[Answer] = record["rows"]
        return rows


def run_job(
    rows: Sequence[Row],
    job: BatchJob,
    workers: Workers,
    out: Path,
    *,
    resume: bool = False,
    log: Callable[[str], None] = lambda _: None,
    show_progress: bool | None = None,
) -> RunSummary:
    """Answer all rows and write a new file.

    Args:
      out: a `.parquet` file, otherwise JSON lines.
      resume: continue from `OUT.parts`, if it exists.
      log: takes messages to log.

    Raises CheckpointError if `out` exists, or if there is an unfinished run and `resume` is not
    set; and what `answer_rows` raises.
    """
    check_out(out)
    parts = out.with_name(f"{out.name}.parts")
    unfinished = path_exists(parts / JOURNAL)
    if path_exists(out) and not unfinished:
        raise CheckpointError(f"{out} exists: name another file, or remove it")
    if unfinished and not resume:
        raise CheckpointError(
            f"{parts} has an unfinished run: continue it with --resume, or remove it"
        )
    failed = 0

    def count_failures(answers: Iterable[Answer]) -> Iterator[Answer]:
        nonlocal failed
        for answer in answers:
            failed += "error" in answer
            yield answer

    with answer_rows(
        rows,
        job,
        workers,
        parts,
        log=log,
        hint="continue with --resume",
        show_progress=show_progress,
    ) as answers:
        write_answers(out, count_failures(answers), job.task, rows)
    return RunSummary(len(rows), failed)


@contextlib.contextmanager
def answer_rows(
    rows: Sequence[Row],
    job: BatchJob,
    workers: Workers,
    parts: Path,
    *,
    hint: str,
    log: Callable[[str], None] = lambda _: None,
    show_progress: bool | None = None,
) -> Iterator[Iterator[Answer]]:
    """Answer all rows, and yield an iterator over the answers in input order.

    Answers in `parts` are used again. It is removed if the block ends without an error.

    Args:
      hint: how to resume, for the message when the process is interrupted.

    Raises:
      ConfigError: if there are no rows, for an invalid task, and what `workers` raises.
      CheckpointError: if `parts` cannot be written, is in use, or has answers to other rows or from
        another model or job.
    """
    check_task(job.task, job.options)
    if not rows:
        raise ConfigError("there are no rows to answer")
    groups, facts = job.groups(rows), job.facts(rows)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_parts_folder(parts))
        stack.enter_context(lock_file(parts / "lock"))
        saved = SavedAnswers(parts / JOURNAL, facts, log)
        stack.callback(saved.journal.close)
        left = [group for group in groups if group.number not in saved.lines]
        done = len(rows) - sum(len(group.rows) for group in left)
        if done:
            log(f"{parts}: {done} rows are done, {len(rows) - done} to go")
        stack.enter_context(
            signals.exit_message(lambda: f"{done} of {len(rows)} answers are in {parts}; {hint}")
        )
        with status_bar(job.task, len(rows), show_progress, done) as update:
            for result in _answer_groups(workers, job, left, parts / "begun"):
                saved.put(result)
                done += len(result.rows)
                update(done, "")
        if lost := [group for group in groups if group.number not in saved.lines]:
            raise CheckpointError(
                f"{sum(len(group.rows) for group in lost)} of {len(rows)} rows were not answered,"
                f" the first on line {lost[0].rows[0].line}; {hint}"
            )
        yield (answer for group in groups for answer in saved.rows(group.number))
    shutil.rmtree(parts)


@contextlib.contextmanager
def _parts_folder(parts: Path) -> Iterator[None]:
    """Create a run's folder; remove it again if the run fails before there is an answer."""
    there = path_exists(parts)
    try:
        parts.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {parts}: {error.strerror}") from None
    try:
        yield
    except BaseException:
        if not there and _count_lines(parts / JOURNAL) < 2:
            shutil.rmtree(parts, ignore_errors=True)
        raise


def _count_lines(path: Path) -> int:
    """Return the number of lines of a file, at most 2."""
    try:
        with open(path, "rb") as file:
            return len(list(islice(file, 2)))
    except OSError:
        return 0


def stream(rows: Sequence[Row], job: BatchJob, workers: Workers) -> Iterator[Answer]:
    """Yield the answers in the order of the rows, as early as possible; nothing is saved.

    Raises ConfigError for an invalid task, and what `workers` raises.
    """
    check_task(job.task, job.options)
    early: dict[int, list[Answer]] = {}
    following = 0
    with tempfile.TemporaryDirectory(prefix="jaxllm-") as folder:
        for result in _answer_groups(workers, job, job.groups(rows), Path(folder) / "begun"):
            early[result.group] = result.rows
            while following in early:
                yield from early.pop(following)
                following += 1


def _answer_groups(
    workers: Workers, job: BatchJob, groups: list[Group], folder: Path
) -> Iterable[GroupResult]:
    """Yield each group's answers, with new crash counters: those of earlier runs do not count."""
    if not groups:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield from workers.answers(job, groups, folder)
