"""Shared by all routes: the model's process, the settings, and plain JSON both ways."""

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import JaxllmError
from jaxllm.files import parse_json
from jaxllm.server.errors import ApiError, from_model, invalid, unknown_model
from jaxllm.server.metrics import ServerMetrics
from jaxllm.server.model_client import ModelClient, ModelError
from jaxllm.server.openai_responses import encode_json

Frame = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """How the HTTP side behaves.

    Attributes:
        names: The model's names; the first is the one in answers.
        keys: Keys that clients must show; none: everybody may ask.
        origins: Web pages that may ask (CORS); "*" for all.
        hosts: Names under which clients reach a server without keys, besides localhost and
            addresses; "*" for all.
        max_waiting: Requests that may wait for a row.
        body_bytes: Largest body.
        read_seconds: Time for a request's body to arrive.
        ping_seconds: A stream without news sends a comment this often.
        rerank: How documents are ranked if a request does not ask for a method (`LM.rerank`).
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_waiting: int = 64
    body_bytes: int = 4 << 20
    read_seconds: float = 30.0
    ping_seconds: float = 15.0
    rerank: str | None = None


class ServerBackend:
    """The model's process with the settings of the server; a refused call raises ApiError."""

    def __init__(self, client: ModelClient, settings: ServerSettings) -> None:
        self.client, self.settings = client, settings
        self.metrics = ServerMetrics(settings.names[0])

    async def call(self, do: str, **fields: Any) -> Any:
        try:
            return await self.client.call(do, **fields)
        except ModelError as error:
            raise from_model(error) from None

    def info(self) -> Frame:
        """Return what the model's process said of itself. Raises ApiError while it loads."""
        if self.client.state != "ready":
            state = self.client.state
            why = "the server is shutting down" if state == "draining" else "the model is loading"
            raise ApiError(503, why, type="unavailable_error")
        return self.client.info

    def adapter(self, name: str) -> str | None:
        """Return the adapter for a model's name. Raises ApiError for an unknown name."""
        adapters = self.info()["adapters"]
        if name in adapters:
            return name
        if name and name not in self.settings.names:
            raise unknown_model(name, [*self.settings.names, *adapters])
        return "base" if adapters else None

    def answer_name(self, name: str) -> str:
        """Return the name of the model in the answer to a request for this one."""
        return name or self.settings.names[0]

    def check_room(self, count: int) -> None:
        """Raise ApiError if too many requests wait already."""
        limit = self.info()["rows"] + self.settings.max_waiting
        if count > limit:  # for ever
            raise invalid(
                f"{count} choices are more than the server takes at once: expected at most {limit}",
                "n",
            )
        if len(self.client.waiting) + len(self.client.running) + count > limit:
            raise ApiError(429, f"{len(self.client.waiting)} requests are waiting: retry later",
                           type="rate_limit_error", code="queue_full")  # fmt: skip


async def read_body(request: Request) -> Frame:
    """Return the JSON object of a request. Raises ApiError."""
    try:
        body = parse_json(await request.body(), "the body", JaxllmError)
    except JaxllmError as error:
        raise invalid(str(error)) from None
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, "application/json")
