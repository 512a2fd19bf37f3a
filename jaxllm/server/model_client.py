"""The HTTP process's side of the model process: start it, ask it, start it again if it dies."""

import asyncio
import dataclasses
import itertools
import multiprocessing
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, Literal

from jaxllm.server.frames import encode_frame, read_frame
from jaxllm.server.model_process import ModelSettings, run_model

Frame = dict[str, Any]
ErrorKind = Literal["invalid", "context", "overload", "failed", "unavailable"]
MAX_PAUSE_S = 30.0  # between two starts of a model that keeps dying


class ModelError(Exception):
    """The model process refused a request or ended. kind: decides the HTTP status."""

    def __init__(self, kind: ErrorKind, message: str, **numbers: int) -> None:
        super().__init__(message)
        self.kind, self.numbers = kind, numbers


@dataclasses.dataclass
class ModelClient:
    """A model in a separate process.

    load: loads the model there, a picklable function. log: takes lines about starts and ends.
    state: "starting", "ready", "draining" or "failed". info: the process's `ready` frame. open:
    requests without an end, by number. waiting: those of them that have no row yet.
    """

    load: Callable[[], Any]
    settings: ModelSettings
    log: Callable[[str], None] = lambda _: None
    state: Literal["starting", "ready", "draining", "failed"] = "starting"
    info: Frame = dataclasses.field(default_factory=dict)
    restarts: int = 0
    pid: int | None = None
    waiting: set[int] = dataclasses.field(default_factory=set)
    running: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self._answers: dict[int, asyncio.Queue[Frame]] = {}
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._process: Any = None
        self._task: asyncio.Task[None] | None = None
        self.failure = ""

    async def start(self) -> None:
        """Start the process; return when the model is loaded. Raises ModelError if it cannot be."""
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._keep_alive(ready))
        await ready.wait()
        if self.state == "failed":
            raise ModelError("failed", self.failure)

    async def call(self, do: str, **fields: Any) -> Any:
        """Return the answer to one request that is not a generation. Raises ModelError."""
        async with _Request(self, do, fields) as request:
            return (await request.next_frame())["done"]

    async def generate(self, fields: Frame) -> AsyncGenerator[Frame]:
        """Yield the frames of a generation: `started`, `chunk`s, `done`. Raises ModelError.

        Leaving early cancels it.
        """
        async with _Request(self, "generate", fields) as request:
            while True:
                frame = await request.next_frame()
                yield frame
                if "done" in frame:
                    return

    async def drain(self, seconds: float) -> None:
        """Refuse new and waiting requests; return when the running ones end, or after `seconds`."""
        was_ready, self.state = self.state == "ready", "draining"
        if was_ready:
            self.send({"id": 0, "do": "drain"})
        deadline = time.monotonic() + seconds
        while self._answers and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """End the process and the open requests."""
        self.state = "failed" if self.state == "failed" else "draining"
        await self._end_process()

    @property
    def is_started(self) -> bool:
        """Whether the process runs, or is being started again."""
        return self._task is not None

    async def unload(self) -> None:
        """End the process and the open requests; `start` may load the model again."""
        await self._end_process()
        self.state = "draining" if self.state == "draining" else "starting"

    async def _end_process(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def send(self, frame: Frame) -> None:
        """Send a frame to the process. Raises ModelError if there is none."""
        if self._writer is None or self._writer.is_closing():
            raise ModelError("unavailable", "the model is not loaded")
        try:
            data = encode_frame(frame)
        except (OverflowError, UnicodeEncodeError, RecursionError) as error:
            raise ModelError("invalid", f"the request has an unusable value: {error}") from None
        self._writer.write(data)

    def open_request(self) -> int:
        """Return the number of a new request. Raises ModelError if none are taken now."""
        if self.state == "draining":
            raise ModelError("unavailable", "the server is shutting down")
        if self.state != "ready":
            raise ModelError("unavailable", self.failure or "the model is being loaded")
        number = next(self._numbers)
        self._answers[number] = asyncio.Queue()
        return number

    def close_request(self, number: int) -> bool:
        """Forget a request; return whether it had no end yet."""
        self.waiting.discard(number)
        self.running.discard(number)
        return self._answers.pop(number, None) is not None

    async def _keep_alive(self, ready: asyncio.Event) -> None:
        """Run the process again and again until it is cancelled, or the model cannot be loaded."""
        pause = 1.0
        try:
            while True:
                begun = time.monotonic()
                await self._run_once(ready)
                if self.state == "failed":
                    return
                pause = 1.0 if time.monotonic() - begun > 2 * MAX_PAUSE_S else pause
                self.log(f"the model's process ended; starting it again in {pause:g} s")
                self.restarts += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
        finally:
            ready.set()

    async def _run_once(self, ready: asyncio.Event) -> None:
        local, remote = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=run_model, args=(remote, self.load, self.settings), daemon=True
        )
        try:
            await asyncio.to_thread(process.start)
            self._process, self.pid = process, process.pid
            remote.close()
            reader, self._writer = await asyncio.open_connection(sock=local)
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    self._receive(await read_frame(reader), ready)
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            process.kill()
            await asyncio.shield(asyncio.to_thread(process.join))
            self.pid = None
            self.state = "starting" if self.state == "ready" else self.state
            for queue in self._answers.values():
                queue.put_nowait(
                    {"error": {"kind": "unavailable", "message": "the model's process ended"}}
                )

    def _receive(self, frame: Frame, ready: asyncio.Event) -> None:
        if "ready" in frame:
            self.info = frame["ready"]
            self.state = "ready" if self.state == "starting" else self.state
            ready.set()
        elif "failed" in frame:
            self.failure = frame["failed"]
            if not ready.is_set():  # later it may be a file that is just being replaced
                self.state = "failed"
        elif (queue := self._answers.get(frame["id"])) is not None:
            queue.put_nowait(frame)


class _Request:
    """An open request; it is cancelled if the block is left before its end."""

    def __init__(self, client: ModelClient, do: str, fields: Frame) -> None:
        self._client, self._do, self._fields = client, do, fields
        self._ended = False

    async def __aenter__(self) -> "_Request":
        self._number = self._client.open_request()
        self._queue = self._client._answers[self._number]
        if self._do == "generate":
            self._client.waiting.add(self._number)
        try:
            self._client.send({"id": self._number, "do": self._do, **self._fields})
        except BaseException:
            self._client.close_request(self._number)
            raise
        return self

    async def next_frame(self) -> Frame:
        frame = await self._queue.get()
        if "error" in frame:
            self._ended = True
            error = dict(frame["error"])
            raise ModelError(error.pop("kind"), error.pop("message"), **error)
        if "started" in frame:
            self._client.waiting.discard(self._number)
            self._client.running.add(self._number)
        self._ended = "done" in frame
        return frame

    async def __aexit__(self, *_: object) -> None:
        if self._client.close_request(self._number) and not self._ended:
            with suppress(ModelError):
                self._client.send({"id": self._number, "do": "cancel"})
