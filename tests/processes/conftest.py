"""Fixtures that run one `jaxllm` command in two processes, as on two machines."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import ROOT

WITHIN = 60  # seconds within which every process of a failed group must exit


class Ended(NamedTuple):
    """Exit status and output of a process."""

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
    """Return a function that starts one process of a group; kill the rest after the test."""
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
    """Wait up to a minute for a process to exit; return its status and output."""
    out, err = process.communicate(text, timeout=WITHIN)
    return Ended(process.returncode, out, err)


def start_both(start: Start, *arguments: str) -> list[Started]:
    """Start one command in two processes."""
    port = free_port()
    return [start(port, 2, number, *arguments) for number in (0, 1)]


def together(start: Start, *arguments: str) -> list[Ended]:
    """Run one command in two processes until both exit."""
    return [ended(process) for process in start_both(start, *arguments)]


def run_both(program: Sequence[str], *arguments: str, devices: int = 1, **env: str) -> list[Any]:
    """Run a Python program in two processes; return the JSON that each prints on its last line.

    Args:
        program: Python's arguments: `-c` with a program, or `-m` with a module.
        arguments: The program's arguments, after the group's address and the process's number.
        devices: The devices of each process.
        env: Environment variables.
    """
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, *program, address, str(number), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env, "JAX_NUM_CPU_DEVICES": str(devices)},
            cwd=ROOT,
        )
        for number in (0, 1)
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=4 * WITHIN)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


def child_of(process: Started) -> int:
    """Return the id of the process that runs the command under the supervisor."""
    for _ in range(200):
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            if numbers := file.read().split():
                return int(numbers[0])
        time.sleep(0.05)
    raise AssertionError("the supervisor has no child process")


def kill(number: int) -> None:
    os.kill(number, signal.SIGKILL)
