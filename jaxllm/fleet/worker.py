"""A worker: a model that answers groups, usually in a separate process.

A row may crash its process: too little memory, a faulty kernel. So a worker counts each attempt
before it starts, in a counter that survives the process (`Tries`). If a group has crashed too often
its rows run one by one. Rows that keep crashing fail, and the others are answered together, without
them. This module does not import JAX before the process is pinned to its cores.
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
"""Loads the model, in the worker: a picklable function, such as a functools.partial."""

THREADS = "PJRT_NPROC"  # read once, when XLA's CPU client is created


class Answered(NamedTuple):
    """The answers to a group's rows, in order, and the model's hash (`identity`)."""

    group: int
    model: str
    rows: list[dict[str, Any]]


class Tries(Protocol):
    """Counts attempts that were begun and not ended; it survives workers."""

    def begin(self, what: str) -> int:
        """Count one more attempt, and return the number since the last `end`."""

    def end(self, what: str) -> None:
        """Reset the count: the attempt came to its end."""


class Counted:
    """`Tries` in a folder, for processes of one machine: a file's size is its count."""

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
        """Return the unfinished attempts of a group; a change means progress."""
        return sorted(x for x in os.listdir(self._folder) if x.partition(".")[0] == str(group))


class Worker:
    """A loaded model with a job."""

    def __init__(self, load: Load, job: Job, tries: Tries) -> None:
        """Load the model. Raises a JaxllmError also for options that it does not support."""
        from jaxllm.fleet.tasks import TASKS

        self._lm, self._job, self._tries = load(), job, tries
        self._task = TASKS[job.task]
        self._task.ready(self._lm, job.options)
        self.model = identity(self._lm)

    def answered(self, group: Group) -> Answered:
        """Answer a group; rows that fail have an error as their answer."""
        whole, answers = str(group.number), {n: _complaint(row) for n, row in enumerate(group.rows)}
        left = [n for n, answer in answers.items() if answer is None]
        found = self._together(whole, [group.rows[n] for n in left])
        if found is None:
            alone = {n: self._alone(f"{whole}.{n}", group.rows[n]) for n in left}
            answers |= {n: answer for n, answer in alone.items() if "error" in answer}
            left = [n for n in left if "error" not in alone[n]]
            found = self._together(f"{whole}.rest", [group.rows[n] for n in left])
            if found is None:  # they crash together, but not one by one
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
        """Answer rows together; None if that raised an error, or crashed too often."""
        if not rows:
            return []
        if self._tries.begin(what) > self._job.tries:
            return None
        try:
            return self._answers(rows)
        except Exception:  # running them one by one shows which row failed, and why
            return None

    def _alone(self, what: str, row: Row) -> dict[str, Any]:
        """Answer a row by itself: return its answer, or an error."""
        if self._tries.begin(what) > self._job.tries:
            late = self._job.timeout
            or_late = "" if late is None else f", or had no answer after {late:g} s"
            return {"error": f"line {row.line} crashed its worker {self._job.tries} times{or_late}"}
        try:
            (answer,) = self._answers([row])
        except Exception as error:
            return {"error": f"line {row.line}: {type(error).__name__}: {error!s:.200}"}
        self._tries.end(what)
        return answer

    def _answers(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return self._task.run(self._lm, self._job, rows)


def take_cores(cores: Sequence[int], threads: int) -> None:
    """Pin this process to cores, and limit XLA's threads. Must run before JAX is imported."""
    os.environ[THREADS] = str(threads)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def identity(lm: "LM") -> str:
    """Return a hash of weights, configuration, formats, kernels and JAX version."""
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
