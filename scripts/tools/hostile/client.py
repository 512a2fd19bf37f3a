"""A raw HTTP client: it sends any bytes, and can leave in any way.

One decision: answers are parsed strictly and by hand, since a client library would correct, or
refuse to send, what is to be tried.
"""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any, NamedTuple

MAX_HEAD_BYTES = 1 << 20
LINES_END = b"\r\n\r\n"


class Answer(NamedTuple):
    """An HTTP answer. is_complete: whether its body has the length that its headers promise."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool = True


class MalformedAnswerError(Exception):
    """The server sent bytes that are not an HTTP answer."""


class Connection:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, host: str, port: int, *, receive_bytes: int | None = None) -> "Connection":
        """Connect. receive_bytes: the size of the socket's receive buffer."""
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(made, (host, port))
        except BaseException:
            made.close()
            raise
        limit = MAX_HEAD_BYTES if receive_bytes is None else receive_bytes
        return cls(*await asyncio.open_connection(sock=made, limit=limit))

    async def send(self, data: bytes) -> bool:
        """Send bytes; return whether the server still takes them."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            return False
        return True

    async def read_answer(self, *, has_body: bool = True) -> Answer | None:
        """Return the next answer, or None if the server closed the connection before it.

        has_body: False for an answer to HEAD. Raises MalformedAnswerError.
        """
        while True:
            try:
                head = await self.reader.readuntil(LINES_END)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if getattr(error, "partial", b""):
                    raise MalformedAnswerError(f"half a head: {error!r:.80}") from None
                return None
            status, headers = parse_head(head)
            if status != 100:
                break
        if not has_body or status in (204, 304):
            return Answer(status, headers, b"")
        try:
            body, is_complete = await self._read_body(headers)
        except ConnectionError:
            body, is_complete = b"", False
        return Answer(status, headers, body, is_complete)

    async def _read_body(self, headers: dict[str, str]) -> tuple[bytes, bool]:
        if headers.get("transfer-encoding") == "chunked":
            return await self._read_chunks()
        if "content-length" in headers:
            try:
                return await self.reader.readexactly(int(headers["content-length"])), True
            except asyncio.IncompleteReadError as error:
                return error.partial, False
        return await self.reader.read(-1), True

    async def _read_chunks(self) -> tuple[bytes, bool]:
        body = b""
        try:
            while True:
                line = await self.reader.readuntil(b"\r\n")
                size = int(line, 16)
                chunk = await self.reader.readexactly(size + 2)
                if chunk[-2:] != b"\r\n":
                    raise MalformedAnswerError(f"a chunk ends with {chunk[-2:]!r}")
                if not size:
                    return body, True
                body += chunk[:-2]
        except asyncio.IncompleteReadError:
            return body, False
        except ValueError as error:
            raise MalformedAnswerError(f"a chunk's size: {error}") from None

    def half_close(self) -> None:
        """Send the end of what the client sends, and stay to read."""
        with suppress(OSError):
            self.writer.write_eof()

    def reset(self) -> None:
        """Leave with a TCP reset, as a killed client or a lost network does."""
        made: Any = self.writer.get_extra_info("socket")
        with suppress(OSError):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        """Leave with a FIN."""
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and the headers, whose names are in lower case.

    Raises MalformedAnswerError for what is not an HTTP/1.1 head, or has a header twice.
    """
    first, *lines = head.removesuffix(LINES_END).decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status, _, _ = rest.partition(" ")
    if version != "HTTP/1.1" or not (status.isdigit() and len(status) == 3):
        raise MalformedAnswerError(f"a status line: {first!r:.80}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name in headers:
            raise MalformedAnswerError(f"a header: {line!r:.80}")
        headers[name] = value.strip()
    return int(status), headers


def encode_request(
    method: str, path: str, body: bytes | None = None, **headers: str
) -> bytes:  # fmt: skip
    """Return a request's bytes. headers: their names with _ for -."""
    fields = {"host": "localhost", **headers}
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + LINES_END + (body or b"")
