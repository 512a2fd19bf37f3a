"""Input and output of the commands: text on stdin and stdout, progress and errors on stderr."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxllm.errors import TokenError
from jaxllm.runtime import multihost, signals


def write(text: str) -> None:
    """Write text to stdout and flush. If the reader has closed the pipe, exit with status 0.

    Raises:
        OSError: stdout cannot be written; the error's file name is "stdout".
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        _discard_output(sys.stdout)
        sys.exit(0)
    except OSError as error:
        _discard_output(sys.stdout)
        raise OSError(error.errno, error.strerror, "stdout") from None
    signals.track_line_end(text)


def write_json(report: Any) -> None:
    """Write a JSON value as one line, with null for NaN and infinity."""
    from jaxllm.files import finite_json

    write(json.dumps(finite_json(report), ensure_ascii=False) + "\n")


def write_rows(rows: Iterable[tuple[str, object]]) -> None:
    """Write lines of a name and a value, with the values in a column."""
    lines = [*rows]
    width = max(len(name) for name, _ in lines)
    write("".join(f"{name:{width}}  {value}\n" for name, value in lines))


def log(text: str) -> None:
    """Write a line to stderr, in the first process of a group only. Starts a new line if stdout is
    the same file and in mid-line. A failure to write is ignored.
    """
    if signals.is_leader():
        write_stderr(text)


def write_stderr(text: str) -> None:
    """Write a line to stderr in every process of a group: an error of this process."""
    try:
        sys.stderr.write(f"{signals.line_prefix()}{text}\n")
        sys.stderr.flush()
    except OSError:
        _discard_output(sys.stderr)


def read_stdin() -> str:
    """Return all of stdin; in a group of processes, the first one's.

    Raises TokenError if it is not UTF-8.
    """
    return multihost.broadcast_from_zero(lambda: decode_stdin(sys.stdin.buffer.read()))


def decode_stdin(content: bytes) -> str:
    """Decode bytes from stdin. Raises TokenError if they are not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenError(f"stdin is not UTF-8 text (byte {error.start})") from None


@contextlib.contextmanager
def spinner(message: str | None) -> Iterator[Callable[[], None]]:
    """Show a spinner if stderr is a terminal; yields a function that stops it. None: no spinner."""
    if message is None or not (signals.is_leader() and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(message)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()


def _discard_output(stream: Any) -> None:
    """Redirect the stream to the null device; else the interpreter flushes it again at exit."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
