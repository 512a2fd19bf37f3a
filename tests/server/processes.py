"""Servers as processes: start one, wait for its address, end it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

START_SECONDS = 300


class RunningServer(NamedTuple):
    """A server's address, its process and what it wrote to stderr so far."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str]


@contextlib.contextmanager
def start_server(*arguments: str, model: str = "demo:llama") -> Iterator[RunningServer]:
    """Run `jaxllm serve` on a free port within the block, once its model is loaded."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxllm", "serve", model, "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "no_proxy": "*"},
    )
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip())
            if "listening on" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(START_SECONDS)
        (line,) = [line for line in lines if "listening on" in line] or [""]
        assert line, "\n".join(lines)
        yield RunningServer(line.rpartition(" ")[2], process, lines)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        reader.join(10)
        if process.stderr is not None:
            process.stderr.close()


def make_client(url: str, **options: Any) -> Any:
    """Return OpenAI's client for a server."""
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **options)
