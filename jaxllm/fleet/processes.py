"""Workers as processes of this machine: spawned, each with cores of its own, and replaced.

Each worker is a pool of one (`concurrent.futures`), so that a pool that breaks says which group its
process had; the others go on. Weights in jaxllm's own form are mapped from their file: all workers
read the same pages.
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

from jaxllm import process
from jaxllm.errors import ConfigError
from jaxllm.fleet.job import Group, Job
from jaxllm.fleet.worker import Answered, Counted, Load, Worker, take_cores

_HERE: list[Worker] = []  # of a worker's process: its one worker


class Processes(NamedTuple):
    """Groups over so many processes of this machine. say: told of those that end early. clock: by
    which the job's timeout goes, in seconds.
    """

    load: Load
    workers: int
    say: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic

    def answers(self, job: Job, groups: Sequence[Group], folder: Path) -> Iterator[Answered]:
        """The groups as they finish. folder: for notes of what was begun, empty.

        Raises what loading the model raises, ConfigError where workers end before they are ready.
        """
        waiting, tries = deque(groups), Counted(folder)
        cores = shares(self.workers, job.threads)
        pools: dict[int, ProcessPoolExecutor] = {}
        busy: dict[Future[Any], tuple[int, Group | None]] = {}  # None: it loads
        pids, since = dict[int, int](), dict[int, tuple[list[str], float]]()
        unready = 0

        def start(slot: int) -> None:
            pools[slot] = ProcessPoolExecutor(
                1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(cores[slot], job.threads),
            )
            busy[pools[slot].submit(_load, self.load, job, tries)] = slot, None

        def give(slot: int) -> bool:
            """Give a worker the next group; False where it has ended in between."""
            try:
                busy[pools[slot].submit(_answered, waiting[0])] = slot, waiting[0]
            except BrokenProcessPool:
                pools[slot].shutdown()
                return False
            waiting.popleft()
            since[slot] = [], self.clock()
            return True

        def end_late() -> None:
            """End each worker that has been at one thing for too long: its group comes back."""
            for future, (slot, group) in busy.items():
                if group is None or job.timeout is None or future.done():
                    continue
                now, there = self.clock(), tries.standing(group.number)
                if there != since[slot][0]:
                    since[slot] = there, now
                elif now - since[slot][1] > job.timeout:
                    since[slot] = there, math.inf  # it ends only once
                    self.say(f"a worker had no answer in {job.timeout:g} s, and is ended")
                    os.kill(pids[slot], signal.SIGKILL)

        ending, stack = threading.Event(), contextlib.ExitStack()
        try:
            stack.enter_context(process.saying(lambda: _release(ending)))
            for slot in range(min(self.workers, len(groups))):
                start(slot)
            while busy:
                look = None if job.timeout is None else min(1.0, job.timeout / 4)
                ready = wait(busy, timeout=look, return_when=FIRST_COMPLETED).done
                if ending.is_set():
                    threading.Event().wait()  # the process ends: its workers do not start again
                end_late()
                for done in ready:
                    slot, group = busy.pop(done)
                    ended = isinstance(done.exception(), BrokenProcessPool)
                    found: Any = None if ended else done.result()  # or what loading raised
                    if ended:
                        pools[slot].shutdown()
                        if group is not None:
                            waiting.appendleft(group)
                            lines = f"{group.rows[0].line} to {group.rows[-1].line}"
                            self.say(f"a worker has ended; lines {lines} run again")
                        elif (unready := unready + 1) > job.tries:
                            raise ConfigError(
                                f"{unready} workers in a row ended before they had loaded the"
                                " model: is there too little memory? Give fewer --workers"
                            )
                    elif group is None:
                        unready, pids[slot], found = 0, found, None
                    if waiting and (ended or not give(slot)):
                        start(slot)
                    if found is not None:
                        yield found
        finally:
            stack.close()
            for pool in pools.values():
                pool.shutdown(wait=False, cancel_futures=True)


class Here(NamedTuple):
    """Groups in this process, one after the other: with all its cores, and without a net."""

    load: Load

    def answers(self, job: Job, groups: Sequence[Group], folder: Path) -> Iterator[Answered]:
        """The groups in their order. Raises what loading the model raises."""
        worker = Worker(self.load, job, Counted(folder))
        yield from map(worker.answered, groups)


def available_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def shares(workers: int, threads: int) -> list[list[int]]:
    """Which cores each worker has: `threads` of its own, in turn where there are too few."""
    cores = available_cores()
    return [
        sorted({cores[(worker * threads + i) % len(cores)] for i in range(threads)})
        for worker in range(workers)
    ]


def _begin(cores: list[int], threads: int) -> None:
    """The first thing in a worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver says what a Ctrl-C means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    take_cores(cores, threads)


def _end_with_parent() -> None:
    """A pool's process waits for work for ever, also when nobody is left to send any."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _release(ending: threading.Event) -> str:
    """End the workers and free their semaphores, when an interrupt ends this process.

    It ends without finalizers, and multiprocessing would report what they leave. Returns "":
    nothing is to be printed.
    """
    ending.set()
    for child in multiprocessing.active_children():
        child.kill()
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    return ""


def _load(load: Load, job: Job, tries: Counted) -> int:
    """The process that has loaded it: a Worker is not to be sent back."""
    _HERE[:] = [Worker(load, job, tries)]
    return os.getpid()


def _answered(group: Group) -> Answered:
    return _HERE[0].answered(group)
