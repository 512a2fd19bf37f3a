"""A whole run: rows in, every one answered once, the output in their order.

Answers go into a journal beside the output, `OUT.parts`, as their groups finish. When all are there
the output is written in one piece and the journal goes. Whatever is killed, and whenever: the same
call goes on, and the output has the bits that it would have had.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxllm import process
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import is_there, locked
from jaxllm.fleet.job import Group, Job
from jaxllm.fleet.journal import Journal
from jaxllm.fleet.rows import Row
from jaxllm.fleet.tasks import Answer, check_task
from jaxllm.fleet.worker import Answered
from jaxllm.fleet.written import check_out, write
from jaxllm.progress import noted_bar

JOURNAL = "journal"


class Workers(Protocol):
    """Where groups are answered: `Here`, `Processes`, `RayData`."""

    def answers(self, job: Job, groups: Sequence[Group], folder: Path) -> Iterator[Answered]:
        """Each group once, in any order. folder: an empty one, for notes."""


class Ran(NamedTuple):
    """rows: in the output. failed: how many of these are errors."""

    rows: int
    failed: int


def run(
    rows: Sequence[Row],
    job: Job,
    workers: Workers,
    out: Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda _: None,
    show_progress: bool | None = None,
) -> Ran:
    """Answer all rows into a new file.

    out: `.parquet`, or else JSON lines. resume: go on with `OUT.parts`, if it is there. say: told
    of what is noteworthy.

    Raises CheckpointError where `out` is there already, there is an unfinished run and `resume` is
    not asked for; and what `answered` raises.
    """
    check_out(out)
    parts = out.with_name(f"{out.name}.parts")
    unfinished = is_there(parts / JOURNAL)
    if is_there(out) and not unfinished:
        raise CheckpointError(f"{out} exists: name another file, or remove it")
    if unfinished and not resume:
        raise CheckpointError(
            f"{parts} has an unfinished run: --resume goes on with it; or remove it"
        )
    failed = 0

    def counted(answers: Iterable[Answer]) -> Iterator[Answer]:
        nonlocal failed
        for answer in answers:
            failed += "error" in answer
            yield answer

    with answered(
        rows, job, workers, parts, say=say, hint="--resume goes on", show_progress=show_progress
    ) as answers:
        write(out, counted(answers), job.task, rows)
    return Ran(len(rows), failed)


@contextlib.contextmanager
def answered(
    rows: Sequence[Row],
    job: Job,
    workers: Workers,
    parts: Path,
    *,
    hint: str,
    say: Callable[[str], None] = lambda _: None,
    show_progress: bool | None = None,
) -> Iterator[Iterator[Answer]]:
    """The answers to all rows, in their order, when all are there. Those that are in `parts` are
    not made again; it goes when the block ends well.

    hint: how to go on, said where the process is ended. Raises ConfigError where there are no rows,
    for a wrong task, and what `workers` raises; CheckpointError where `parts` cannot be written, is
    in use, or has answers to other rows, or of another model or job (by name).
    """
    check_task(job.task, job.options)
    if not rows:
        raise ConfigError("there are no rows to answer")
    groups, facts = job.groups(rows), job.facts(rows)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_folder(parts))
        stack.enter_context(locked(parts / "lock"))
        journal = Journal(parts / JOURNAL, facts, say)
        stack.callback(journal.close)
        left = [group for group in groups if group.number not in journal.places]
        done = len(rows) - sum(len(group.rows) for group in left)
        if done:
            say(f"{parts}: {done} answers are there; {len(rows) - done} to go")
        stack.enter_context(
            process.saying(lambda: f"{done} of {len(rows)} answers are in {parts}; {hint}")
        )
        with noted_bar(job.task, len(rows), show_progress, done) as told:
            for some in _answers(workers, job, left, parts / "begun"):
                journal.put(some)
                done += len(some.rows)
                told(done, "")
        if lost := [group for group in groups if group.number not in journal.places]:
            raise CheckpointError(
                f"{sum(len(group.rows) for group in lost)} of {len(rows)} rows were not answered,"
                f" the first on line {lost[0].rows[0].line}; {hint}"
            )
        yield (answer for group in groups for answer in journal.rows(group.number))
    shutil.rmtree(parts)


@contextlib.contextmanager
def _folder(parts: Path) -> Iterator[None]:
    """A folder for a run; what fails before there is an answer leaves none behind."""
    there = is_there(parts)
    try:
        parts.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {parts}: {error.strerror}") from None
    try:
        yield
    except BaseException:
        if not there and _lines(parts / JOURNAL) < 2:
            shutil.rmtree(parts, ignore_errors=True)
        raise


def _lines(path: Path) -> int:
    """How many lines a file begins with, of the first two."""
    try:
        with open(path, "rb") as file:
            return len(list(islice(file, 2)))
    except OSError:
        return 0


def stream(rows: Sequence[Row], job: Job, workers: Workers) -> Iterator[Answer]:
    """The answers in the order of the rows, as soon as those before are there; nothing is kept.

    Raises ConfigError for a wrong task, and what `workers` raises.
    """
    check_task(job.task, job.options)
    early: dict[int, list[Answer]] = {}
    following = 0
    with tempfile.TemporaryDirectory(prefix="jaxllm-") as folder:
        for some in _answers(workers, job, job.groups(rows), Path(folder) / "begun"):
            early[some.group] = some.rows
            while following in early:
                yield from early.pop(following)
                following += 1


def _answers(workers: Workers, job: Job, groups: list[Group], folder: Path) -> Iterable[Answered]:
    """Each group's answers, with a new folder for notes: what was begun before is another run's."""
    if not groups:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield from workers.answers(job, groups, folder)
