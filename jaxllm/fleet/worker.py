"""A worker: a model in a process of its own, and groups answered by it.

A row may end the process that it runs in: memory that is not there, a kernel that faults. So a
worker says what it begins before it does, to what outlives it (`Tries`). A group that has ended its
worker too often has its rows run one by one; those that end it again and again have failed, and the
others are answered without them, together as before. Nothing here imports JAX before the process
has been given its cores.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jaxllm.fleet.job import Group, Job
from jaxllm.fleet.rows import Row

if TYPE_CHECKING:
    from jaxllm.api import LM

Load = Callable[[], "LM"]
"""Loads the model, in the worker: a function that can be pickled, as functools.partial is."""

THREADS = "PJRT_NPROC"  # read once, when XLA's CPU client is made


class Answered(NamedTuple):
    """The answers to a group's rows, in their order, and whose they are (`identity`)."""

    group: int
    model: str
    rows: list[dict[str, Any]]


class Tries(Protocol):
    """How often something was begun and not ended, wherever; it outlives workers."""

    def begin(self, what: str) -> int:
        """Count one more beginning; returns how many there were since the last `end`."""

    def end(self, what: str) -> None:
        """It came to its end: nothing is counted any more."""


class Counted:
    """Tries in a folder: a file for each, as long as they are many. One machine's processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, what: str) -> int:
        """See `Tries`."""
        descriptor = os.open(self._folder / what, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, b".")
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def end(self, what: str) -> None:
        """See `Tries`."""
        (self._folder / what).unlink(missing_ok=True)

    def standing(self, group: int) -> list[str]:
        """What of a group has begun and not ended: another list where there was progress."""
        return sorted(x for x in os.listdir(self._folder) if x.partition(".")[0] == str(group))


class Worker:
    """A loaded model with a job."""

    def __init__(self, load: Load, job: Job, tries: Tries) -> None:
        """Raises what loading raises, and a JaxllmError for options that the model refuses."""
        from jaxllm.fleet.tasks import TASKS

        self._lm, self._job, self._tries = load(), job, tries
        self._task = TASKS[job.task]
        self._task.ready(self._lm, job.options)
        self.model = identity(self._lm)

    def answered(self, group: Group) -> Answered:
        """The answers to a group; an error in the place of each row that fails."""
        whole, answers = str(group.number), {n: _complaint(row) for n, row in enumerate(group.rows)}
        left = [n for n, answer in answers.items() if answer is None]
        found = self._together(whole, [group.rows[n] for n in left])
        if found is None:
            alone = {n: self._alone(f"{whole}.{n}", group.rows[n]) for n in left}
            answers |= {n: answer for n, answer in alone.items() if "error" in answer}
            left = [n for n in left if "error" not in alone[n]]
            found = self._together(f"{whole}.rest", [group.rows[n] for n in left])
            if found is None:  # too much together, and not one by one
                found = [self._answers([group.rows[n]])[0] for n in left]
            for what in (f"{whole}.rest", *(f"{whole}.{n}" for n in alone)):
                self._tries.end(what)
        self._tries.end(whole)
        answers |= dict(zip(left, found, strict=True))
        named = [
            {"id": row.id, "line": row.line, **(answers[n] or {})}
            for n, row in enumerate(group.rows)
        ]
        return Answered(group.number, self.model, named)

    def _together(self, what: str, rows: Sequence[Row]) -> list[dict[str, Any]] | None:
        """The answers to rows; None where they failed together, or ended workers too often."""
        if not rows:
            return []
        if self._tries.begin(what) > self._job.tries:
            return None
        try:
            return self._answers(rows)
        except Exception:  # of which row, and why, is seen when they run one by one
            return None

    def _alone(self, what: str, row: Row) -> dict[str, Any]:
        """A row by itself, to find out whether it fails: its answer, or its error."""
        if self._tries.begin(what) > self._job.tries:
            late = self._job.timeout
            or_late = "" if late is None else f", or had no answer in {late:g} s"
            return {"error": f"line {row.line} ended its worker {self._job.tries} times{or_late}"}
        try:
            (answer,) = self._answers([row])
        except Exception as error:
            return {"error": f"line {row.line}: {type(error).__name__}: {error!s:.200}"}
        self._tries.end(what)
        return answer

    def _answers(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return self._task.run(self._lm, self._job, rows)


def take_cores(cores: Sequence[int], threads: int) -> None:
    """Keep this process to its cores and XLA to as many threads; before JAX is imported."""
    os.environ[THREADS] = str(threads)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def identity(lm: "LM") -> str:
    """Whose answers these are: every bit of the weights, configuration, formats, kernels, JAX."""
    import jax

    from jaxllm.cache.files import fingerprint
    from jaxllm.ops import native

    said = (
        fingerprint(lm.params), lm.config, lm.model.precision, lm.adapters, lm.adapter,
        sorted(lm.generation.items()), native.isa() if native.enabled() else None,
        jax.default_backend(), jax.__version__,
    )  # fmt: skip
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _complaint(row: Row) -> dict[str, Any] | None:
    return None if row.complaint is None else {"error": row.complaint}
