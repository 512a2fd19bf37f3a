"""Several models behind one address: a request goes to the application of the model that it names.

A model is loaded when a request names it. It is unloaded after a time without requests, or when
another one needs its memory, once its answers have ended.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import Metric, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.server.app import Api, build_app, error_handlers, make_layers
from jaxllm.server.backend import ServerSettings, json_response, read_body
from jaxllm.server.errors import ApiError, invalid, unknown_model
from jaxllm.server.limits import Message, Receive, Scope, Send
from jaxllm.server.metrics import CONTENT_TYPE
from jaxllm.server.model_client import ModelClient, ModelError
from jaxllm.server.responses_api import ResponseStore
from jaxllm.server.streams import unless_gone

# Paths that ask the model though they have no body.
_ASKS_MODEL = ("/props", "/tokenizer_info")
_LOOK_SECONDS = 1.0  # between looks for idle models, at most


@dataclasses.dataclass(eq=False)
class ServedModel:
    """A model that is loaded when it is asked.

    Attributes:
        names: Its names for clients; the first is the one in answers.
        adapters: Names of adapters that are loaded with it.
        nbytes: Memory that it takes, as far as known: first the size of its files.
    """

    client: ModelClient
    names: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.num_open, self.last_used, self.is_leaving = 0, 0.0, False
        self.is_idle = asyncio.Event()

    @property
    def is_loaded(self) -> bool:
        """Whether it takes requests, or is just being started again."""
        return self.client.is_started and not self.is_leaving

    def status(self) -> str:
        """Return "loaded", "loading", "unloading" or "unloaded"."""
        if not self.client.is_started:
            return "unloaded"
        if self.is_leaving:
            return "unloading"
        return "loaded" if self.client.state == "ready" else "loading"

    async def measure(self) -> int:
        """Return the bytes that its process takes, 0 without one."""
        if not self.client.is_started:
            return 0
        with suppress(ModelError, TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                self.nbytes = (await self.client.call("stats"))["memory_bytes"]
        return self.nbytes

    async def unload(self) -> None:
        """End its process once its requests have ended; those that come meanwhile wait."""
        self.is_leaving = True
        try:
            while self.num_open:
                self.is_idle.clear()
                await self.is_idle.wait()
            await self.measure()
            await self.client.unload()
        finally:
            self.is_leaving = False


class ModelRouter:
    """The application of several models, and their processes: `listen.run` runs it as one model.

    Args:
        models: The first is the one for requests that name none, and is loaded at the start.
        settings: Of the server; names are those of the models.
        memory: Bytes that all loaded models may take; one alone may take more. None: no limit.
        idle_seconds: After this long without a request a model is unloaded; None: never.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        settings: ServerSettings,
        memory: int | None,
        idle_seconds: float | None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.models, self._memory, self._idle_seconds, self._log = models, memory, idle_seconds, log
        self._apps, self._apis = dict[ServedModel, Starlette](), dict[ServedModel, Api]()
        store = ResponseStore()
        for model in models:
            waiting = model.client.settings.max_waiting
            own = dataclasses.replace(settings, names=model.names, max_waiting=waiting)
            app = build_app(model.client, own, responses=store, layers=())
            self._apps[model], self._apis[model] = app, app.state.api
        self._loading = asyncio.Lock()  # one model at a time is loaded or unloaded
        self._watching: asyncio.Task[None] | None = None
        routes = [
            Route(f"{prefix}/models{rest}", answer)
            for prefix in ("", "/v1")
            for rest, answer in (("", self._list), ("/{name:path}", self._describe))
        ]
        routes += [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/{path:path}", _Forward(self._answer)),
        ]
        handlers = error_handlers(self._apis[models[0]])
        self.app = Starlette(
            routes=routes, middleware=make_layers(settings), exception_handlers=handlers
        )
        self.app.router.redirect_slashes = False

    @property
    def info(self) -> dict[str, str]:
        """What to say of the models at the start."""
        return {"model": f"models: {', '.join(model.names[0] for model in self.models)}"}

    async def start(self) -> None:
        """Load the first model. Raises ModelError if it cannot be."""
        await self._load(self.models[0])
        if self._idle_seconds is not None:
            self._watching = asyncio.create_task(self._unload_idle(self._idle_seconds))

    async def drain(self, seconds: float) -> None:
        """Refuse new and waiting requests; return when the running ones end, or after `seconds`."""
        await asyncio.gather(*(model.client.drain(seconds) for model in self.models))

    async def close(self) -> None:
        """End all processes and the open requests."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(model.client.close() for model in self.models))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in the application of its model, which it loads first."""
        request = Request(scope, receive)
        model, asks = self.models[0], request.method == "POST"
        if asks:
            model = self._find((await read_body(request)).get("model") or "")
            receive = _replay(await request.body(), receive)
        elif request.url.path in _ASKS_MODEL:
            asks, model = True, self._find(request.query_params.get("model", ""))
        if not asks:
            await self._apps[model](scope, receive, send)
            return
        while not model.is_loaded and model.client.state != "draining":
            try:
                await unless_gone(request, self._load(model))
            except ModelError as error:
                why = f"{model.names[0]}: {error}"
                raise ApiError(503, why, type="unavailable_error") from None
        model.num_open += 1
        try:
            await self._apps[model](scope, receive, send)
        finally:
            model.num_open -= 1
            model.last_used = time.monotonic()
            if not model.num_open:
                model.is_idle.set()

    def _find(self, name: Any) -> ServedModel:
        """Return the model with this name, or with an adapter of it. Raises ApiError."""
        if not isinstance(name, str):
            raise invalid(f"model must be a text, got {name!r:.40}", "model")
        if not name:
            return self.models[0]
        for model in self.models:
            if name in self._names(model):
                return model
        raise unknown_model(name, [known for model in self.models for known in self._names(model)])

    def _names(self, model: ServedModel) -> list[str]:
        return list(dict.fromkeys((*model.names, *model.adapters, *self._apis[model].names())))

    async def _load(self, model: ServedModel) -> None:
        """Load a model, if it still has to be; others make room. Raises ModelError."""
        async with self._loading:
            if model.is_loaded:
                return
            await self._make_room(model)
            self._log(f"loading {model.names[0]}")
            try:
                await model.client.start()
            except BaseException:  # the next request tries again
                await model.client.unload()
                raise
            model.last_used = time.monotonic()

    async def _make_room(self, model: ServedModel) -> None:
        """Unload the models that were used longest ago until there is memory for another."""
        if self._memory is None:
            return
        while loaded := [other for other in self.models if other.is_loaded]:
            held = sum([await other.measure() for other in loaded])
            if held + model.nbytes <= self._memory:
                return
            oldest = min(loaded, key=lambda other: (other.num_open > 0, other.last_used))
            self._log(f"unloading {oldest.names[0]}: {model.names[0]} needs its memory")
            await oldest.unload()

    async def _unload_idle(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(min(seconds, _LOOK_SECONDS))
            for model in self.models:
                async with self._loading:
                    unused = time.monotonic() - model.last_used
                    if model.is_loaded and not model.num_open and unused >= seconds:
                        self._log(f"unloading {model.names[0]}, unused for {unused:.0f} s")
                        await model.unload()

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok", "models": self._statuses()})

    def _statuses(self) -> dict[str, str]:
        return {model.names[0]: model.status() for model in self.models}

    async def _list(self, request: Request) -> Response:
        data = [self._entry(model, name) for model in self.models for name in self._names(model)]
        return json_response({"object": "list", "data": data})

    async def _describe(self, request: Request) -> Response:
        name = request.path_params["name"]
        return json_response(self._entry(self._find(name), name))

    def _entry(self, model: ServedModel, name: str) -> dict[str, Any]:
        """Return a model's description, with the field `status` of llama.cpp's router."""
        return {**self._apis[model].describe_model(name), "status": {"value": model.status()}}

    async def _metrics(self, request: Request) -> Response:
        for model in self.models:
            if model.is_loaded:
                await self._apis[model].update_metrics()
        pages = _Merged([api.metrics.registry.collect() for api in self._apis.values()])
        return Response(generate_latest(pages), media_type=CONTENT_TYPE)


class _Forward:
    """An ASGI application as the endpoint of a route, for all methods."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


class _Merged:
    """Metrics of several registries, as one page has them: each name once."""

    def __init__(self, pages: Iterable[Iterable[Metric]]) -> None:
        self._metrics = dict[str, Metric]()
        for metric in (metric for page in pages for metric in page):
            known = self._metrics.setdefault(metric.name, metric)
            if known is not metric:
                known.samples.extend(metric.samples)

    def collect(self) -> Iterable[Metric]:
        return self._metrics.values()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that has a body, which was read, once more."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
