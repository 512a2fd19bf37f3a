"""A running server under faults: clients that are killed, a killed model process, signals.

The model's process is stopped (SIGSTOP) where a test needs a request to stay where it is. The last
tests end their servers.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from scripts.tools.hostile.client import Connection, encode_request
from scripts.tools.hostile.server import Server, start_server

pytestmark = pytest.mark.anyio
PATH, PROMPT, NEW = "/v1/completions", "Once upon a time", 30
GOOD = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0.8, "seed": 3, "logprobs": 0,
        "ignore_eos": True}  # fmt: skip
LONG = {"prompt": "One day", "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    """A server with 2 rows and 2 places in the queue."""
    arguments = ["demo:llama", "--rows", "2", "--capacity", "512", "--max-waiting", "2"]
    with start_server(arguments) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> Any:
    """What `LM.generate` returns for GOOD."""
    lm = jaxllm.load("demo:llama")
    return lm.generate(PROMPT, max_new_tokens=NEW, min_new_tokens=NEW, temperature=0.8, seed=3)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process within the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def send(server: Server, body: Any, *, wait_for: bytes = b"") -> Connection:
    """Send a completion's request; return its connection once these bytes of the answer came."""
    connection = await Connection.open(server.host, server.port)
    await connection.send(encode_request("POST", PATH, json.dumps(body).encode()))
    if wait_for:
        async with asyncio.timeout(120):
            await connection.reader.readuntil(wait_for)
    return connection


async def stop_in_stream(server: Server) -> Connection:
    """Return a stream whose model's process is stopped in the middle; a late stop is repeated."""
    for _ in range(10):
        stream = await send(server, LONG, wait_for=b"data: ")
        os.kill(server.model_pid, signal.SIGSTOP)
        await asyncio.sleep(0.3)
        if (await server.metrics())["num_requests_running"] == 1:
            return stream
        os.kill(server.model_pid, signal.SIGCONT)
        await stream.close()
    raise AssertionError("the stream always ended first")


async def wait_for(server: Server, **numbers: int) -> None:
    """Wait until the metrics have these numbers of requests."""
    async with asyncio.timeout(60):
        while True:
            values = await server.metrics()
            if all(values[f"num_requests_{name}"] == n for name, n in numbers.items()):
                return
            await asyncio.sleep(0.02)


async def check_good(server: Server, expected: Any) -> None:
    """Check that a request gets its answer; bits of log-probabilities depend on the row count."""
    answer = await server.ask("POST", PATH, GOOD)
    (choice,) = json.loads(answer.body)["choices"]
    assert choice["text"] == expected.text
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)


async def test_killed_clients_free_rows(running: Server, expected: Any) -> None:
    """Clients are killed while they decode, in the queue and while their prompt is read; the rows
    are free then, and an answer beside them keeps its bits."""
    await check_good(running, expected)  # which also compiles
    beside = asyncio.create_task(check_good(running, expected))
    decoding = await send(running, LONG, wait_for=b"data: ")
    decoding.reset()
    for prompt in ("One day", "Once " * 400):
        for body in ({**LONG, "prompt": prompt}, {**LONG, "stream": False, "n": 2}):
            leaving = await send(running, {**body, "max_tokens": 40})
            await asyncio.sleep(0.01)
            leaving.reset()
    with stopped(running.model_pid):
        queued = [await send(running, LONG | {"stream": stream}) for stream in (True, False)]
        await asyncio.sleep(0.1)
        for connection in queued:
            connection.reset()
    await wait_for(running, running=0, waiting=0)
    await beside
    await check_good(running, expected)
    for connection in (decoding, leaving, *queued):
        await connection.close()


async def test_cancelled_request_frees_its_place(running: Server, expected: Any) -> None:
    """With all rows and places taken a request gets 429; once a client leaves, it is taken."""
    await wait_for(running, running=0, waiting=0)
    with stopped(running.model_pid):
        open_ones = [await send(running, {**GOOD, "stream": i % 2 == 0}) for i in range(4)]
        await wait_for(running, waiting=4)
        answer = await running.ask("POST", PATH, GOOD)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (429, "queue_full")
        assert "retry-after" in answer.headers
        open_ones.pop().reset()
        await wait_for(running, waiting=3)
        following = asyncio.create_task(check_good(running, expected))
        await wait_for(running, waiting=4)
    await following
    for connection in open_ones:
        answered = await connection.read_answer()
        assert answered is not None and answered.status == 200
        await connection.close()


async def test_killed_model_process_is_started_again(running: Server, expected: Any) -> None:
    """Open requests end with an error, a stream by an event; then the server answers again."""
    await wait_for(running, running=0, waiting=0)
    killed = running.model_pid
    stream = await stop_in_stream(running)
    with stopped(killed):
        whole = await send(running, GOOD)
        await wait_for(running, running=1, waiting=1)
        os.kill(killed, signal.SIGKILL)
        answer = await whole.read_answer()
    assert answer is not None
    assert (answer.status, json.loads(answer.body)["error"]["type"]) == (
        503, "unavailable_error",
    )  # fmt: skip
    assert "retry-after" in answer.headers
    async with asyncio.timeout(20):
        rest = (await stream.reader.readuntil(b"data: [DONE]\n\n")).decode()
    assert '{"error":{"message":"the model\'s process ended"' in rest
    assert (await running.ask("GET", "/health")).status == 503
    async with asyncio.timeout(300):
        while (await running.ask("GET", "/health")).status != 200:
            await asyncio.sleep(0.05)
    await check_good(running, expected)
    assert running.model_pid != killed
    assert (await running.metrics())["model_restarts"] == 1
    for connection in (stream, whole):
        await connection.close()


def test_sigterm_finishes_running_requests() -> None:
    """Running requests finish, waiting and new ones get an error, and no process is left."""

    async def run(server: Server) -> None:
        stream = await stop_in_stream(server)
        model = server.model_pid
        with stopped(model):
            waiting = await send(server, GOOD)
            await wait_for(server, running=1, waiting=1)
            server.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                while (await server.ask("GET", "/health")).status != 503:
                    await asyncio.sleep(0.02)
            assert (await server.ask("POST", PATH, GOOD)).status == 503
        answer = await waiting.read_answer()
        assert answer is not None and answer.status == 503, answer
        async with asyncio.timeout(60):
            rest = (await stream.reader.readuntil(b"data: [DONE]\n\n")).decode()
        assert "error" not in rest and '"finish_reason":"length"' in rest
        assert await asyncio.to_thread(server.process.wait, 30) == 0
        assert not Path(f"/proc/{model}").exists()
        for connection in (stream, waiting):
            await connection.close()

    with start_server(["demo:llama", "--rows", "1", "--capacity", "512"]) as server:
        asyncio.run(run(server))


async def test_second_signal_ends_at_once(running: Server) -> None:
    """The first signal waits for a running request, the second one does not."""
    stream = await stop_in_stream(running)
    with stopped(model := running.model_pid):
        running.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(1.0)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert await asyncio.to_thread(running.process.wait, 30) == 0
        assert time.monotonic() - began < 15  # of 30 s of grace
    assert not Path(f"/proc/{model}").exists()
    await stream.close()
