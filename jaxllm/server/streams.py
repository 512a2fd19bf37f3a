"""Answers that end with their client: streams of events, and work that stops if it leaves."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxllm.server.errors import ApiError
from jaxllm.server.limits import Receive, Scope, Send
from jaxllm.server.openai_responses import Writer, encode_json

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream(Response):
    """Server-sent events; the generator is closed when the client leaves.

    writer: Says how an error and the end are written.
    """

    def __init__(self, events: AsyncGenerator[bytes], writer: Writer) -> None:
        super().__init__()
        self._events, self._writer = events, writer

    @classmethod
    async def open(cls, events: AsyncGenerator[bytes], writer: Writer) -> "EventStream":
        """Return the response once the first event, an empty one, is there.

        So an error before it still has a status.
        """
        try:
            await anext(events)
        except BaseException:
            await events.aclose()
            raise
        return cls(events, writer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, or stop where the client leaves."""
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(wait_until_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        headers = [(k.lower().encode(), v.encode()) for k, v in STREAM_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except ApiError as error:
            event = format_event(self._writer.fail(error))
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": self._writer.last_event})


async def unless_gone(request: Request, work: Any) -> Any:
    """Return the result of a coroutine, which is cancelled if the client leaves."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(wait_until_gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def format_event(body: dict[str, Any]) -> bytes:
    """Return an event. A body with a type has it as the event's name, too."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return name.encode() + b"data: " + encode_json(body) + b"\n\n"
