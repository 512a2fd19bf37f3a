"""What the commands print: text to stdout, everything about it to stderr."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


@contextmanager
def waiting(what: str) -> Iterator[Callable[[], None]]:
    """A spinner on a terminal's stderr; yields the function that takes it away."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(what)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()
