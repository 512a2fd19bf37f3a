"""The routes that generate: completions and chats, whole or streamed."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.backend import ServerBackend, json_response, read_body
from jaxllm.server.errors import ApiError, from_model
from jaxllm.server.gemma4 import Gemma4Text
from jaxllm.server.harmony import HarmonyText
from jaxllm.server.model_client import ModelError
from jaxllm.server.openai_requests import (
    GenerationCall,
    read_chat,
    read_completion,
)
from jaxllm.server.openai_responses import Answer, Choice, Writer
from jaxllm.server.streams import EventStream, format_event, unless_gone
from jaxllm.server.text_reader import TextReader, ThoughtText
from jaxllm.server.tools import ToolText

Frame = dict[str, Any]
CHANNELS: dict[str, type[TextReader]] = {"harmony": HarmonyText, "gemma4": Gemma4Text}


class GenerationRoutes:
    """The functions of the routes that generate."""

    def __init__(self, backend: ServerBackend) -> None:
        self._backend = backend

    async def completion(self, request: Request) -> Response:
        call = read_completion(await read_body(request))
        return await self.answer(request, call, partial(Answer, chat=False))

    async def chat(self, request: Request) -> Response:
        call = read_chat(await read_body(request))
        return await self.answer(request, call, partial(Answer, chat=True))

    async def count_tokens(self, frame: Frame) -> int:
        """Return the number of tokens of a conversation, as `read_conversation` returns it."""
        done = await self._backend.call("tokenize", **frame)
        return len(done["tokens"])

    async def answer(
        self, request: Request, call: GenerationCall, write: Callable[..., Writer]
    ) -> Response:
        """Answer a request. write: Makes the writer of a call, its choices and the model's name."""
        adapter = self._backend.adapter(call.fields.model)
        namespace = request.scope.get("namespace", "")
        frames = [{**f, "adapter": adapter, "namespace": namespace} for f in call.frames]
        self._backend.check_room(len(frames))
        info = self._backend.info()
        chat = "prompt" not in frames[0]
        choices = [
            Choice(i, _make_reader(call, info) if chat else None, chat=chat,
                   logprobs=call.logprobs, shows_ids=call.fields.return_token_ids)
            for i in range(len(frames))
        ]  # fmt: skip
        writer = write(call, choices, self._backend.answer_name(call.fields.model))
        if call.fields.echo:
            await unless_gone(request, self._echo(call, choices, frames))
        if call.fields.stream:
            opening = EventStream.open(self._stream(writer, frames), writer)
            stream: Response = await unless_gone(request, opening)  # it may wait in the queue
            return stream
        await unless_gone(request, self._collect(writer, frames))
        return json_response(writer.format_answer())

    async def _echo(
        self, call: GenerationCall, choices: Sequence[Choice], frames: Sequence[Frame]
    ) -> None:
        """Put each prompt in front of its choice; with its log-probabilities if they are asked."""
        for choice, frame in zip(choices, frames, strict=True):
            prompt, scored = frame["prompt"], None
            if call.logprobs is not None:
                scored = await self._backend.call(
                    "score", prompt=prompt, adapter=frame["adapter"], top=call.logprobs
                )
            if not isinstance(prompt, str):
                prompt = (await self._backend.call("detokenize", tokens=prompt))["text"]
            choice.prefix(prompt, scored)

    async def _collect(self, writer: Writer, frames: Sequence[Frame]) -> None:
        """Run all choices to their ends."""
        async with aclosing(self._run(frames)) as events:
            async for index, frame in events:
                for _ in writer.read(index, frame):
                    pass
        for _ in writer.finish():
            pass

    async def _stream(self, writer: Writer, frames: Sequence[Frame]) -> AsyncGenerator[bytes]:
        """Yield the events of a stream; an empty one first, once the model has taken the request.

        A request that waits longer than `ping_seconds` for a row gets pings before that.
        """
        async with aclosing(self._run(frames)) as events:
            begun = False
            async for index, frame in events:
                if not begun:
                    begun = True
                    yield b""
                if "ping" in frame:
                    yield writer.ping
                else:
                    for event in writer.read(index, frame):
                        yield format_event(event)
        for event in writer.finish():
            yield format_event(event)

    async def _run(self, frames: Sequence[Frame]) -> AsyncGenerator[tuple[int, Frame]]:
        """Yield `(choice, frame)` of all choices as they come. Raises ApiError.

        If none came for `ping_seconds`, the frame is `{"ping": True}`.
        """
        queue: asyncio.Queue[tuple[int, Frame | BaseException]] = asyncio.Queue()
        seconds = self._backend.settings.ping_seconds

        async def follow(index: int, fields: Frame) -> None:
            clock = self._backend.metrics.follow()
            try:
                if fields["options"].get("max_new_tokens") == 0:  # the prompt alone
                    tokens = (await self._backend.call("tokenize", **_as_text(fields)))["tokens"]
                    queue.put_nowait((index, _no_tokens(len(tokens))))
                    return
                async with aclosing(self._backend.client.generate(fields)) as events:
                    async for frame in events:
                        clock.see(frame)
                        if "done" in frame:
                            frame["done"]["timings"] = clock.timings(frame["done"])
                        queue.put_nowait((index, frame))
            except (ModelError, ApiError) as error:
                queue.put_nowait((index, error))

        tasks = [asyncio.create_task(follow(i, frame)) for i, frame in enumerate(frames)]
        try:
            left = len(tasks)
            while left:
                try:
                    async with asyncio.timeout(seconds):
                        index, frame = await queue.get()
                except TimeoutError:
                    index, frame = 0, {"ping": True}
                if isinstance(frame, BaseException):
                    raise from_model(frame) if isinstance(frame, ModelError) else frame
                left -= "done" in frame
                yield index, frame
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _as_text(fields: Frame) -> Frame:
    prompt = fields["prompt"]
    text = prompt if isinstance(prompt, str) else ""
    return {"text": text, "add_special": True}


def _make_reader(call: GenerationCall, info: Frame) -> TextReader:
    """Return what reads an answer of this model. info: Of `ServerBackend`."""
    style, asked = info["tool_style"], call.tools
    separates = call.fields.reasoning_format != "none"
    forced = asked is not None and asked["choice"] == "required"
    if style == "harmony" or (style == "gemma4" and not forced):
        return CHANNELS[style](asked) if asked or separates else TextReader()
    reader = TextReader() if asked is None else ToolText(asked, style, info["special_marks"])
    marks = info.get("thought_marks")
    return ThoughtText(reader, marks, separates=separates) if marks else reader


def _no_tokens(prompt: int) -> Frame:
    return {"done": {"finish_reason": "length", "prompt_tokens": prompt, "completion_tokens": 0,
                     "cached_tokens": 0, "seed": 0, "grammar_complete": None}}  # fmt: skip
