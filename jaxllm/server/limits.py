"""Limits of the HTTP side, as plain ASGI middleware: keys, sizes of bodies, times.

Nothing here buffers an answer, so a client that leaves is noticed by the request itself.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.server.errors import ApiError
from jaxllm.server.openai_responses import encode_json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
HEADER_BYTES = 16 << 10
PAGE_FILES = ("page.js", "shared.js", "chat.js", "branches.js", "page.css")
PUBLIC_PATHS = ("/", "/health", *(f"/{file}" for file in PAGE_FILES))


def read_keys(path: Path) -> list[str]:
    """Return the keys of a file, one a line; # begins a comment. Raises ConfigError for none."""
    lines = [line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines()]
    keys = [line for line in lines if line]
    if not keys:
        raise ConfigError(f"{path} has no keys: expected one a line")
    return keys


class Keys:
    """Lets only requests with a key through; `namespace` in the scope tells keys apart."""

    def __init__(self, app: App, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http" or not self._keys or scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        given = read_key(scope)
        # All keys are compared, and each in constant time.
        if not sum(hmac.compare_digest(given, key) for key in self._keys):
            await send_error(
                scope, send, ApiError(401, "Invalid API Key", type="authentication_error")
            )
            return
        scope["namespace"] = hashlib.sha256(given).hexdigest()[:16]
        await self._app(scope, receive, send)


class Hosts:
    """Lets only requests through whose Host is an address, `localhost` or one of `names`.

    A page of any site can give its own name this machine's address (DNS rebinding) and then read
    what a server without a key answers; its requests have that name as their Host.
    """

    def __init__(self, app: App, names: Sequence[str]) -> None:
        self._app, self._names = app, {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if given and not self._is_known(given):
                message = f"Host {given!r:.60} is unknown: start the server with --allow-host NAME"
                await send_error(scope, send, ApiError(403, message, type="permission_error"))
                return
        await self._app(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host).lower()
        with suppress(ValueError):
            return bool(ip_address(name.removeprefix("[").removesuffix("]")))
        return name in self._names or name.endswith(".localhost")


def read_key(scope: Scope) -> bytes:
    """Return the key that a request shows, or b""."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    authorization = headers.get(b"authorization", b"")
    if authorization[:7].lower() == b"bearer ":
        return authorization[7:].strip()
    return headers.get(b"x-api-key", b"")


class Bounds:
    """Refuses headers and bodies that are too large, and bodies that do not come in time."""

    def __init__(self, app: App, *, body_bytes: int, read_seconds: float) -> None:
        self._app, self._bytes, self._seconds = app, body_bytes, read_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > HEADER_BYTES:
            await send_error(scope, send, headers_too_large())
            return
        length = dict(headers).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._bytes:
            await send_error(scope, send, self._too_large())
            return
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def receive_bounded() -> Message:
            nonlocal size, complete
            if complete:  # only the end of the connection can follow
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"no whole body within {self._seconds:g} s") from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self._bytes:
                raise self._too_large()
            return message

        await self._app(scope, receive_bounded, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self._bytes} bytes", code="body_too_large")


def headers_too_large() -> ApiError:
    """Return the error of a request whose headers exceed the limit."""
    return ApiError(431, f"the headers exceed {HEADER_BYTES} bytes")


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Send an error as the whole answer."""
    headers, body = error_parts(error, scope["path"])
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_parts(error: ApiError, path: str = "") -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the body of an error's answer."""
    body = encode_json(error.format(path))
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)),
               **error.headers}  # fmt: skip
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()], body
