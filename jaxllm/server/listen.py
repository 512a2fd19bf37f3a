"""Sockets, signals and the end: runs the application under uvicorn until a signal comes.

uvicorn has no limit on the time that a client takes to send its headers or to read its answer; the
protocol here adds both, for each connection.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.errors import ConfigError
from jaxllm.runtime.signals import end_start
from jaxllm.server.errors import ApiError
from jaxllm.server.limits import (
    HEADER_BYTES,
    Receive,
    Scope,
    Send,
    error_parts,
    headers_too_large,
    send_error,
)
from jaxllm.server.model_client import ModelError

HEADER_SECONDS = 10.0
WRITE_SECONDS = 30.0
MAX_CONNECTIONS = 1024


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with limits on the time for headers, and for a client to read what is sent."""

    header_seconds, write_seconds = HEADER_SECONDS, WRITE_SECONDS
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self.app = _refuse_connection
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _stop(self._header_timer)
            self._header_timer = None
        else:
            self._watch_headers()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or has too large headers, in OpenAI's form."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # within another answer
            self.transport.close()
            return
        if self.conn.trailing_data[0][HEADER_BYTES:]:
            error = headers_too_large()
        else:
            error = ApiError(400, "the request is not valid HTTP/1.1")
        headers, body = error_parts(error)
        headers = [*headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        _stop(self._write_timer)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._header_timer)
        _stop(self._write_timer)
        super().connection_lost(exc)

    def _watch_headers(self) -> None:
        if self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.header_seconds, self._end_headers)

    def _end_headers(self) -> None:
        self._header_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    await send_error(scope, send, ApiError(503, "too many connections", type="unavailable_error"))


def _stop(timer: asyncio.TimerHandle | None) -> None:
    """Cancel a timer, if there is one."""
    if timer is not None:
        timer.cancel()


class Runnable(Protocol):
    """What is loaded before requests come, and ended after them: a model, or several."""

    @property
    def info(self) -> Mapping[str, Any]:
        """`model` describes it."""

    async def start(self) -> None:
        """Load it. Raises ModelError."""

    async def drain(self, seconds: float) -> None:
        """Let running requests end, for up to `seconds`."""

    async def close(self) -> None:
        """End it."""


class Address(NamedTuple):
    """Where to listen: a port of a host, or a Unix socket if `path` is given."""

    host: str
    port: int
    path: Path | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[socket.socket]:
        """Listen within the block. Raises ConfigError if the address is taken or wrong."""
        try:
            made = self._open_unix() if self.path else self._open_port()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot listen on {self.text()}: {reason}") from None
        with made:
            try:
                yield made
            finally:
                if self.path is not None:
                    self.path.unlink(missing_ok=True)

    def text(self, listening: socket.socket | None = None) -> str:
        """Return the address as clients write it."""
        if self.path is not None:
            return f"unix:{self.path}"
        port = self.port if listening is None else listening.getsockname()[1]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}"

    def _open_port(self) -> socket.socket:
        info = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        # With TCP named, asyncio sends small pieces at once; otherwise each answer waits 40 ms.
        made = socket.socket(*info[:3])
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(info[4])
        except BaseException:
            made.close()
            raise
        return made

    def _open_unix(self) -> socket.socket:
        """Return a socket that only this user can open; a dead server's file is replaced."""
        path = str(self.path)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
                if probe.connect_ex(path) == 0:
                    raise OSError(0, "another server listens there")
            if self.path is not None and self.path.is_socket():
                self.path.unlink()
            before = os.umask(0o077)
            try:
                made.bind(path)
            finally:
                os.umask(before)
        except BaseException:
            made.close()
            raise
        return made


def run(
    app: Any, client: Runnable, address: Address, *, grace: float, log: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish for up to `grace` seconds.

    The port answers at once, `/health` with 503 until the model is loaded. A second signal ends it
    at once. Raises ConfigError if the address or the model cannot be opened.
    """
    with address.open() as listening:
        asyncio.run(_serve(app, client, listening, address.text(listening), grace, log))


def make_server(app: Any, protocol: type[BoundedProtocol] = BoundedProtocol) -> uvicorn.Server:
    """Return uvicorn's server of an application, not started."""
    return _Server(
        uvicorn.Config(
            app, http=protocol, ws="none", loop="asyncio", lifespan="off",
            log_config=None, log_level="critical", access_log=False, server_header=False,
            proxy_headers=False, h11_max_incomplete_event_size=HEADER_BYTES,
            timeout_graceful_shutdown=5,
        )
    )  # fmt: skip


async def _serve(
    app: Any,
    client: Runnable,
    listening: socket.socket,
    where: str,
    grace: float,
    log: Callable[[str], None],
) -> None:
    server = make_server(app)
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    serving = asyncio.create_task(server.serve([listening]))
    starting = asyncio.create_task(client.start())
    stopping = asyncio.create_task(signals.get())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            log(f"{client.info['model']}\nlistening on {where}")
            end_start()  # requests leave garbage that only a search finds
            await stopping
            log(f"ending: running requests have {grace:g} s; a second signal ends now")
            draining = asyncio.create_task(client.drain(grace))
            again = asyncio.create_task(signals.get())
            await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            again.cancel()
    except ModelError as error:
        raise ConfigError(str(error)) from None
    finally:
        starting.cancel()
        await client.close()
        server.should_exit = True
        await asyncio.wait((serving,), timeout=6)
        serving.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
