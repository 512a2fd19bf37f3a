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

from jaxllm.api import LM
from jaxllm.complete import Completion
from jaxllm.errors import JaxllmError

Asked = tuple[Mapping[str, Any], "Future[Completion]"]


class Live:
    """A model that answers requests until it is closed. rows, capacity: as in `LM.serve`."""

    def __init__(self, lm: LM, *, rows: int = 8, capacity: int | None = None) -> None:
        self._lm, self._rows, self._capacity = lm, rows, capacity
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._open: dict[int, Future[Completion]] = {}  # used by the thread only
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._drive, name="jaxllm-live", daemon=True)
        self._thread.start()

    def submit(self, request: Mapping[str, Any]) -> "Future[Completion]":
        """Queue a request of `LM.serve`, without `id`, and return its future completion.

        The future raises a JaxllmError if the request is invalid, RuntimeError if the thread has
        ended.
        """
        future: Future[Completion] = Future()
        self._asked.put((request, future))
        if self._ended is not None:
            self._refuse_all()
        return future

    async def pieces(self, request: Mapping[str, Any]) -> AsyncIterator[str | Completion]:
        """Yield the text in pieces, then the whole completion. Leaving early cancels the request.

        Raises a JaxllmError if the request cannot be answered.
        """
        loop, gone = asyncio.get_running_loop(), threading.Event()
        heard: asyncio.Queue[str | Future[Completion]] = asyncio.Queue()

        def tell(item: "str | Future[Completion]") -> None:
            with suppress(RuntimeError):  # the consumer has left and closed its event loop
                loop.call_soon_threadsafe(heard.put_nowait, item)

        self.submit({**request, "heard": tell, "cancelled": gone.is_set}).add_done_callback(tell)
        try:
            while isinstance(item := await heard.get(), str):
                yield item
            yield item.result()
        finally:
            gone.set()

    def close(self) -> None:
        """Answer the queued requests, then end the thread."""
        self._asked.put(None)
        self._thread.join()

    def _drive(self) -> None:
        try:
            served = self._lm.serve(self._requests(), rows=self._rows, capacity=self._capacity)
            for number, answer in served:
                future = self._open.pop(number)
                if isinstance(answer, JaxllmError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            self._ended = RuntimeError("this model was closed")
        except BaseException as error:  # not the fault of one request: fail all that wait
            self._ended = RuntimeError(f"the model ended: {type(error).__name__}: {error}")
            for future in self._open.values():
                future.set_exception(self._ended)
        self._refuse_all()

    def _requests(self) -> Iterator[dict[str, Any] | None]:
        """Yield queued requests; None if the queue is empty and others run. Wait if none run."""
        number = 0
        while True:
            try:
                asked = self._asked.get(block=not self._open)
            except queue.Empty:
                yield None
                continue
            if asked is None:
                return
            request, self._open[number] = asked
            yield {**request, "id": number}
            number += 1

    def _refuse_all(self) -> None:
        """Fail the requests that came too late."""
        assert self._ended is not None
        while True:
            try:
                asked = self._asked.get_nowait()
            except queue.Empty:
                return
            if asked is not None:
                asked[1].set_exception(self._ended)
