"""The routes: OpenAI's interface as an ASGI application (Starlette).

An answer belongs to its request's task: if the client leaves, the task is cancelled, and with it
what the model computes for it, in the queue, within the prompt or while decoding.
"""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm import __version__
from jaxllm.server.backend import ServerBackend, ServerSettings, json_response, read_body
from jaxllm.server.errors import ApiError, invalid
from jaxllm.server.generation_routes import GenerationRoutes
from jaxllm.server.limits import (
    PAGE_FILES,
    Bounds,
    Hosts,
    Keys,
    Message,
    Receive,
    Scope,
    Send,
)
from jaxllm.server.messages_api import MessagesRoutes
from jaxllm.server.metrics import CONTENT_TYPE
from jaxllm.server.model_client import ModelClient, ModelError
from jaxllm.server.openai_requests import ModelFields, check_fields, is_prompt, read_conversation
from jaxllm.server.responses_api import ResponsesRoutes, ResponseStore
from jaxllm.server.streams import unless_gone
from jaxllm.server.vector_routes import VectorRoutes

Frame = dict[str, Any]
PAGE = Path(__file__).parent / "page"
PAGE_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
STATS_SECONDS = 0.5


def build_app(
    client: ModelClient,
    settings: ServerSettings,
    *,
    starts_model: bool = False,
    responses: ResponseStore | None = None,
    layers: Sequence[Middleware] | None = None,
) -> Starlette:
    """Return the application that answers with this model.

    Args:
        starts_model: The application starts the model's process, and ends it.
        responses: Where responses are kept, if several applications share them.
        layers: Around the routes, instead of `make_layers`.
    """
    api = Api(client, settings, responses or ResponseStore())

    @asynccontextmanager
    async def live(_: Starlette) -> AsyncIterator[None]:
        if starts_model:
            await client.start()
        yield
        if starts_model:
            await client.close()

    routes = [Route(path, answer, methods=[method]) for path, method, answer in api.routes()]
    layers = make_layers(settings) if layers is None else layers
    app = Starlette(
        routes=routes, middleware=layers, lifespan=live, exception_handlers=error_handlers(api)
    )
    app.state.api = api
    app.router.redirect_slashes = False
    return app


def make_layers(settings: ServerSettings) -> list[Middleware]:
    """Return what is around the routes: names of requests, origins, hosts, keys and limits."""
    layers = [Middleware(_RequestIds)]
    if settings.origins:
        layers.append(
            Middleware(
                CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"],
                allow_headers=["*"], allow_credentials="*" not in settings.origins,
                expose_headers=["x-request-id"],
            )
        )  # fmt: skip
    if not settings.keys and "*" not in settings.hosts:
        layers.append(Middleware(Hosts, names=settings.hosts))
    layers += [
        Middleware(Keys, keys=settings.keys),
        Middleware(Bounds, body_bytes=settings.body_bytes, read_seconds=settings.read_seconds),
    ]
    return layers


def error_handlers(api: "Api") -> dict[Any, Any]:
    """Return what answers each kind of exception."""
    return {
        ApiError: api.answer_error, HTTPException: api.answer_http_error,
        ClientDisconnect: _forget_client, Exception: api.answer_failure,
    }  # fmt: skip


class _Texts(Struct):
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None


class _Tokens(Struct):
    tokens: list[int]


class _Look(ModelFields):
    text: str | None = None
    tokens: list[int] | None = None


