"""Workers as processes of this machine, each pinned to cores, and restarted after a crash.

Each worker is a pool of one process (`concurrent.futures`), so a broken pool identifies the group
that it ran, and the others continue. Weights in jaxllm's native format are memory-mapped: all
workers share the same pages.
"""

import contextlib
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.batch_inference.job import BatchJob, Group
from jaxllm.batch_inference.worker import FileCrashCounter, GroupResult, Load, Worker, take_cores
from jaxllm.errors import ConfigError
from jaxllm.runtime import signals

_PROCESS_WORKER: list[Worker] = []  # in a worker process, its worker


class ProcessWorkers(NamedTuple):
    """Answers groups in several processes of this machine.

    log: takes messages about crashed and killed workers. clock: seconds, for the job's timeout.
    """

    load: Load
    workers: int
    log: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic

    def answers(
        self, job: BatchJob, groups: Sequence[Group], folder: Path
    ) -> Iterator[GroupResult]:
        """Yield the groups as they finish. folder: an empty one, for crash counters.

        Raises what loading the model raises, ConfigError if workers crash while they load it.
        """
        waiting, tries = deque(groups), FileCrashCounter(folder)
        cores = assign_cores(self.workers, job.threads)
        pools: dict[int, ProcessPoolExecutor] = {}
        busy: dict[Future[Any], tuple[int, Group | None]] = {}  # None: it loads the model
        pids, since = dict[int, int](), dict[int, tuple[list[str], float]]()
        unready = 0

        def start(slot: int) -> None:
            pools[slot] = ProcessPoolExecutor(
                1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_init_process,
                initargs=(cores[slot], job.threads),
            )
            busy[pools[slot].submit(_load_worker, self.load, job, tries)] = slot, None

        def submit_next(slot: int) -> bool:
            """Give a worker the next group; False if it has crashed in between."""
            try:
                busy[pools[slot].submit(_answer_group, waiting[0])] = slot, waiting[0]
            except BrokenProcessPool:
                pools[slot].shutdown()
                return False
            waiting.popleft()
            since[slot] = [], self.clock()
            return True

        def end_stalled() -> None:
            """Kill each worker that made no progress for too long; its group runs again."""
            for future, (slot, group) in busy.items():
                if group is None or job.timeout is None or future.done():
                    continue
                now, there = self.clock(), tries.list_unfinished(group.number)
                if there != since[slot][0]:
                    since[slot] = there, now
                elif now - since[slot][1] > job.timeout:
                    since[slot] = there, math.inf  # kill it only once
                    self.log(f"a worker had no answer after {job.timeout:g} s and was killed")
                    os.kill(pids[slot], signal.SIGKILL)

        ending, stack = threading.Event(), contextlib.ExitStack()
        try:
            stack.enter_context(signals.exit_message(lambda: _end_workers(ending)))
            for slot in range(min(self.workers, len(groups))):
                start(slot)
            while busy:
                look = None if job.timeout is None else min(1.0, job.timeout / 4)
                ready = wait(busy, timeout=look, return_when=FIRST_COMPLETED).done
                if ending.is_set():
                    threading.Event().wait()  # the process ends: do not restart workers
                end_stalled()
                for done in ready:
                    slot, group = busy.pop(done)
                    ended = isinstance(done.exception(), BrokenProcessPool)
                    found: Any = None if ended else done.result()  # raises what loading raised
                    if ended:
                        pools[slot].shutdown()
                        if group is not None:
                            waiting.appendleft(group)
                            lines = f"{group.rows[0].line} to {group.rows[-1].line}"
                            self.log(f"a worker has crashed; lines {lines} run again")
                        elif (unready := unready + 1) > job.tries:
                            raise ConfigError(
                                f"{unready} workers in a row crashed while they loaded the model,"
                                " perhaps for lack of memory: use fewer --workers"
                            )
                    elif group is None:
                        unready, pids[slot], found = 0, found, None
                    if waiting and (ended or not submit_next(slot)):
                        start(slot)
                    if found is not None:
                        yield found
        finally:
            stack.close()
            for pool in pools.values():
                pool.shutdown(wait=False, cancel_futures=True)


class InProcessWorkers(NamedTuple):
    """Runs groups sequentially in this process; a crash ends the run."""

    load: Load

    def answers(
        self, job: BatchJob, groups: Sequence[Group], folder: Path
    ) -> Iterator[GroupResult]:
        """Yield the groups in order. Raises what loading the model raises."""
        worker = Worker(self.load, job, FileCrashCounter(folder))
        yield from map(worker.answer_group, groups)


def available_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def assign_cores(workers: int, threads: int) -> list[list[int]]:
    """Return the cores of each worker: `threads` each, shared round-robin if there are too few."""
    cores = available_cores()
    return [
        sorted({cores[(worker * threads + i) % len(cores)] for i in range(threads)})
        for worker in range(workers)
    ]


def _init_process(cores: list[int], threads: int) -> None:
    """Initialize a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    take_cores(cores, threads)


def _end_with_parent() -> None:
    """Exit when the parent ends; otherwise the process would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _end_workers(ending: threading.Event) -> str:
    """Kill the workers and free their semaphores when an interrupt ends this process.

    It ends without finalizers, and multiprocessing would report leaked semaphores. Returns "", so
    nothing is printed.
    """
    ending.set()
    for child in multiprocessing.active_children():
        child.kill()
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    return ""


def _load_worker(load: Load, job: BatchJob, tries: FileCrashCounter) -> int:
    """Load the worker into this process, and return the process id."""
    _PROCESS_WORKER[:] = [Worker(load, job, tries)]
    return os.getpid()


def _answer_group(group: Group) -> GroupResult:
    return _PROCESS_WORKER[0].answer_group(group)
