"""The routes that generate: completions and chats, whole or streamed."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxllm import __version__
from jaxllm.server.backend import ServerBackend, json_response, read_body
from jaxllm.server.errors import ApiError, from_model
from jaxllm.server.model_client import ModelError
from jaxllm.server.openai_requests import GenerationCall, read_chat, read_completion
from jaxllm.server.openai_responses import Answer, Choice, usage
from jaxllm.server.streams import EventStream, format_event, unless_gone

Frame = dict[str, Any]
PING = b": ping\n\n"


class GenerationRoutes:
    """The functions of the routes that generate."""

    def __init__(self, backend: ServerBackend) -> None:
        self._backend = backend

    async def completion(self, request: Request) -> Response:
        return await self._generate(request, read_completion(await read_body(request)), False)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, read_chat(await read_body(request)), True)

    async def _generate(self, request: Request, call: GenerationCall, chat: bool) -> Response:
        adapter = self._backend.adapter(call.fields.model)
        namespace = request.scope.get("namespace", "")
        frames = [{**f, "adapter": adapter, "namespace": namespace} for f in call.frames]
        self._backend.check_room(len(frames))
        name = self._backend.answer_name(call.fields.model)
        answer = Answer(name, f"jaxllm-{__version__}", chat=chat)
        info = self._backend.info()
        choices = [
            Choice(i, chat=chat, logprobs=call.logprobs, tools=call.tools,
                   style=info["tool_style"], hidden=info["special_marks"],
                   shows_ids=call.fields.return_token_ids)
            for i in range(len(frames))
        ]  # fmt: skip
        if call.fields.echo:
            await unless_gone(request, self._echo(call, choices, frames))
        if call.fields.stream:
            first = self._stream(call, answer, choices, frames)
            opening = EventStream.open(first)
            stream: Response = await unless_gone(request, opening)  # it may wait in the queue
            return stream
        ends = await unless_gone(request, self._collect(choices, frames))
        prompts = len({str(frame.get("prompt")) for frame in frames})
        whole = answer.format_answer([c.format_choice() for c in choices], usage(ends, prompts))
        return json_response({**whole, **_timings(ends)})

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

    async def _collect(self, choices: Sequence[Choice], frames: Sequence[Frame]) -> list[Frame]:
        """Run all choices to their ends; return their `done` frames."""
        ends: dict[int, Frame] = {}
        async with aclosing(self._run(frames)) as events:
            async for index, frame in events:
                if "chunk" in frame:
                    choices[index].push(frame["chunk"])
                elif "done" in frame:
                    choices[index].end(frame["done"]["finish_reason"])
                    ends[index] = frame["done"]
        return [ends[index] for index in range(len(frames))]

    async def _stream(
        self,
        call: GenerationCall,
        answer: Answer,
        choices: Sequence[Choice],
        frames: Sequence[Frame],
    ) -> AsyncGenerator[bytes]:
        """Yield the events of a stream; an empty one first, once the model has taken the request.

        A request that waits longer than `ping_seconds` for a row gets pings before that.
        """
        ends: dict[int, Frame] = {}
        more = {"usage": None} if call.fields.stream_options.include_usage else {}

        def event(choice: Frame) -> bytes:
            return format_event(answer.chunk([choice], **more))

        async with aclosing(self._run(frames)) as events:
            begun = False
            async for index, frame in events:
                choice = choices[index]
                if not begun:
                    begun = True
                    yield b""
                    for c in choices:
                        if answer.chat:
                            yield event(c.role_chunk())
                        elif call.fields.echo:
                            yield event(c.echo_chunk())
                if "chunk" in frame:
                    if (piece := choice.push(frame["chunk"])) is not None:
                        yield event(piece)
                elif "ping" in frame:
                    yield PING
                elif "done" in frame:
                    choice.end(frame["done"]["finish_reason"])
                    ends[index] = frame["done"]
                    for piece in choice.end_chunks() if answer.chat else ():
                        yield event(piece)
        if call.fields.stream_options.include_usage:
            prompts = len({str(frame.get("prompt")) for frame in frames})
            done = [ends[index] for index in range(len(frames))]
            yield format_event(answer.chunk([], usage(done, prompts), **_timings(done)))

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


def _timings(ends: Sequence[Frame]) -> Frame:
    """Return the times of an answer with one choice, as llama.cpp's clients show them."""
    return {"timings": ends[0]["timings"]} if len(ends) == 1 and "timings" in ends[0] else {}


def _no_tokens(prompt: int) -> Frame:
    return {"done": {"finish_reason": "length", "prompt_tokens": prompt, "completion_tokens": 0,
                     "cached_tokens": 0, "seed": 0, "grammar_complete": None}}  # fmt: skip
