"""Progress bars on stderr, for terminals."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxllm.runtime import signals


@contextmanager
def bytes_bar(
    description: str, total: int, show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a bar over `total` bytes; yield a function that advances it by a number of bytes.

    show: None shows the bar if stderr is a terminal.
    """
    if not _is_shown(show):
        yield lambda _: None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(description, total, DownloadColumn(), TransferSpeedColumn()) as advance:
        yield advance


@contextmanager
def steps_bar(
    description: str, total: int, show: bool | None = None
) -> Iterator[Callable[[], None]]:
    """Show a bar over `total` steps; yield a function that advances it by one."""
    if not _is_shown(show):
        yield lambda: None
        return
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    with _bar(description, total, MofNCompleteColumn(), TimeRemainingColumn()) as advance:
        yield lambda: advance(1)


@contextmanager
def status_bar(
    description: str, total: int, show: bool | None = None, done: int = 0
) -> Iterator[Callable[[int, str], None]]:
    """Show a bar over `total` steps, starting at `done`; yield a function that sets the number of
    finished steps and the text next to the bar.
    """
    if not _is_shown(show):
        yield lambda *_: None
        return
    from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}")
    with _progress(description, total, *columns, completed=done, note="") as (progress, task):
        yield lambda done, note: progress.update(task, completed=done, note=note)


def _is_shown(show: bool | None) -> bool:
    return signals.is_leader() and (sys.stderr.isatty() if show is None else show)


@contextmanager
def _bar(description: str, total: int, *columns: Any) -> Iterator[Callable[[int], None]]:
    with _progress(description, total, *columns) as (progress, task):
        yield lambda n: progress.advance(task, n)


@contextmanager
def _progress(
    description: str, total: int, *columns: Any, **fields: Any
) -> Iterator[tuple[Any, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    # On a terminal the finished bar disappears; in a log its last state stays.
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=console,
        transient=console.is_terminal,
    ) as progress:
        yield progress, progress.add_task(description, total=total, **fields)
