"""Servers for tests of faults: the application in this process, with a model that is a stub."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, NamedTuple

from jaxllm.server.app import build_app
from jaxllm.server.backend import ServerSettings
from jaxllm.server.listen import Address, BoundedProtocol, make_server
from jaxllm.server.model_client import ModelClient
from jaxllm.server.model_process import ModelSettings
from scripts.tools.hostile.client import Answer, Connection, encode_request

Frame = dict[str, Any]
DONE = {"done": {"finish_reason": "length", "prompt_tokens": 1, "completion_tokens": 1,
                 "cached_tokens": 0, "draft_stats": [], "seed": 0,
                 "grammar_complete": None}}  # fmt: skip
INFO = {"context": 64, "rows": 2, "adapters": [], "vocab_size": 131, "special_tokens": {},
        "chat_template": None, "tool_style": "", "special_marks": [], "model": "stub"}  # fmt: skip
Script = Callable[[Frame], AsyncGenerator[Frame]]


async def answer_once(fields: Frame) -> AsyncGenerator[Frame]:
    """Yield the frames of an answer of one token."""
    yield {"started": True}
    yield {"chunk": ["x", 5, "length"]}
    yield DONE


class StubModel(ModelClient):
    """A model client without a process: `script` makes the frames of each generation.

    asked: the fields of all generations. left: how many ended before their last frame.
    """

    def __init__(self, script: Script = answer_once) -> None:
        super().__init__(load=lambda: None, settings=ModelSettings())
        self.state, self.info, self.script = "ready", dict(INFO), script
        self.asked: list[Frame] = []
        self.left = 0

    async def generate(self, fields: Frame) -> AsyncGenerator[Frame]:
        """Yield the script's frames."""
        self.asked.append(fields)
        ended = False
        try:
            async for frame in self.script(fields):
                yield frame
                ended = "done" in frame
        finally:
            self.left += not ended


def say(text: str, finish: str = "eos", **done: Any) -> StubModel:
    """Return a model that thinks and calls as Qwen3 does, and says this text."""

    async def script(fields: Any) -> AsyncGenerator[Frame]:
        yield {"started": True, "prompt_tokens": 9, "opened": ""}
        pieces = [text[i : i + 5] for i in range(0, len(text), 5)]
        for i, piece in enumerate(pieces):
            yield {"chunk": [piece, 5, finish if i == len(pieces) - 1 else None]}
        yield {"done": {"finish_reason": finish, "prompt_tokens": 9, "cached_tokens": 4, "seed": 0,
                        "completion_tokens": len(pieces), "draft_stats": [], **done}}  # fmt: skip

    model = StubModel(script)
    model.info |= {"tool_style": "hermes", "thought_marks": ["<think>", "</think>"]}
    return model


class Endpoint(NamedTuple):
    """Where a server in this process listens."""

    host: str
    port: int

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request, and return the answer."""
        data = None if body is None else json.dumps(body).encode()
        answer = await self.send(encode_request(method, path, data, **headers))
        assert answer is not None
        return answer

    async def send(self, *pieces: bytes) -> Answer | None:
        """Send bytes, and return the answer, None if the server closes the connection."""
        connection = await Connection.open(self.host, self.port)
        try:
            for piece in pieces:
                await connection.send(piece)
            async with asyncio.timeout(20):
                return await connection.read_answer()
        finally:
            await connection.close()


@contextlib.asynccontextmanager
async def serve_stub(
    model: StubModel, limits: dict[str, float] | None = None, **settings: Any
) -> AsyncIterator[Endpoint]:
    """Serve a stub within the block.

    limits: attributes of `BoundedProtocol`. settings: of `ServerSettings`.
    """
    protocol = type("Protocol", (BoundedProtocol,), limits or {})
    server = make_server(build_app(model, ServerSettings(("stub",), **settings)), protocol)
    with Address("127.0.0.1", 0).open() as listening:
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield Endpoint(*listening.getsockname())
        finally:
            server.should_exit = True
            await serving


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
