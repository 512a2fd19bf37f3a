"""The routes: OpenAI's interface as an ASGI application (Starlette).

An answer belongs to its request's task: if the client leaves, the task is cancelled, and with it
what the model computes for it, in the queue, within the prompt or while decoding.
"""

import asyncio
import base64
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm import __version__
from jaxllm.errors import JaxllmError
from jaxllm.files import parse_json
from jaxllm.server.errors import ApiError, from_model, invalid, unsupported
from jaxllm.server.limits import Bounds, Keys, Message, Receive, Scope, Send
from jaxllm.server.metrics import CONTENT_TYPE, Metrics
from jaxllm.server.model_client import ModelClient, ModelError
from jaxllm.server.openai_requests import (
    GenerationCall,
    read_chat,
    read_completion,
    read_conversation,
)
from jaxllm.server.openai_responses import Answer, Choice, encode_json, usage
from jaxllm.server.tools import find_style

Frame = dict[str, Any]
PAGE = Path(__file__).parent / "page"
PAGE_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
STATS_SECONDS = 0.5
MAX_TEXTS = 2048  # of one request for embeddings


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """How the HTTP side behaves.

    Attributes:
        names: The model's names; the first is the one in answers.
        keys: Keys that clients must show; none: everybody may ask.
        origins: Web pages that may ask (CORS); "*" for all.
        max_waiting: Requests that may wait for a row.
        body_bytes: Largest body.
        read_seconds: Time for a request's body to arrive.
        ping_seconds: A stream without news sends a comment this often.
        pooling: Of embeddings: mean, last or cls.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_waiting: int = 64
    body_bytes: int = 4 << 20
    read_seconds: float = 30.0
    ping_seconds: float = 15.0
    pooling: str = "mean"


def build_app(
    client: ModelClient, settings: ServerSettings, *, starts_model: bool = False
) -> Starlette:
    """Return the application that answers with this model.

    starts_model: the application starts the model's process, and ends it.
    """
    api = _Api(client, settings)

    @asynccontextmanager
    async def live(_: Starlette) -> AsyncIterator[None]:
        if starts_model:
            await client.start()
        yield
        if starts_model:
            await client.close()

    layers = [Middleware(_RequestIds)]
    if settings.origins:
        layers.append(
            Middleware(
                CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"],
                allow_headers=["*"], allow_credentials="*" not in settings.origins,
            )
        )  # fmt: skip
    layers += [
        Middleware(Keys, keys=settings.keys),
        Middleware(Bounds, body_bytes=settings.body_bytes, read_seconds=settings.read_seconds),
    ]
    routes = []
    for path, method, answer in api.routes():
        routes.append(Route(path, answer, methods=[method]))
    app = Starlette(
        routes=routes, middleware=layers, lifespan=live,
        exception_handlers={
            ApiError: api.answer_error, HTTPException: api.answer_http_error,
            ClientDisconnect: _forget_client, Exception: api.answer_failure,
        },
    )  # fmt: skip
    app.state.api = api
    app.router.redirect_slashes = False
    return app


class _Api:
    """The routes' functions."""

    def __init__(self, client: ModelClient, settings: ServerSettings) -> None:
        self._client, self._settings = client, settings
        self._created = int(time.time())
        self.metrics = Metrics(settings.names[0])

    def routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        """Return path, method and function of every route."""
        chat, text = self._chat, self._completion
        routes: list[Any] = [
            ("/health", "GET", self._health),
            ("/metrics", "GET", self._metrics),
            ("/version", "GET", self._version),
            ("/tokenizer_info", "GET", self._tokenizer_info),
            ("/tokenize", "POST", self._tokenize),
            ("/detokenize", "POST", self._detokenize),
            ("/apply-template", "POST", self._apply_template),
            ("/page/look", "POST", self._look),
        ]
        for prefix in ("", "/v1"):
            routes += [
                (f"{prefix}/models", "GET", self._models),
                (f"{prefix}/models/{{name:path}}", "GET", self._model),
                (f"{prefix}/completions", "POST", text),
                (f"{prefix}/chat/completions", "POST", chat),
                (f"{prefix}/chat/completions/input_tokens", "POST", self._input_tokens),
                (f"{prefix}/embeddings", "POST", self._embeddings),
                (f"{prefix}/rerank", "POST", self._rerank),
            ]
        routes += [(f"/{file}", "GET", self._page(PAGE / (file or "index.html")))
                   for file in ("", "page.js", "page.css")]  # fmt: skip
        return routes

    async def answer_error(self, request: Request, error: Any) -> Response:
        """Return an error in OpenAI's form."""
        self.metrics.count_failure(error.status)
        headers = dict(error.headers)
        if error.status in (408, 413):
            headers["Connection"] = "close"  # the rest of the body is not read
        return _json(error.body, error.status, headers)

    async def answer_http_error(self, request: Request, error: Any) -> Response:
        """Return Starlette's own errors (no such route, wrong method) in OpenAI's form."""
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        made = ApiError(error.status_code, f"{request.method:.20} {request.scope['path']:.80}:"
                        f" {error.detail}", type=kind)  # fmt: skip
        response = await self.answer_error(request, made)
        response.headers.update(error.headers or {})
        return response

    async def answer_failure(self, request: Request, error: Exception) -> Response:
        """Return an error of the server itself in OpenAI's form; Starlette logs it."""
        message = f"the server failed: {type(error).__name__}"
        return await self.answer_error(request, ApiError(500, message, type="server_error"))

    # What the server is

    async def _health(self, request: Request) -> Response:
        state = self._client.state
        status = {"ready": "ok", "starting": "loading model", "draining": "shutting down"}
        body = {"status": status.get(state, state)}
        return _json(body, 200 if state == "ready" else 503)

    async def _version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def _metrics(self, request: Request) -> Response:
        client, metrics = self._client, self.metrics
        metrics.running.set(len(client.running))
        metrics.waiting.set(len(client.waiting))
        metrics.restarts.set(client.restarts)
        metrics.tasks.set(len(asyncio.all_tasks()))
        with suppress(ModelError, TimeoutError):  # a model that hangs must not hide it
            async with asyncio.timeout(STATS_SECONDS):
                stats = await client.call("stats")
            metrics.cache_bytes.set(stats.get("nbytes", 0))
            metrics.cache_evictions.set(stats.get("evictions", 0))
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    async def _models(self, request: Request) -> Response:
        names = [*self._settings.names, *self._client.info.get("adapters", ())]
        return _json({"object": "list", "data": [self._describe(name) for name in names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._adapter(name)
        return _json(self._describe(name))

    def _describe(self, name: str) -> Frame:
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "jaxllm",
            "root": self._settings.names[0], "max_model_len": self._client.info.get("context"),
        }  # fmt: skip

    async def _tokenizer_info(self, request: Request) -> Response:
        info = self._info()
        return _json({**info["special_tokens"], "chat_template": info["chat_template"],
                      "vocab_size": info["vocab_size"], "tokenizer_class": "jaxllm"})  # fmt: skip

    # Texts and tokens

    async def _tokenize(self, request: Request) -> Response:
        body = await _read_body(request)
        if "messages" in body:
            frame = {"add_special": False, **read_conversation(body)}
        else:
            text = body.get("prompt", body.get("content"))
            if not isinstance(text, str):
                raise invalid("prompt (or content) must be a text", "prompt")
            # vLLM adds the begin-of-text token unless told not to; llama.cpp the other way round.
            adds = body.get("add_special_tokens", "prompt" in body)
            frame = {"text": text, "add_special": bool(body.get("add_special", adds))}
        frame["pieces"] = bool(body.get("with_pieces"))
        done = await self._call("tokenize", **frame)
        tokens = done["tokens"]
        if done["pieces"] is not None:
            tokens = [{"id": t, "piece": _piece(p)}
                      for t, p in zip(tokens, done["pieces"], strict=True)]  # fmt: skip
        return _json({"tokens": tokens, "count": len(tokens),
                      "max_model_len": self._info()["context"]})  # fmt: skip

    async def _detokenize(self, request: Request) -> Response:
        body = await _read_body(request)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise invalid("tokens must be a list of token ids", "tokens")
        text = (await self._call("detokenize", tokens=tokens))["text"]
        return _json({"prompt": text, "content": text})

    async def _apply_template(self, request: Request) -> Response:
        done = await self._call("render", **read_conversation(await _read_body(request)))
        return _json({"prompt": done["text"]})

    async def _look(self, request: Request) -> Response:
        """Answer the page's branch view: tokens, attention and the likeliest next tokens."""
        body = await _read_body(request)
        text, tokens = body.get("text"), body.get("tokens")
        prompt = text if tokens is None else tokens
        if (text is not None and tokens is not None) or not (
            (isinstance(prompt, str) and prompt) or _is_ids(prompt)
        ):
            raise invalid("expected text or tokens, a list of token ids; not both, nor empty")
        adapter = self._adapter(_name(body))
        return _json(await self._call("look", prompt=prompt, adapter=adapter))

    async def _input_tokens(self, request: Request) -> Response:
        """Count a conversation's tokens, under llama.cpp's name."""
        done = await self._call("tokenize", **read_conversation(await _read_body(request)))
        return _json({"object": "chat.completion.input_tokens",
                      "input_tokens": len(done["tokens"])})  # fmt: skip

    # Vectors

    async def _embeddings(self, request: Request) -> Response:
        body = await _read_body(request)
        texts = body.get("input", body.get("content"))
        texts = [texts] if isinstance(texts, str) or _is_ids(texts) else texts
        if (
            not isinstance(texts, list)
            or not texts
            or len(texts) > MAX_TEXTS
            or not all((isinstance(text, str) and text) or _is_ids(text) for text in texts)
        ):
            raise invalid(
                f"input must be a text, token ids, or a list of up to {MAX_TEXTS}, none empty",
                "input",
            )
        if body.get("dimensions") is not None:
            raise unsupported("dimensions", "dimensions")
        form = body.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise invalid(f"encoding_format must be float or base64, got {form!r:.40}",
                          "encoding_format")  # fmt: skip
        done = await self._embed(body, texts)
        data = [{"object": "embedding", "index": i, "embedding": _vector(vector, form)}
                for i, vector in enumerate(done["vectors"])]  # fmt: skip
        total = sum(done["lengths"])
        return _json({"object": "list", "data": data, "model": self._answer_name(body),
                      "usage": {"prompt_tokens": total, "total_tokens": total}})  # fmt: skip

    async def _rerank(self, request: Request) -> Response:
        """Order documents by the cosine of their vectors and the query's."""
        body = await _read_body(request)
        query, documents = body.get("query"), body.get("documents", body.get("texts"))
        if not isinstance(query, str) or not query:
            raise invalid("query must be a text, not empty", "query")
        if isinstance(documents, list):
            documents = [d.get("text") if isinstance(d, dict) else d for d in documents]
        if (
            not isinstance(documents, list)
            or not documents
            or len(documents) > MAX_TEXTS
            or not (all(isinstance(text, str) and text for text in documents))
        ):
            raise invalid(f"documents must be a list of up to {MAX_TEXTS} texts, none empty",
                          "documents")  # fmt: skip
        top = body.get("top_n", len(documents))
        if type(top) is not int or top < 1:
            raise invalid(f"top_n must be a whole number from 1, got {top!r:.40}", "top_n")
        done = await self._embed(body, [query, *documents])
        import numpy as np

        query_D, *document_D = (np.frombuffer(v, "<f4") for v in done["vectors"])
        results: list[Frame] = [
            {"index": i, "relevance_score": float(np.dot(query_D, vector_D))}
            for i, vector_D in enumerate(document_D)
        ]
        if body.get("return_documents"):
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        results.sort(key=lambda result: -result["relevance_score"])
        if "texts" in body:  # as text-embeddings-inference asks, and wants its answer
            return _json([_tei_result(result, documents, body) for result in results[:top]])
        total = sum(done["lengths"])
        return _json({"object": "list", "model": self._answer_name(body), "results": results[:top],
                      "usage": {"prompt_tokens": total, "total_tokens": total}})  # fmt: skip

    async def _embed(self, body: Frame, texts: Sequence[Any]) -> Any:
        options = {"normalize": True, "pooling": self._settings.pooling}
        return await self._call(
            "embed", texts=texts, adapter=self._adapter(_name(body)), options=options
        )

    # Generation

    async def _completion(self, request: Request) -> Response:
        return await self._generate(request, read_completion(await _read_body(request)), False)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, read_chat(await _read_body(request)), True)

    async def _generate(self, request: Request, call: GenerationCall, chat: bool) -> Response:
        adapter = self._adapter(call.model)
        namespace = request.scope.get("namespace", "")
        frames = [{**f, "adapter": adapter, "namespace": namespace} for f in call.frames]
        self._check_room(len(frames))
        answer = Answer(call.model or self._settings.names[0], f"jaxllm-{__version__}", chat=chat)
        style = find_style(self._info()["chat_template"] or "")
        choices = [
            Choice(i, chat=chat, logprobs=call.logprobs, forces_tool=call.forces_tool, style=style,
                   shows_ids=call.shows_ids)
            for i in range(len(frames))
        ]  # fmt: skip
        if call.echo:
            await self._echo(call, choices, frames)
        if call.stream:
            first = self._stream(call, answer, choices, frames)
            opening = EventStream.open(first, self._settings.ping_seconds)
            stream: Response = await _unless_gone(request, opening)  # it may wait in the queue
            return stream
        ends = await _unless_gone(request, self._collect(choices, frames))
        prompts = len({str(frame.get("prompt")) for frame in frames})
        whole = answer.whole([c.whole() for c in choices], usage(ends, prompts))
        return _json({**whole, **_timings(ends)})

    async def _echo(
        self, call: GenerationCall, choices: Sequence[Choice], frames: Sequence[Frame]
    ) -> None:
        """Put each prompt in front of its choice; with its log-probabilities if they are asked."""
        for choice, frame in zip(choices, frames, strict=True):
            prompt, scored = frame["prompt"], None
            if call.logprobs is not None:
                scored = await self._call(
                    "score", prompt=prompt, adapter=frame["adapter"], top=call.logprobs
                )
            if not isinstance(prompt, str):
                prompt = (await self._call("detokenize", tokens=prompt))["text"]
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
    ) -> AsyncGenerator[bytes | None]:
        """Yield the events of a stream; None first, once the model has taken the request."""
        ends: dict[int, Frame] = {}
        more = {"usage": None} if call.include_usage else {}

        def event(choice: Frame) -> bytes:
            return _event(answer.chunk([choice], **more))

        async with aclosing(self._run(frames)) as events:
            begun = False
            async for index, frame in events:
                choice = choices[index]
                if not begun:
                    begun = True
                    yield None
                    for c in choices:
                        if answer.chat:
                            yield event(c.role_chunk())
                        elif call.echo:
                            yield event(c.echo_chunk())
                if "chunk" in frame:
                    if (piece := choice.push(frame["chunk"])) is not None:
                        yield event(piece)
                elif "done" in frame:
                    choice.end(frame["done"]["finish_reason"])
                    ends[index] = frame["done"]
                    for piece in choice.end_chunks() if answer.chat else ():
                        yield event(piece)
        if call.include_usage:
            prompts = len({str(frame.get("prompt")) for frame in frames})
            done = [ends[index] for index in range(len(frames))]
            yield _event(answer.chunk([], usage(done, prompts), **_timings(done)))

    async def _run(self, frames: Sequence[Frame]) -> AsyncGenerator[tuple[int, Frame]]:
        """Yield `(choice, frame)` of all choices as they come. Raises ApiError."""
        queue: asyncio.Queue[tuple[int, Frame | BaseException]] = asyncio.Queue()

        async def follow(index: int, fields: Frame) -> None:
            clock = self.metrics.follow()
            try:
                if not fields["options"].get("max_new_tokens", 1):  # the prompt alone
                    tokens = (await self._call("tokenize", **_as_text(fields)))["tokens"]
                    queue.put_nowait((index, _no_tokens(len(tokens))))
                    return
                async with aclosing(self._client.generate(fields)) as events:
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
                index, frame = await queue.get()
                if isinstance(frame, BaseException):
                    raise from_model(frame) if isinstance(frame, ModelError) else frame
                left -= "done" in frame
                yield index, frame
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check_room(self, count: int) -> None:
        """Raise ApiError if too many requests wait already."""
        limit = self._info()["rows"] + self._settings.max_waiting
        if len(self._client.waiting) + len(self._client.running) + count > limit:
            raise ApiError(429, f"{len(self._client.waiting)} requests are waiting: retry later",
                           type="rate_limit_error", code="queue_full")  # fmt: skip

    async def _call(self, do: str, **fields: Any) -> Any:
        try:
            return await self._client.call(do, **fields)
        except ModelError as error:
            raise from_model(error) from None

    def _info(self) -> Frame:
        """Return what the model's process said of itself. Raises ApiError while it loads."""
        if self._client.state != "ready":
            state = self._client.state
            why = "the server is shutting down" if state == "draining" else "the model is loading"
            raise ApiError(503, why, type="unavailable_error")
        return self._client.info

    def _adapter(self, name: str) -> str | None:
        """Return the adapter for a model's name. Raises ApiError for an unknown name."""
        adapters = self._info()["adapters"]
        if name in adapters:
            return name
        if name and name not in self._settings.names:
            known = ", ".join([*self._settings.names, *adapters])
            raise ApiError(
                404, f"the model {name!r:.80} does not exist; there are: {known}",
                type="not_found_error", param="model", code="model_not_found",
            )  # fmt: skip
        return "base" if adapters else None

    def _answer_name(self, body: Frame) -> str:
        return _name(body) or self._settings.names[0]

    def _page(self, file: Path) -> Callable[[Request], Awaitable[Response]]:
        async def send_page(request: Request) -> Response:
            if not file.exists():
                raise HTTPException(404, "Not Found")
            kind = PAGE_TYPES[file.suffix]
            return Response(file.read_bytes(), media_type=kind, headers=PAGE_HEADERS)

        return send_page


