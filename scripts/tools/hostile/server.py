"""A `jaxllm serve` in a process: starting it, its metrics, memory, open files, its end."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.tools.hostile.client import Answer, Connection, encode_request

START_SECONDS = 300.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """Resources of the HTTP process and of the model's. cache_mb: entries of its prefix cache."""

    http_mb: float
    model_mb: float
    cache_mb: float
    http_files: int
    model_files: int
    tasks: int
    running: int
    waiting: int
    restarts: int

    @property
    def own_mb(self) -> float:
        """What the model's process uses besides its prefix cache."""
        return self.model_mb - self.cache_mb


class Server:
    """A running server. log: the file with its stderr."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process, self.log = process, log
        self.host, self.port = "127.0.0.1", self._wait_for_port()

    def _wait_for_port(self) -> int:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            text = self.log.read_text(encoding="utf-8")
            if found := re.search(r"listening on http://[^:]+:(\d+)", text):
                return int(found[1])
            if self.process.poll() is not None:
                raise RuntimeError(f"jaxllm serve ended: {text}")
            time.sleep(0.05)
        raise RuntimeError("jaxllm serve did not start")

    @property
    def model_pid(self) -> int:
        """The model's process: the server's child that is not the resource tracker."""
        pid = self.process.pid
        for _ in range(200):
            for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of any thread
                with contextlib.suppress(OSError):
                    for child in children.read_text(encoding="ascii").split():
                        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                            return int(child)
            time.sleep(0.05)
        raise RuntimeError("the server has no model process")

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send one request over a connection of its own, and return the answer."""
        data = None if body is None else json.dumps(body).encode()
        connection = await Connection.open(self.host, self.port)
        try:
            await connection.send(encode_request(method, path, data, connection="close", **headers))
            answer = await connection.read_answer()
        finally:
            await connection.close()
        if answer is None:
            raise ConnectionError(f"no answer to {method} {path}")
        return answer

    async def metrics(self) -> dict[str, float]:
        """Return the values of /metrics without other labels than the model's name."""
        text = (await self.ask("GET", "/metrics")).body.decode()
        found = re.findall(r'^jaxllm:(\w+)\{model_name="[^"]*"\} (\S+)$', text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def wait_until_idle(self, seconds: float = 60.0) -> dict[str, float]:
        """Return the metrics once no request runs or waits, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            values = await self.metrics()
            busy = values["num_requests_running"] or values["num_requests_waiting"]
            if not busy or time.monotonic() > deadline:
                return values
            await asyncio.sleep(0.05)

    async def wait_until_compiled(self) -> None:
        """Wait until the usual programs are compiled, at most START_SECONDS."""
        latest = time.monotonic() + START_SECONDS
        while time.monotonic() < latest and (await self.metrics())["programs_to_compile"] != 0:
            await asyncio.sleep(0.2)

    async def usage(self) -> Usage:
        """Return what the processes use once no request runs."""
        await self.wait_until_idle()
        await asyncio.sleep(0.3)  # connections that were just closed
        return await self.usage_now()

    async def usage_now(self) -> Usage:
        """Return what the processes use."""
        values = await self.metrics()
        pids = self.process.pid, self.model_pid
        return Usage(
            *(resident_mb(pid) for pid in pids), values.get("prefix_cache_bytes", 0) / 1e6,
            *(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            int(values.get("event_loop_tasks", 0)), int(values["num_requests_running"]),
            int(values["num_requests_waiting"]), int(values["model_restarts"]),
        )  # fmt: skip

    def end(self, seconds: float = 30.0) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def resident_mb(pid: int) -> float:
    """Return a process's resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * PAGE_BYTES / 1e6


@contextlib.contextmanager
def start_server(
    arguments: Sequence[str], *, setup: str = "", env: dict[str, str] | None = None
) -> Iterator[Server]:
    """Run `jaxllm serve ARGUMENTS` on a free port within the block.

    setup: Python to run in its process first, for settings that the command does not have.
    """
    code = f"{setup}\nimport sys\nfrom jaxllm.__main__ import main\nsys.exit(main())"
    command = [sys.executable, *(["-c", code] if setup else ["-m", "jaxllm"])]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, "serve", *arguments, "--port", "0"], stderr=out, stdout=out,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        try:
            yield Server(process, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
