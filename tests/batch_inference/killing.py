"""Workers killed at random while a command runs, and the command too."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.conftest import ROOT


def children(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    found, left = set[int](), [pid]
    while left:
        parent = left.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                some = {int(word) for word in task.read_text().split()}
            except OSError:
                continue
            left += some - found
            found |= some
    return found


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def said_of(pid: int) -> str:
    """A process's command line; empty where it has none any more."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def started(arguments: Sequence[object]) -> "subprocess.Popen[bytes]":
    """`jaxllm ARGUMENTS`, as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxllm", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_path()])},
    )  # fmt: skip


def _path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def killed_at_random(
    arguments: Sequence[object],
    parts: Path,
    is_worker: Callable[[str], bool],
    *,
    workers: int,
    drivers: int,
    status: int = 0,
    seed: int = 0,
) -> tuple[int, int]:
    """Run a command to its end, going on whenever it was killed.

    A worker is killed some time after each few groups more in the journal, and now and then the
    command itself, until there were as many kills as asked for. is_worker: says of a command line
    whether it is one. status: the command's in the end. Returns how many workers and commands were
    killed.
    """
    chance, journal = random.Random(seed), parts / "journal"
    killed = [0, 0]
    while True:
        command = started([*arguments, "--resume"])
        target = _lines(journal) + chance.randint(1, 3)
        while command.poll() is None:
            time.sleep(0.02)
            if _lines(journal) < target:
                continue
            time.sleep(chance.random() / 2)
            target = _lines(journal) + chance.randint(1, 4)
            if killed[1] < drivers and killed[0] >= (killed[1] + 1) * workers // (drivers + 1):
                below = {pid: said_of(pid) for pid in children(command.pid)}
                command.kill()
                killed[1] += 1
                command.communicate()
                left = time.monotonic() + 60
                while there := [x for x in below if is_worker(below[x]) and alive(x)]:
                    assert time.monotonic() < left, f"{there} outlive the command"
                    time.sleep(0.05)
                for pid in filter(alive, below):  # Ray's agents, which do not see it
                    os.kill(pid, signal.SIGKILL)
                break
            there = sorted(pid for pid in children(command.pid) if is_worker(said_of(pid)))
            if there and killed[0] < workers:
                os.kill(chance.choice(there), signal.SIGKILL)
                killed[0] += 1
        else:
            _, err = command.communicate()
            assert command.returncode == status, err.decode()
            return killed[0], killed[1]


def _lines(journal: Path) -> int:
    try:
        return journal.read_bytes().count(b"\n")
    except OSError:
        return 0