class EventStream(Response):
    """Server-sent events; the generator is closed when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes | None], ping_seconds: float) -> None:
        super().__init__()
        self._events, self._ping = events, ping_seconds

    @classmethod
    async def open(cls, events: AsyncGenerator[bytes | None], ping_seconds: float) -> "EventStream":
        """Return the response once the first event is there, so an error still has a status."""
        try:
            await anext(events)
        except BaseException:
            await events.aclose()
            raise
        return cls(events, ping_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, or stop where the client leaves."""
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_wait_until_gone(receive))
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
            async for event in _with_pings(self._events, self._ping):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": _event(error.body),
                        "more_body": True})  # fmt: skip
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _with_pings(events: AsyncIterator[bytes | None], seconds: float) -> AsyncIterator[bytes]:
    """Yield events, and a comment whenever none came for some seconds."""
    while True:
        following = asyncio.ensure_future(anext(events))
        try:
            while not following.done():
                await asyncio.wait((following,), timeout=seconds)
                if not following.done():
                    yield b": ping\n\n"
            event = following.result()
        except StopAsyncIteration:
            return
        finally:
            if not following.done():
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        if event is not None:
            yield event


class _RequestIds:
    """Gives every answer an `x-request-id`: the client's, if it sent a plain one."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        plain = 0 < len(given) <= 64 and given.replace("-", "").replace("_", "").isalnum()
        name = given if plain and given.isascii() else f"req-{secrets.token_hex(8)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _read_body(request: Request) -> Frame:
    """Return the JSON object of a request. Raises ApiError."""
    try:
        body = parse_json(await request.body(), "the body", JaxllmError)
    except JaxllmError as error:
        raise invalid(str(error)) from None
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, got {type(body).__name__}")
    return body


async def _unless_gone(request: Request, work: Any) -> Any:
    """Return the result of a coroutine, which is cancelled if the client leaves."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_until_gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _forget_client(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, "application/json")


def _event(body: Frame) -> bytes:
    return b"data: " + encode_json(body) + b"\n\n"


def _name(body: Frame) -> str:
    name = body.get("model") or ""
    if not isinstance(name, str):
        raise invalid(f"model must be a name, got {name!r:.40}", "model")
    return name


def _tei_result(result: Frame, documents: Sequence[str], body: Frame) -> Frame:
    """Return a document's rank in the form of Hugging Face's text-embeddings-inference."""
    index = result["index"]
    text = {"text": documents[index]} if body.get("return_text") else {}
    return {"index": index, "score": result["relevance_score"], **text}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _vector(data: bytes, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(data).decode()
    import numpy as np

    return [float(str(x)) for x in np.frombuffer(data, "<f4")]


def _piece(token: bytes) -> Any:
    """Return a token as text, or as numbers where it is a part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return list(token)


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
