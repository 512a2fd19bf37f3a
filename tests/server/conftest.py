"""Shared setup of the server's tests: a running `jaxllm serve`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from threading import Thread
from typing import IO

import pytest

START_SECONDS = 120.0
END_SECONDS = 30.0


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of `jaxllm serve demo:llama`, in processes of its own."""
    with start_server("demo:llama") as address:
        yield address


@contextmanager
def start_server(*arguments: object) -> Iterator[str]:
    """Run `jaxllm serve ARGUMENTS` within the block, and return its address."""
    command = [sys.executable, "-m", "jaxllm", "serve", *map(str, arguments)]
    command += ["--port", "0", "--grace", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: Queue[str] = Queue()
        reader = Thread(target=_read_lines, args=(process.stderr, lines), daemon=True)
        reader.start()
        try:
            yield _read_address(lines)
        finally:
            process.terminate()
            reader.join(END_SECONDS)


def _read_lines(stream: IO[str], lines: "Queue[str]") -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _read_address(lines: "Queue[str]") -> str:
    seen = []
    try:
        while line := lines.get(timeout=START_SECONDS):
            seen.append(line)
            if line.startswith("listening on "):
                return line.removeprefix("listening on ").strip()
    except Empty:
        pass
    raise AssertionError(f"jaxllm serve did not start: {''.join(seen)}")
