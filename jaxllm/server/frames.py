"""Frames: MessagePack maps, each after its length, between the HTTP process and the model's."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

_LENGTH_BYTES = 4
_decoder, _encoder = msgspec.msgpack.Decoder(), msgspec.msgpack.Encoder()


def encode_frame(frame: dict[str, Any]) -> bytes:
    """Return a frame with its length in front."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next frame. Raises IncompleteReadError where the other process has ended."""
    size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    frame: dict[str, Any] = _decoder.decode(await reader.readexactly(size))
    return frame


class FrameSocket:
    """The model process's end of the socket; any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._file = connection.makefile("rb")

    def send(self, frame: dict[str, Any]) -> None:
        """Send a frame. Raises OSError where the other process has ended."""
        data = encode_frame(frame)
        with self._lock:
            self._connection.sendall(data)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield frames until the other process closes its end."""
        while len(head := self._file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            size = int.from_bytes(head, "big")
            if len(body := self._file.read(size)) < size:
                return
            yield _decoder.decode(body)
