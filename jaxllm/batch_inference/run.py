"""A batch job over a file: answers are appended under their ids, as rows finish.

An answer is a line of JSON, written at once. After a kill at any time, the same call removes an
incomplete last line and answers the rows that have none. OUT.job holds the settings: a job resumes
only with the same ones.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.batch_inference.rows import BatchRow, check_rows, format_id
from jaxllm.batch_inference.tasks import Answer, BatchJob
from jaxllm.errors import CheckpointError
from jaxllm.files import lock_file, open_regular, path_exists, read_json, write_json
from jaxllm.files.json_log import check_facts
from jaxllm.runtime import signals
from jaxllm.runtime.progress import status_bar

SYNC_S = 1.0  # seconds between writes to the disk; what a process has written survives its kill


class RunSummary(NamedTuple):
    """The number of rows in the output, and of errors among them."""

    rows: int
    failed: int


def format_answer(row_id: Any, answer: Answer) -> str:
    """Return an answer as a line of JSON."""
    return json.dumps({"id": row_id, **answer}, ensure_ascii=False) + "\n"


def run_job(
    job: BatchJob,
    read: Callable[[], Iterable[BatchRow]],
    answer: Callable[[Iterator[BatchRow]], Iterable[tuple[BatchRow, Answer]]],
    out: Path,
    *,
    facts: Mapping[str, Any],
    log: Callable[[str], None] = lambda _: None,
    show_progress: bool | None = None,
) -> RunSummary:
    """Append the answers to all rows to a file, in the order in which they finish.

    Args:
        read: returns the rows; called twice, since all ids are checked first.
        answer: answers rows, in any order, and reads them as it has room.
        facts: what the answers depend on besides rows and job, as JSON values: the model's name.

    Raises:
        ConfigError: if there are no rows, or two have the same id.
        CheckpointError: if the file has other content or answers of another job, is in use by
            another process, or cannot be written.
    """
    total, digest = check_rows(read())
    options = {f"option {name}": value for name, value in sorted(job.options.items())}
    about = {"task": job.task, **options, **facts, "input": digest, "jaxllm": version("jaxllm")}
    with _open_answers(out, json.loads(json.dumps(about))) as answers:
        ids = answers.ids

        def describe_progress() -> str:
            return f"{len(ids)} of {total} answers are in {out}; the same command continues"

        if ids:
            log(f"{out}: {len(ids)} rows are done, {total - len(ids)} to go")
        left = (row for row in read() if format_id(row.id) not in ids)
        with (
            signals.exit_message(describe_progress),
            status_bar(job.task, total, show_progress, len(ids)) as update,
        ):
            for row, reply in answer(left) if len(ids) < total else ():
                answers.append(row.id, reply)
                update(len(ids), "")
        if len(ids) < total:
            raise CheckpointError(f"not every row was answered: {describe_progress()}")
    return RunSummary(total, answers.failed)


def settings_file(out: Path) -> Path:
    """Return the path of the settings of the job that writes `out`."""
    return out.with_name(f"{out.name}.job")


@contextlib.contextmanager
def _open_answers(out: Path, facts: Mapping[str, Any]) -> Iterator["_AnswerFile"]:
    """Lock and open the file of answers for a job.

    If the block raises an error before the first answer, no file is left.
    """
    settings = settings_file(out)
    with lock_file(out):
        if not os.path.getsize(out):
            write_json(settings, facts)
        elif path_exists(settings):
            check_facts(out, read_json(settings), facts)
        else:
            raise CheckpointError(f"{out} exists: name another file, or remove it")
        answers = _AnswerFile(out)
        try:
            yield answers
        except BaseException:
            if not answers.ids:
                out.unlink()
                settings.unlink()
            raise
        finally:
            answers.close()


class _AnswerFile:
    """An output file that is open for appending.

    ids: those of its answers. failed: the number of answers that are errors.
    """

    def __init__(self, path: Path) -> None:
        """Read the ids, and cut away an incomplete last line.

        Raises CheckpointError if another line is no answer, or the file cannot be written.
        """
        self.path, self.ids, self.failed = path, set[str](), 0
        self._synced, end = time.monotonic(), 0
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                self._count(_parse_answer(line, f"{path}, line {number}"))
                end += len(line)
        with self._name_errors():
            os.truncate(path, end)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def append(self, row_id: Any, answer: Answer) -> None:
        """Write an answer. Raises CheckpointError if that fails."""
        rest = format_answer(row_id, answer).encode()
        with self._name_errors():
            while rest:
                rest = rest[self._file.write(rest) :]
            if time.monotonic() - self._synced > SYNC_S:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        self._count({"id": row_id, **answer})

    def close(self) -> None:
        """Write everything to the disk, and close the file."""
        with self._name_errors(), self._file:
            os.fsync(self._file.fileno())

    def _count(self, line: Answer) -> None:
        self.ids.add(format_id(line["id"]))
        self.failed += "error" in line

    @contextlib.contextmanager
    def _name_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from None


def _parse_answer(line: bytes, where: str) -> Answer:
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        if isinstance(value, dict) and "id" in value:
            return value
    raise CheckpointError(f"{where} is not an answer of jaxllm batch: remove the line")
