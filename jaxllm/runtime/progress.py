"""Progress bars: on a terminal, and below a cell of a notebook."""

import io
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from jaxllm.runtime import signals

NOTEBOOK_DELAY = 2.0  # seconds until a bar appears in a notebook, where its place stays empty


@contextmanager
def bytes_bar(
    description: str, total: int, show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a bar over `total` bytes; yield a function that advances it by a number of bytes.

    show: None shows the bar if stderr is a terminal or a person watches a notebook.
    """
    columns = "DownloadColumn", "TransferSpeedColumn"
    with _bar(description, total, show, columns) as update:
        yield lambda count: update(advance=count)


@contextmanager
def steps_bar(
    description: str, total: int, show: bool | None = None
) -> Iterator[Callable[[], None]]:
    """Show a bar over `total` steps; yield a function that advances it by one."""
    with _bar(description, total, show, _STEPS) as update:
        yield lambda: update(advance=1)


@contextmanager
def status_bar(
    description: str, total: int, show: bool | None = None, done: int = 0
) -> Iterator[Callable[[int, str], None]]:
    """Show a bar over `total` steps, starting at `done`; yield a function that sets the number of
    finished steps and the text next to the bar.
    """
    with _bar(description, total, show, _STEPS, completed=done, note="") as update:
        yield lambda done, note: update(completed=done, note=note)


_STEPS = "MofNCompleteColumn", "TimeRemainingColumn"  # of rich, which is imported for a bar only


def _is_shown(show: bool | None) -> bool:
    default = sys.stderr.isatty() or _is_notebook()
    return signals.is_leader() and (default if show is None else show)


def _is_notebook() -> bool:
    """Return whether a person watches the cell that runs.

    A program that executes notebooks (nbclient) allows no input; %%capture has its own publisher.
    """
    if (zmqshell := sys.modules.get("ipykernel.zmqshell")) is None:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return (
        isinstance(shell, zmqshell.ZMQInteractiveShell)
        and isinstance(shell.display_pub, zmqshell.ZMQDisplayPublisher)
        and bool(shell.get_parent().get("content", {}).get("allow_stdin"))
    )


class _Cell(io.StringIO):
    """A display below the cell that runs; each frame that is written replaces the last one."""

    def __init__(self) -> None:
        super().__init__()
        self._due = time.monotonic() + NOTEBOOK_DELAY
        self._display: Any = None

    def write(self, frame: str) -> int:
        from IPython.display import display

        _, _, text = frame.rpartition("\x1b[2K")  # what erases the frame before, or the last one
        text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]", "", text)
        if self._display is not None:
            self._display.update({"text/plain": text}, raw=True)
        elif text and time.monotonic() > self._due:
            self._display = display({"text/plain": text}, raw=True, display_id=True)
        return len(frame)


@contextmanager
def _bar(
    description: str, total: int, show: bool | None, columns: tuple[str, ...], **fields: Any
) -> Iterator[Callable[..., None]]:
    """Show a bar with columns of rich, and a text if there is a field `note`; yield its update."""
    if not _is_shown(show):
        yield lambda **_: None
        return
    from rich import progress as bars
    from rich.console import Console

    cell = _is_notebook()
    console = (
        Console(
            file=_Cell(), force_terminal=True, force_jupyter=False, color_system=None, width=100
        )
        if cell
        else Console(stderr=True)
    )
    made = [getattr(bars, name)() for name in columns]
    # On a terminal and in a notebook the finished bar disappears; in a log its last state stays.
    with bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        *made,
        *[bars.TextColumn("{task.fields[note]}")] * ("note" in fields),
        console=console,
        transient=console.is_terminal,
        redirect_stdout=not cell,
        redirect_stderr=not cell,
    ) as progress:
        yield partial(progress.update, progress.add_task(description, total=total, **fields))