class Api:
    """The routes' functions."""

    def __init__(
        self, client: ModelClient, settings: ServerSettings, responses: ResponseStore
    ) -> None:
        self._backend = backend = ServerBackend(client, settings)
        self.metrics = backend.metrics
        self._generation, self._vectors = GenerationRoutes(backend), VectorRoutes(backend)
        self._responses = ResponsesRoutes(self._generation, responses)
        self._messages = MessagesRoutes(self._generation)
        self._created = int(time.time())

    def routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        """Return path, method and function of every route."""
        chat, text = self._generation.chat, self._generation.completion
        routes: list[Any] = [
            ("/health", "GET", self._health),
            ("/metrics", "GET", self._metrics),
            ("/version", "GET", self._version),
            ("/props", "GET", self._props),
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
                (f"{prefix}/responses", "POST", self._responses.create),
                (f"{prefix}/responses/input_tokens", "POST", self._responses.count),
                (f"{prefix}/responses/{{name}}", "GET", self._responses.retrieve),
                (f"{prefix}/responses/{{name}}", "DELETE", self._responses.delete),
                (f"{prefix}/messages", "POST", self._messages.create),
                (f"{prefix}/messages/count_tokens", "POST", self._messages.count),
                (f"{prefix}/embeddings", "POST", self._vectors.embeddings),
                (f"{prefix}/rerank", "POST", self._vectors.rerank),
            ]
        routes += [
            (f"/{file}", "GET", self._page(PAGE / (file or "index.html")))
            for file in ("", *PAGE_FILES)
        ]
        return routes

    async def answer_error(self, request: Request, error: Any) -> Response:
        """Return an error in the form of the route's interface."""
        self._backend.metrics.count_failure(error.status)
        headers = dict(error.headers)
        if error.status in (408, 413):
            headers["Connection"] = "close"  # the rest of the body is not read
        return json_response(error.format(request.scope["path"]), error.status, headers)

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
        state = self._backend.client.state
        status = {"ready": "ok", "starting": "loading model", "draining": "shutting down"}
        body = {"status": status.get(state, state)}
        return json_response(body, 200 if state == "ready" else 503)

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def _props(self, request: Request) -> Response:
        """Describe the server under llama.cpp's names."""
        info, name = self._backend.info(), self._backend.settings.names[0]
        tokens = {key: info["special_tokens"].get(key, "") for key in ("bos_token", "eos_token")}
        return json_response({
            "default_generation_settings": {"n_ctx": info["context"],
                                            "params": info.get("sampling", {})},
            "total_slots": info["rows"], "model_alias": name, "model_path": name, **tokens,
            "chat_template": info["chat_template"] or "", "build_info": f"jaxllm-{__version__}",
            "modalities": {"vision": False, "audio": False},
        })  # fmt: skip

    async def _metrics(self, request: Request) -> Response:
        await self.update_metrics()
        return Response(self.metrics.render(), media_type=CONTENT_TYPE)

    async def update_metrics(self) -> None:
        """Read the numbers of now: requests, tasks, the prefix cache."""
        client, metrics = self._backend.client, self._backend.metrics
        metrics.running.set(len(client.running))
        metrics.waiting.set(len(client.waiting))
        metrics.restarts.set(client.restarts)
        metrics.tasks.set(len(asyncio.all_tasks()))
        with suppress(ModelError, TimeoutError):  # a model that hangs must not hide it
            async with asyncio.timeout(STATS_SECONDS):
                stats = await client.call("stats")
            metrics.cache_bytes.set(stats.get("nbytes", 0))
            metrics.cache_evictions.set(stats.get("evictions", 0))
            metrics.programs.set(stats.get("programs_to_compile", math.nan))

    async def _models(self, request: Request) -> Response:
        data = [self.describe_model(name) for name in self.names()]
        return json_response({"object": "list", "data": data})

    def names(self) -> list[str]:
        """Return the names that requests may have as their model."""
        return [*self._backend.settings.names, *self._backend.client.info.get("adapters", ())]

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:  # `adapter` takes it for the default
            raise HTTPException(404, "Not Found")
        self._backend.adapter(name)
        return json_response(self.describe_model(name))

    def describe_model(self, name: str) -> Frame:
        """Return a model's entry in OpenAI's list of models."""
        info = self._backend.client.info
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "jaxllm",
            "root": self._backend.settings.names[0],
            "max_model_len": info.get("context"),
        }  # fmt: skip

    async def _tokenizer_info(self, request: Request) -> Response:
        info = self._backend.info()
        return json_response({**info["special_tokens"], "chat_template": info["chat_template"],
                      "vocab_size": info["vocab_size"], "tokenizer_class": "jaxllm"})  # fmt: skip

    # Texts and tokens

    async def _tokenize(self, request: Request) -> Response:
        body = await read_body(request)
        if "messages" in body:
            frame = {"add_special": False, **read_conversation(body)}
        else:
            fields = check_fields(body, _Texts)
            text = fields.content if fields.prompt is None else fields.prompt
            if text is None:
                raise invalid("prompt (or content) must be a text", "prompt")
            # vLLM adds the begin-of-text token unless told not to; llama.cpp the other way round.
            adds = "prompt" in body if fields.add_special is None else fields.add_special
            adds = adds if fields.add_special_tokens is None else fields.add_special_tokens
            frame = {"text": text, "add_special": adds}
        frame["pieces"] = bool(body.get("with_pieces"))
        done = await self._backend.call("tokenize", **frame)
        tokens = done["tokens"]
        if done["pieces"] is not None:
            tokens = [
                {"id": t, "piece": _piece(p)} for t, p in zip(tokens, done["pieces"], strict=True)
            ]
        return json_response({"tokens": tokens, "count": len(tokens),
                      "max_model_len": self._backend.info()["context"]})  # fmt: skip

    async def _detokenize(self, request: Request) -> Response:
        tokens = check_fields(await read_body(request), _Tokens).tokens
        text = (await self._backend.call("detokenize", tokens=tokens))["text"]
        return json_response({"prompt": text, "content": text})

    async def _apply_template(self, request: Request) -> Response:
        done = await self._backend.call("render", **read_conversation(await read_body(request)))
        return json_response({"prompt": done["text"]})

    async def _look(self, request: Request) -> Response:
        """Answer the page's branch view: tokens, attention and the likeliest next tokens."""
        fields = check_fields(await read_body(request), _Look)
        prompt = fields.text if fields.tokens is None else fields.tokens
        if (fields.text is not None and fields.tokens is not None) or not is_prompt(prompt):
            raise invalid("expected text or tokens, a list of token ids; not both, nor empty")
        adapter = self._backend.adapter(fields.model)
        looking = self._backend.call("look", prompt=prompt, adapter=adapter)
        return json_response(await unless_gone(request, looking))

    async def _input_tokens(self, request: Request) -> Response:
        """Count a conversation's tokens, under llama.cpp's name."""
        count = await self._generation.count_tokens(read_conversation(await read_body(request)))
        return json_response({"object": "chat.completion.input_tokens", "input_tokens": count})

    def _page(self, file: Path) -> Callable[[Request], Awaitable[Response]]:
        async def send_page(request: Request) -> Response:
            if not file.exists():
                raise HTTPException(404, "Not Found")
            kind = PAGE_TYPES[file.suffix]
            return Response(file.read_bytes(), media_type=kind, headers=PAGE_HEADERS)

        return send_page


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


async def _forget_client(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the connection is closed


def _piece(token: bytes) -> Any:
    """Return a token as text, or as numbers where it is a part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return list(token)
