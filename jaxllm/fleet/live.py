"""Requests as they come, from any thread: one thread drives `LM.serve`, and all share its rows.

A request joins the batch at the next step where a row is free, and leaves it when it ends or when
nobody waits for it any more. Its text can be heard piece by piece.
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
    """A model that answers until it is closed. rows, capacity: as of `LM.serve`."""

    def __init__(self, lm: LM, *, rows: int = 8, capacity: int | None = None) -> None:
        self._lm, self._rows, self._capacity = lm, rows, capacity
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._open: dict[int, Future[Completion]] = {}  # of the thread alone
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._drive, name="jaxllm-live", daemon=True)
        self._thread.start()

    def submit(self, request: Mapping[str, Any]) -> "Future[Completion]":
        """The completion to come of a request of `LM.serve`, without `id`.

        The future raises what is wrong with the request, a JaxllmError; RuntimeError where the
        thread has ended.
        """
        future: Future[Completion] = Future()
        self._asked.put((request, future))
        if self._ended is not None:
            self._refuse_all()
        return future

    async def pieces(self, request: Mapping[str, Any]) -> AsyncIterator[str | Completion]:
        """The text piece by piece, and at last the whole completion. Whoever leaves early cancels.

        Raises the JaxllmError of a request that cannot be answered.
        """
        loop, gone = asyncio.get_running_loop(), threading.Event()
        heard: asyncio.Queue[str | Future[Completion]] = asyncio.Queue()

        def tell(item: "str | Future[Completion]") -> None:
            with suppress(RuntimeError):  # whoever listened left, and closed the loop behind them
                loop.call_soon_threadsafe(heard.put_nowait, item)

        self.submit({**request, "heard": tell, "cancelled": gone.is_set}).add_done_callback(tell)
        try:
            while isinstance(item := await heard.get(), str):
                yield item
            yield item.result()
        finally:
            gone.set()

    def close(self) -> None:
        """Answer what was asked before, and end."""
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
        except BaseException as error:  # of the machine, not of a request: all who wait are told
            self._ended = RuntimeError(f"the model ended: {type(error).__name__}: {error}")
            for future in self._open.values():
                future.set_exception(self._ended)
        self._refuse_all()

    def _requests(self) -> Iterator[dict[str, Any] | None]:
        """What was asked; None where there is nothing and others run; waits where none does."""
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
        """Tell those that were asked too late."""
        assert self._ended is not None
        while True:
            try:
                asked = self._asked.get_nowait()
            except queue.Empty:
                return
            if asked is not None:
                asked[1].set_exception(self._ended)
