"""Input of `jaxllm chat`: lines edited with prompt_toolkit on a terminal, or read from a pipe.

prompt_toolkit is imported only for a terminal. Its prompt runs in a thread, because in the main
thread it would take over the signals that `jaxllm.runtime.signals` waits for.
"""

import contextlib
import importlib.util
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cli.console import decode_stdin, log
from jaxllm.errors import requires_extra

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

HISTORY_VARIABLE = "JAXLLM_CHAT_HISTORY"
MAX_HISTORY_BYTES = 1 << 20  # of the history file; a larger one loses its older part
EXIT_OK, EXIT_INTERRUPTED = 0, 130  # exit statuses: Ctrl-D, and Ctrl-C twice
INTERRUPT_HINT = "press Ctrl-C again or Ctrl-D to leave"

Reader = Callable[[], "str | int"]  # returns the next line, or the exit status


def is_interactive() -> bool:
    """Return whether stdin and stdout are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def make_line_reader(**streams: Any) -> Reader:
    """Return a function that reads the next line from the terminal or a pipe.

    Args:
        streams: input and output for prompt_toolkit, for tests; by default the terminal.
    """
    return _make_prompt_reader(**streams) if streams or is_interactive() else _read_pipe


@contextlib.contextmanager
def buffer_keys() -> Iterator[None]:
    """Buffer keys for the next prompt without echo, so that a Ctrl-D typed during an answer leaves.

    In its normal mode the terminal would discard that Ctrl-D.
    """
    if not is_interactive() or importlib.util.find_spec("termios") is None:
        yield
        return
    import termios

    before = termios.tcgetattr(0)
    quiet = [*before]
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(0, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)


def history_file() -> Path | None:
    """Return this user's history file, created if necessary and private; None if it is disabled.

    JAXLLM_CHAT_HISTORY names the file, 0 disables it; the default is `jaxllm/chat_history` in
    XDG_STATE_HOME. If the file cannot be used, a line on stderr names it.
    """
    named = os.environ.get(HISTORY_VARIABLE, "")
    if named == "0":
        return None
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = Path(named) if named else state / "jaxllm" / "chat_history"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
        with open(os.open(file, flags, 0o600), "r+b") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise OSError(0, "not a regular file of this user")
            os.fchmod(opened.fileno(), 0o600)
            if status.st_size > MAX_HISTORY_BYTES:
                opened.seek(-MAX_HISTORY_BYTES // 2, os.SEEK_END)
                recent = opened.read().partition(b"\n#")[2]
                opened.seek(0)
                opened.write(b"\n#" + recent)
                opened.truncate()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        log(f"cannot save lines in {file}: {getattr(error, 'strerror', None) or error}")
        return None
    return file


def _read_pipe() -> str | int:
    return decode_stdin(sys.stdin.buffer.readline()) or EXIT_OK


def _make_prompt_reader(**streams: Any) -> Reader:
    """Return a reader with line editing and history; a paste of several lines is one line."""
    with requires_extra("cli", "jaxllm chat"):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.utils import is_dumb_terminal

    session: PromptSession[str] = PromptSession(
        "> ",
        history=_open_history(),
        key_bindings=_make_key_bindings(),
        enable_suspend=True,
        **streams,
    )

    def read() -> str | int:
        warned = False
        while True:
            try:
                text = session.prompt(in_thread=True)
                text.encode()
            except EOFError:
                return EXIT_OK
            except KeyboardInterrupt:
                if warned:
                    return EXIT_INTERRUPTED
                warned = True
                log(INTERRUPT_HINT)
            except UnicodeEncodeError:
                log("that line is not UTF-8 text")
            else:
                if not is_dumb_terminal():  # for a paste during an answer, too
                    session.output.enable_bracketed_paste()
                    session.output.flush()
                return text.rstrip("\n") + "\n"

    return read


def _make_key_bindings() -> "KeyBindings":
    """Bind Ctrl-C (clear the line, or interrupt if it is empty) and Alt-Enter (newline)."""
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("c-c", filter=~is_searching)
    def clear(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    @keys.add("escape", "enter")
    def begin_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _open_history() -> "History":
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class TolerantHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk
                super().store_string(string)

    file = history_file()
    return InMemoryHistory() if file is None else TolerantHistory(str(file))
