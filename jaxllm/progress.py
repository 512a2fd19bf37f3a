"""Progress of long work, on stderr, where a person is looking."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bytes_bar(
    description: str, total: int, show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes; yields the function that takes each further number of bytes.

    show: True or False to decide, None to show it where stderr is a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    # On a terminal the bar goes when the work is done; in a log its last state stays.
    with Progress(*columns, console=console, transient=console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda n: progress.advance(task, n)
