"""A background server: one thread runs `LM.serve` for requests from threads and coroutines.

A request is prepared in the thread that asks, so the loop never waits for a tokenizer or a grammar.
It joins the batch at the next step with a free row, and leaves it when it ends or is cancelled.
"""

import asyncio
import dataclasses
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from jaxllm.errors import ClosedError, JaxllmError, OverloadError
from jaxllm.generation.batching.compile_ahead import LoopQuery, plan_usual
from jaxllm.generation.batching.programs import Programs
from jaxllm.generation.completion import Completion, StreamChunk
from jaxllm.generation.sampling.sampler import Sampler
from jaxllm.generation.serve import PreparedRequest


class ServingModel(Protocol):
    """The part of `jaxllm.LM` that a background server uses."""

    def prepare_request(self, request: Mapping[str, Any]) -> PreparedRequest: ...
    def serve(
        self,
        requests: Iterable[PreparedRequest | LoopQuery | None],
        *,
        rows: int,
        capacity: int | None,
    ) -> Iterator[tuple[Any, Completion | JaxllmError]]: ...


class _Pending(NamedTuple):
    """A request that waits or runs. on_start: called when it leaves the queue."""

    request: PreparedRequest
    future: "Future[Completion]"
    on_start: Callable[[], Any] | None

    def is_cancelled(self) -> bool:
        return self.request.is_cancelled is not None and bool(self.request.is_cancelled())


