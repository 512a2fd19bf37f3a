"""Run a command while its workers, and the command itself, are killed at random."""

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
    """Return the PIDs of all descendants of a process."""
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
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> str:
    """Return a process's command line, or an empty string if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


# A shell starts background jobs with SIGINT ignored, and jaxllm then ignores it, too.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("jaxllm", run_name="__main__", alter_sys=True)
"""


def start_jaxllm(arguments: Sequence[object]) -> "subprocess.Popen[bytes]":
    """Start `jaxllm ARGUMENTS` as a process that SIGINT interrupts."""
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_path()])},
    )  # fmt: skip


def _path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def run_with_random_kills(
    arguments: Sequence[object],
    parts: Path,
    is_worker: Callable[[str], bool],
    *,
    workers: int,
    drivers: int,
    status: int = 0,
    seed: int = 0,
) -> tuple[int, int]:
    """Run a command to its end, resuming it after each kill.

    A worker is killed some time after every few groups that the journal gains, and now and then
    the command itself, until the requested number of kills is reached.

    Args:
        is_worker: Whether a command line is that of a worker.
        status: Expected exit status of the last command.

    Returns:
        The numbers of killed workers and commands.
    """
    chance, journal = random.Random(seed), parts / "journal"
    killed = [0, 0]
    while True:
        command = start_jaxllm([*arguments, "--resume"])
        target = _lines(journal) + chance.randint(1, 3)
        while command.poll() is None:
            time.sleep(0.02)
            if _lines(journal) < target:
                continue
            time.sleep(chance.random() / 2)
            target = _lines(journal) + chance.randint(1, 4)
            if killed[1] < drivers and killed[0] >= (killed[1] + 1) * workers // (drivers + 1):
                descendants = {pid: command_line(pid) for pid in children(command.pid)}
                command.kill()
                killed[1] += 1
                command.communicate()
                left = time.monotonic() + 60
                while there := [x for x in descendants if is_worker(descendants[x]) and alive(x)]:
                    assert time.monotonic() < left, f"{there} outlive the command"
                    time.sleep(0.05)
                for pid in filter(alive, descendants):  # Ray's agents, which do not notice
                    os.kill(pid, signal.SIGKILL)
                break
            there = sorted(pid for pid in children(command.pid) if is_worker(command_line(pid)))
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
