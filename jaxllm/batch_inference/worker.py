"""A worker: a model that answers groups, usually in a separate process.

A row may crash its process: too little memory, a faulty kernel. So a worker counts each attempt
before it starts, in a counter that survives the process (`CrashCounter`). If a group has crashed
too often its rows run one by one. Rows that keep crashing fail, and the others are answered
together, without them. This module does not import JAX before the process is pinned to its cores.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jaxllm.batch_inference.job import BatchJob, Group
from jaxllm.batch_inference.rows import Row

if TYPE_CHECKING:
    from jaxllm.lm import LM

Load = Callable[[], "LM"]
"""Loads the model, in the worker: a picklable function, such as a functools.partial."""

THREADS_VARIABLE = "PJRT_NPROC"  # read once, when XLA's CPU client is created


class GroupResult(NamedTuple):
    """The answers to a group's rows, in order, and the model's hash (`model_identity`)."""

    group: int
    model: str
    rows: list[dict[str, Any]]


class CrashCounter(Protocol):
    """Counts attempts that were begun and not ended; it survives workers."""

    def begin(self, name: str) -> int:
        """Count one more attempt, and return the number since the last `end`."""

    def end(self, name: str) -> None:
        """Reset the count: the attempt came to its end."""


class FileCrashCounter:
    """`CrashCounter` in a folder, for processes of one machine: a file's size is its count."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, name: str) -> int:
        """See `CrashCounter`."""
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, b".")
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def end(self, name: str) -> None:
        """See `CrashCounter`."""
        (self._folder / name).unlink(missing_ok=True)

    def list_unfinished(self, group: int) -> list[str]:
        """Return the unfinished attempts of a group; a change means progress."""
        return sorted(x for x in os.listdir(self._folder) if x.partition(".")[0] == str(group))


class Worker:
    """A loaded model with a job."""

    def __init__(self, load: Load, job: BatchJob, tries: CrashCounter) -> None:
        """Load the model. Raises a JaxllmError also for options that it does not support."""
        from jaxllm.batch_inference.tasks import TASKS

        self._lm, self._job, self._tries = load(), job, tries
        self._task = TASKS[job.task]
        self._task.check(self._lm, job.options)
        self.model = model_identity(self._lm)

    def answer_group(self, group: Group) -> GroupResult:
        """Answer a group; rows that fail have an error as their answer."""
        name, answers = str(group.number), {n: _row_error(row) for n, row in enumerate(group.rows)}
        left = [n for n, answer in answers.items() if answer is None]
        results = self._try_rows(name, [group.rows[n] for n in left])
        if results is None:
            alone = {n: self._try_row(f"{name}.{n}", group.rows[n]) for n in left}
            answers |= {n: answer for n, answer in alone.items() if "error" in answer}
            left = [n for n in left if "error" not in alone[n]]
            results = self._try_rows(f"{name}.rest", [group.rows[n] for n in left])
            if results is None:  # they crash together, but not one by one
                results = [self._run_task([group.rows[n]])[0] for n in left]
            for what in (f"{name}.rest", *(f"{name}.{n}" for n in alone)):
                self._tries.end(what)
        self._tries.end(name)
        answers |= dict(zip(left, results, strict=True))
        named = [
            {"id": row.id, "line": row.line, **(answers[n] or {})}
            for n, row in enumerate(group.rows)
        ]
        return GroupResult(group.number, self.model, named)

    def _try_rows(self, what: str, rows: Sequence[Row]) -> list[dict[str, Any]] | None:
        """Answer rows together; None if that raised an error, or crashed too often."""
        if not rows:
            return []
        if self._tries.begin(what) > self._job.tries:
            return None
        try:
            return self._run_task(rows)
        except Exception:  # running them one by one shows which row failed, and why
            return None

    def _try_row(self, what: str, row: Row) -> dict[str, Any]:
        """Answer a row by itself: return its answer, or an error."""
        if self._tries.begin(what) > self._job.tries:
            late = self._job.timeout
            or_late = "" if late is None else f", or had no answer after {late:g} s"
            return {"error": f"line {row.line} crashed its worker {self._job.tries} times{or_late}"}
        try:
            (answer,) = self._run_task([row])
        except Exception as error:
            return {"error": f"line {row.line}: {type(error).__name__}: {error!s:.200}"}
        self._tries.end(what)
        return answer

    def _run_task(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return self._task.run(self._lm, self._job, rows)


def take_cores(cores: Sequence[int], threads: int) -> None:
    """Pin this process to cores, and limit XLA's threads. Must run before JAX is imported."""
    os.environ[THREADS_VARIABLE] = str(threads)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def model_identity(lm: "LM") -> str:
    """Return a hash of weights, configuration, formats, kernels and JAX version."""
    import jax

    from jaxllm.cache.files import fingerprint
    from jaxllm.ops import native

    facts = (
        fingerprint(lm.params), lm.config, lm.model.precision, lm.adapters, lm.adapter,
        sorted(lm.generation.items()), native.isa() if native.is_enabled() else None,
        jax.default_backend(), jax.__version__,
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _row_error(row: Row) -> dict[str, Any] | None:
    return None if row.complaint is None else {"error": row.complaint}
