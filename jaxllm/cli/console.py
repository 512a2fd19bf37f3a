"""What the commands print and read: text on stdout and stdin, everything about it on stderr."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from jaxllm import distributed, process
from jaxllm.errors import TokenError


def write(text: str) -> None:
    """Text to stdout, at once. A reader that has gone ends the command quietly.

    Raises:
      OSError: it cannot be written, "stdout" by name.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        _give_up(sys.stdout)
        sys.exit(0)
    except OSError as error:
        _give_up(sys.stdout)
        raise OSError(error.errno, error.strerror, "stdout") from None
    process.printed(text)


def note(text: str) -> None:
    """A line on stderr, on a line of its own where stdout is the same; nobody need hear it. Of a
    group the first process says it.
    """
    if process.leads():
        complain(text)


def complain(text: str) -> None:
    """A line on stderr about what went wrong in this process."""
    try:
        sys.stderr.write(f"{process.fresh_line()}{text}\n")
        sys.stderr.flush()
    except OSError:
        _give_up(sys.stderr)


def read_stdin() -> str:
    """All of stdin, of a group the first process's.

    Raises TokenError for bytes that are no UTF-8.
    """
    return distributed.told(lambda: decoded(sys.stdin.buffer.read()))


def decoded(content: bytes) -> str:
    """What stdin brought, as text. Raises TokenError for bytes that are no UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenError(f"stdin is not UTF-8 text (byte {error.start})") from None


@contextlib.contextmanager
def waiting(what: str | None) -> Iterator[Callable[[], None]]:
    """A spinner on a terminal's stderr, or None of it; yields the function that takes it away."""
    if what is None or not (process.leads() and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(what)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()


def _give_up(stream: object) -> None:
    """What the stream still holds goes nowhere: the interpreter would try again at its end."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())  # type: ignore[attr-defined]
        os.close(null)
