"""Limits of the HTTP side, with a stub for the model: keys, sizes, times, clients that leave."""

import asyncio
import hmac
import json
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from jaxllm.server import limits, listen
from jaxllm.server.limits import HEADER_BYTES
from jaxllm.server.model_client import ModelClient, ModelError
from jaxllm.server.model_process import ModelSettings
from scripts.tools.hostile.client import Answer, Connection, encode_request
from tests.server.servers import Frame, StubModel, serve_stub, until

pytestmark = pytest.mark.anyio
PATH, BODY = "/v1/completions", {"prompt": "x", "max_tokens": 1}
POST = encode_request("POST", PATH, json.dumps(BODY).encode())


def error_of(answer: Answer | None) -> Any:
    """Return the error of an answer, whose form is OpenAI's."""
    assert answer is not None
    error = json.loads(answer.body)["error"]
    assert {"message", "type", "param", "code"} <= error.keys() and error["message"]
    return error


async def test_small_pieces_are_sent_at_once() -> None:
    """Connections do not wait for more to send: each answer would begin 40 ms later."""
    flags: asyncio.Queue[int] = asyncio.Queue()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made = writer.get_extra_info("socket")
        flags.put_nowait(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with listen.Address("127.0.0.1", 0).open() as listening:
        async with await asyncio.start_server(accept, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            assert await flags.get() != 0
            writer.close()


async def wait_forever(fields: Frame) -> AsyncGenerator[Frame]:
    """Never get a row."""
    await asyncio.Event().wait()
    yield {}


async def test_keys_open_all_routes_but_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key opens as Bearer and as X-Api-Key; all keys are compared, in constant time."""
    compared: list[bytes] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return hmac.compare_digest(given, key)

    class Watched:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(limits, "hmac", Watched)

    model = StubModel()
    async with serve_stub(model, keys=("first", "second")) as server:
        assert (await server.ask("GET", "/health")).status == 200
        for wrong in ("", "x", "firs", "first2", "FIRST", "first second"):
            answer = await server.ask("POST", PATH, BODY, authorization=f"Bearer {wrong}")
            assert (answer.status, error_of(answer)["type"]) == (401, "authentication_error")
        assert (await server.ask("GET", "/metrics")).status == 401
        for headers in (
            {"authorization": "Bearer first"}, {"x_api_key": "first"},
            {"authorization": "bearer second"},
        ):  # fmt: skip
            compared.clear()
            assert (await server.ask("POST", PATH, BODY, **headers)).status == 200
            assert compared == [b"first", b"second"]
    first, again, second = (fields["namespace"] for fields in model.asked)
    assert first == again != second


async def test_preflight_names_allowed_origin_only() -> None:
    """A page of an allowed origin may ask, with its headers, without a key for the preflight."""
    async with serve_stub(StubModel(), keys=("k",), origins=("https://page",)) as server:
        asked = {"access_control_request_method": "POST",
                 "access_control_request_headers": "authorization"}  # fmt: skip
        good = await server.ask("OPTIONS", PATH, origin="https://page", **asked)
        assert good.status == 200
        assert good.headers["access-control-allow-origin"] == "https://page"
        answer = await server.ask("GET", "/health", origin="https://page")
        assert answer.headers["access-control-expose-headers"] == "x-request-id"
        bad = await server.ask("OPTIONS", PATH, origin="https://other", **asked)
        assert (bad.status, "access-control-allow-origin" in bad.headers) == (400, False)


async def test_large_bodies_and_headers_are_refused() -> None:
    """A body over the limit gets 413, announced or not; large headers 431; what is not HTTP 400."""
    async with serve_stub(StubModel(), body_bytes=1000) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        large = head + b"content-length: 1001\r\n\r\n"
        chunks = head + b"transfer-encoding: chunked\r\n\r\n3e9\r\n" + b" " * 1001 + b"\r\n"
        for request in (large, chunks):
            answer = await server.send(request)
            assert error_of(answer)["code"] == "body_too_large"
            assert answer and (answer.status, answer.headers["connection"]) == (413, "close")
        fits = json.dumps(BODY).encode().ljust(1000)
        answer = await server.send(encode_request("POST", PATH, fits))
        assert answer and answer.status == 200
        for status, request in (
            (431, b"GET / HTTP/1.1\r\nx: " + b"y" * HEADER_BYTES),
            (431, encode_request("GET", "/health", x="y" * HEADER_BYTES)),
            (400, b"\x16\x03\x01\r\n\r\n"),
            (400, head + b"transfer-encoding: chunked\r\n\r\nzz\r\n"),
        ):  # fmt: skip
            answer = await server.send(request)
            assert error_of(answer) and answer and answer.status == status
        answer = await server.send(encode_request("POST", "/nothing", b"{}", host="["))
        assert error_of(answer) and answer and answer.status in (400, 403)


async def test_unknown_host_is_refused_without_keys() -> None:
    """A name that is not this server's own may be another site's (DNS rebinding): 403.

    With a key nothing can be read anyway. Addresses cannot be rebound.
    """
    known = ("127.0.0.1:80", "[::1]:80", "192.168.1.5", "localhost", "LocalHost:8000",
             "a.localhost", "box.lan:9")  # fmt: skip

    async with serve_stub(StubModel(), hosts=("box.lan",)) as server:
        for host in known:
            assert (await server.ask("POST", PATH, BODY, host=host)).status == 200
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[x]"):
            answer = await server.ask("POST", PATH, BODY, host=host)
            assert (answer.status, error_of(answer)["type"]) == (403, "permission_error")
    async with serve_stub(StubModel(), keys=("k",)) as server:
        answer = await server.ask("GET", "/health", host="evil.example")
        assert answer.status == 200


async def test_slow_clients_are_cut() -> None:
    """Headers that do not end close the connection; a body that does not end gets 408; a client
    that does not read ends its generation."""

    async def flood(fields: Frame) -> AsyncGenerator[Frame]:
        yield {"started": True}
        while True:
            yield {"chunk": ["x" * 100_000, 5, None]}
            await asyncio.sleep(0.01)

    model = StubModel(flood)
    times = {"header_seconds": 0.3, "write_seconds": 0.3}
    async with serve_stub(model, times, read_seconds=0.3) as server:
        assert await server.send(b"GET /health HTTP/1.1\r\nx: y") is None
        answer = await server.send(POST[:-3])
        assert error_of(answer) and answer and answer.status == 408
        body = json.dumps({**BODY, "stream": True}).encode()
        connection = await Connection.open(server.host, server.port, receive_bytes=4096)
        await connection.send(encode_request("POST", PATH, body))
        try:
            await until(lambda: model.left == 1)
        finally:
            connection.reset()
            await connection.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_queue_is_cancelled(stream: bool) -> None:
    """A request that has no row yet ends with its client, by a reset or by a FIN."""
    model = StubModel(wait_forever)
    async with serve_stub(model) as server:
        body = json.dumps({**BODY, "stream": stream, "n": 2}).encode()
        for number, reset in enumerate((False, True), 1):
            connection = await Connection.open(server.host, server.port)
            await connection.send(encode_request("POST", PATH, body))
            await until(lambda: len(model.asked) == 2 * number)  # noqa: B023
            if reset:
                connection.reset()
            await connection.close()
            await until(lambda: model.left == 2 * number)  # noqa: B023


async def test_full_queue_is_refused_with_retry_after() -> None:
    """More requests than rows and places in the queue get 429."""
    model = StubModel()
    async with serve_stub(model, max_waiting=2) as server:
        model.running, model.waiting = {1, 2}, {3, 4}
        answer = await server.ask("POST", PATH, BODY)
        assert (answer.status, error_of(answer)["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) > 0
        model.waiting = {3}
        assert (await server.ask("POST", PATH, BODY)).status == 200


async def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection too many gets 503 in OpenAI's form; then there is room again."""
    monkeypatch.setattr(listen, "MAX_CONNECTIONS", 1)

    async with serve_stub(StubModel()) as server:
        first = await Connection.open(server.host, server.port)
        await asyncio.sleep(0.05)
        answer = await server.ask("GET", "/health")
        assert (answer.status, error_of(answer)["type"]) == (503, "unavailable_error")
        await first.close()
        await asyncio.sleep(0.05)
        assert (await server.ask("GET", "/health")).status == 200


async def test_failures_have_openai_form() -> None:
    """An error of the server is a JSON error; one within a stream is an event before its end."""

    async def fail(fields: Frame) -> AsyncGenerator[Frame]:
        yield {"started": True}
        yield {"chunk": ["x", 5, None]}
        raise ModelError("unavailable", "the model's process ended")

    model = StubModel(fail)
    async with serve_stub(model) as server:
        answer = await server.ask("POST", PATH, BODY)
        assert (answer.status, error_of(answer)["type"]) == (503, "unavailable_error")
        answer = await server.ask("POST", PATH, {**BODY, "stream": True})
        *_, event, end, rest = answer.body.decode().split("\n\n")
        assert (answer.status, end, rest) == (200, "data: [DONE]", "")
        assert json.loads(event.removeprefix("data: "))["error"]["type"] == "unavailable_error"
        model.info = {}  # what should not happen
        answer = await server.ask("POST", PATH, BODY)
        assert (answer.status, error_of(answer)["type"]) == (500, "server_error")
        model.state = "draining"
        assert (await server.ask("GET", "/health")).status == 503
        assert error_of(await server.ask("POST", PATH, BODY))["type"] == "unavailable_error"


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, [[10**30]], "\ud800"], ids=repr)
async def test_unusable_value_leaves_no_request(value: Any) -> None:
    """What MessagePack cannot encode is refused, and its request is forgotten."""

    class Sink:
        def is_closing(self) -> bool:
            return False

    client = ModelClient(lambda: None, ModelSettings())
    client.state, client._writer = "ready", Sink()  # type: ignore[assignment]
    with pytest.raises(ModelError) as caught:
        await anext(client.generate({"prompt": value}))
    assert caught.value.kind == "invalid"
    assert not client.waiting and not client._answers
