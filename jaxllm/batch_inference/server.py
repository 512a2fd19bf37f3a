"""A background server: one thread runs `LM.serve` for requests from any thread.

A request joins the batch at the next step with a free row, and leaves it when it ends or is
cancelled. Its text can be streamed.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from jaxllm.errors import JaxllmError
from jaxllm.generation.completion import Completion
from jaxllm.lm import LM

PendingRequest = tuple[Mapping[str, Any], "Future[Completion]"]


class BackgroundServer:
    """A model that answers requests until it is closed. rows, capacity: as in `LM.serve`."""

    def __init__(self, lm: LM, *, rows: int = 8, capacity: int | None = None) -> None:
        self._lm, self._rows, self._capacity = lm, rows, capacity
        self._queue: queue.SimpleQueue[PendingRequest | None] = queue.SimpleQueue()
        self._running: dict[int, Future[Completion]] = {}  # used by the thread only
        self._end_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxllm-live", daemon=True)
        self._thread.start()

    def submit(self, request: Mapping[str, Any]) -> "Future[Completion]":
        """Queue a request of `LM.serve`, without `id`, and return its future completion.

        The future raises a JaxllmError if the request is invalid, RuntimeError if the thread has
        ended.
        """
        future: Future[Completion] = Future()
        self._queue.put((request, future))
        if self._end_error is not None:
            self._refuse_all()
        return future

    async def stream(self, request: Mapping[str, Any]) -> AsyncIterator[str | Completion]:
        """Yield the text in pieces, then the whole completion. Leaving early cancels the request.

        Raises a JaxllmError if the request cannot be answered.
        """
        loop, gone = asyncio.get_running_loop(), threading.Event()
        pieces: asyncio.Queue[str | Future[Completion]] = asyncio.Queue()

        def notify(item: "str | Future[Completion]") -> None:
            with suppress(RuntimeError):  # the consumer has left and closed its event loop
                loop.call_soon_threadsafe(pieces.put_nowait, item)

        self.submit({**request, "on_text": notify, "is_cancelled": gone.is_set}).add_done_callback(
            notify
        )
        try:
            while isinstance(item := await pieces.get(), str):
                yield item
            yield item.result()
        finally:
            gone.set()

    def close(self) -> None:
        """Answer the queued requests, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            served = self._lm.serve(self._next_requests(), rows=self._rows, capacity=self._capacity)
            for number, answer in served:
                future = self._running.pop(number)
                if isinstance(answer, JaxllmError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            self._end_error = RuntimeError("this model was closed")
        except BaseException as error:  # not the fault of one request: fail all that wait
            self._end_error = RuntimeError(f"the model ended: {type(error).__name__}: {error}")
            for future in self._running.values():
                future.set_exception(self._end_error)
        self._refuse_all()

    def _next_requests(self) -> Iterator[dict[str, Any] | None]:
        """Yield queued requests; None if the queue is empty and others run. Wait if none run."""
        number = 0
        while True:
            try:
                asked = self._queue.get(block=not self._running)
            except queue.Empty:
                yield None
                continue
            if asked is None:
                return
            request, self._running[number] = asked
            yield {**request, "id": number}
            number += 1

    def _refuse_all(self) -> None:
        """Fail the requests that came too late."""
        assert self._end_error is not None
        while True:
            try:
                asked = self._queue.get_nowait()
            except queue.Empty:
                return
            if asked is not None:
                asked[1].set_exception(self._end_error)