class BackgroundServer:
    """A model that answers requests until it is closed.

    rows, capacity: as in `LM.serve`. max_waiting, max_waiting_tokens: requests that wait for a row,
    and the tokens of their prompts; more are refused. idle_seconds: the thread ends after this time
    without requests, which frees its cache, and starts again with the next; None: never.
    """

    def __init__(
        self,
        lm: ServingModel,
        *,
        rows: int = 8,
        capacity: int | None = None,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        idle_seconds: float | None = None,
        **options: Any,
    ) -> None:
        self._lm, self._idle_seconds = lm, idle_seconds
        self._options = {"rows": rows, "capacity": capacity, **options}
        self._max_waiting, self._max_waiting_tokens = max_waiting, max_waiting_tokens
        self._waiting: deque[_Pending] = deque()
        self._queries: deque[LoopQuery] = deque()
        self._running: dict[int, _Pending] = {}  # changed by the thread only
        self._change = threading.Condition()  # guards what follows and the queue
        self._closed = False
        self._end_error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Number of requests without a row."""
        return len(self._waiting)

    def submit(
        self, request: Mapping[str, Any], *, on_start: Callable[[], Any] | None = None
    ) -> "Future[Completion]":
        """Queue a request of `LM.serve`, without `id`, and return its future completion.

        The future raises a JaxllmError if the request is invalid, OverloadError if too many wait,
        ClosedError if the server is closed, RuntimeError if its model has failed.
        """
        future: Future[Completion] = Future()
        try:
            prepared = self._lm.prepare_request(request)
            with self._change:
                self._check_open(len(prepared.prompt))
                self._waiting.append(_Pending(prepared, future, on_start))
                self._wake()
        except Exception as error:
            future.set_exception(error)
        return future

    def _wake(self) -> None:
        self._change.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jaxllm-serve", daemon=True)
            self._thread.start()

    def plan_programs(self, samplers: Sequence[Sampler], adapters: bool) -> "Future[Programs]":
        """Plan the programs of requests with samplers of these kinds, which the caller compiles
        (`compile_planned`). A server that is closed or ends does not answer.

        adapters: whether requests choose theirs.
        """
        future: Future[Programs] = Future()
        query = LoopQuery(samplers, lambda loop: future.set_result(plan_usual(loop, adapters)))
        with self._change:
            self._queries.append(query)
            self._wake()
        return future

    async def stream(
        self, request: Mapping[str, Any], *, on_start: Callable[[], Any] | None = None
    ) -> AsyncGenerator[StreamChunk | Completion]:
        """Yield a `StreamChunk` per token, then the whole completion.

        Leaving early cancels the request, also before it has a row. Raises what `submit` raises.
        """
        loop, gone = asyncio.get_running_loop(), threading.Event()
        items: asyncio.Queue[StreamChunk | Future[Completion]] = asyncio.Queue()

        def notify(item: "StreamChunk | Future[Completion]") -> None:
            with suppress(RuntimeError):  # the consumer has left and closed its event loop
                loop.call_soon_threadsafe(items.put_nowait, item)

        watched = {**request, "on_chunk": notify, "is_cancelled": gone.is_set}
        try:
            future = await asyncio.to_thread(self.submit, watched, on_start=on_start)
            future.add_done_callback(notify)
            while isinstance(item := await items.get(), StreamChunk):
                yield item
            yield item.result()
        finally:
            gone.set()
            self.drop_cancelled()

    def close(self, *, refuse_waiting: bool = False) -> None:
        """Answer the queued requests, or refuse them, then end the thread."""
        with self._change:
            self._closed = True
            refused = list(self._waiting) if refuse_waiting else []
            if refuse_waiting:
                self._waiting.clear()
            thread = self._thread
            self._change.notify()
        for pending in refused:
            pending.future.set_exception(ClosedError("this model was closed"))
        if thread is not None:
            thread.join()

    def _check_open(self, tokens: int) -> None:
        """Raise the error that refuses a request with this many prompt tokens now."""
        if self._end_error is not None:
            raise self._end_error
        if self._closed:
            raise ClosedError("this model was closed")
        if self._max_waiting is None and self._max_waiting_tokens is None:
            return
        self.drop_cancelled()
        waiting = len(self._waiting)
        if self._max_waiting is not None and waiting >= self._max_waiting + self._free_rows():
            raise OverloadError(f"{waiting} requests are waiting, which is the limit. Retry later")
        queued = sum(len(pending.request.prompt) for pending in self._waiting)
        if (
            self._max_waiting_tokens is not None
            and queued
            and (queued + tokens > self._max_waiting_tokens)
        ):
            raise OverloadError(
                f"prompts of {queued} tokens are waiting, and {self._max_waiting_tokens} is the"
                " limit. Retry later"
            )

    def _free_rows(self) -> int:
        rows: int = self._options["rows"]
        return max(0, rows - len(self._running))

    def drop_cancelled(self) -> None:
        """Answer the waiting requests that were cancelled."""
        with self._change:
            gone: list[_Pending] = []
            waiting = list(self._waiting)
            self._waiting.clear()  # `remove` would compare requests, which have arrays
            for pending in waiting:
                (gone if pending.is_cancelled() else self._waiting).append(pending)
        for pending in gone:
            prompt_tokens = len(pending.request.prompt)
            pending.future.set_result(Completion("", [], [], "cancelled", prompt_tokens))

    def _run(self) -> None:
        try:
            for number, answer in self._lm.serve(self._next_requests(), **self._options):
                future = self._running.pop(number).future
                if isinstance(answer, JaxllmError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        except BaseException as error:  # not the fault of one request: fail all that wait
            failure = RuntimeError(f"the model ended: {type(error).__name__}: {error}")
            with self._change:
                failed = [*self._running.values(), *self._waiting]
                self._running.clear()
                self._waiting.clear()
                self._thread = None
                self._end_error = failure if self._idle_seconds is None else None
            for pending in failed:
                pending.future.set_exception(failure)

    def _next_requests(self) -> Iterator[PreparedRequest | LoopQuery | None]:
        """Yield queued requests; None if the queue is empty and others run. Wait if none run."""
        number = 0
        while True:
            while self._queries:
                yield self._queries.popleft()
            with self._change:
                if not (self._waiting or self._running or self._queries or self._closed):
                    self._change.wait(self._idle_seconds)
                if self._queries:
                    continue
                if not self._waiting:
                    if not self._running and (self._closed or self._idle_seconds is not None):
                        self._thread = None
                        return
                    pending = None
                else:
                    pending = self._waiting.popleft()
                    self._running[number] = pending
            if pending is None:
                yield None
                continue
            if pending.on_start is not None:
                with suppress(Exception):  # it only reports; the request runs all the same
                    pending.on_start()
            yield dataclasses.replace(pending.request, id=number)
            number += 1
