"""Two real processes that run one command of `jaxllm`, as two machines would."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

WITHIN = 60  # seconds, in which whatever happens to a group each of its processes must have ended


class Ended(NamedTuple):
    """How a process ended."""

    status: int
    out: str
    err: str


Started = subprocess.Popen[str]
Start = Callable[..., Started]


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


@pytest.fixture
def start() -> Iterator[Start]:
    """Start one process of a group; what still runs at the end of the test is ended."""
    begun: list[Started] = []

    def started(
        port: int, count: int, number: int, *arguments: str, cwd: Path | None = None
    ) -> Started:
        inherited = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
        group = "--distributed", f"127.0.0.1:{port}", "--processes", str(count)
        begun.append(
            subprocess.Popen(
                [sys.executable, "-m", "jaxllm", *group, "--process", str(number), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**inherited, "JAX_NUM_CPU_DEVICES": "1"},
                cwd=cwd,
            )
        )
        return begun[-1]

    yield started
    for process in begun:
        if process.poll() is None:
            process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait()


def ended(process: Started, text: str | None = None) -> Ended:
    """What a process said until its end, for which it has a minute."""
    out, err = process.communicate(text, timeout=WITHIN)
    return Ended(process.returncode, out, err)


def together(start: Start, *arguments: str) -> list[Ended]:
    """The same command in two processes, to its end."""
    port = free_port()
    every = [start(port, 2, number, *arguments) for number in (0, 1)]
    return [ended(process) for process in every]


def child_of(process: Started) -> int:
    """The process that runs the command under the guard that was started."""
    for _ in range(200):
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            if numbers := file.read().split():
                return int(numbers[0])
        time.sleep(0.05)
    raise AssertionError("no child")


def kill(number: int) -> None:
    os.kill(number, signal.SIGKILL)
