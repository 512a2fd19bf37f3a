"""Process setup of a command: open standard streams, and Ctrl-C that leaves no partial files.

Python's KeyboardInterrupt in the main thread must wait for XLA's compiler and kernels, and gets
lost in callbacks and imports. So a thread ends the process: the signal wakes it through a pipe, it
removes unfinished files, writes one line and exits, without involving the main thread. Imports only
light parts of the standard library, because it runs before everything else.
"""

import atexit
import contextlib
import gc
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Never

_SIGNAL_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    _SIGNAL_WORDS[signal.SIGHUP] = "hung up"
# Objects between searches for garbage. Importing makes 300,000 objects, which stay: to search them
# took 0.06 s of a start.
START_GC_THRESHOLD, GC_THRESHOLD = 1_000_000, 100_000
HINT_DELAY_S = 0.7  # seconds after Ctrl-C until the hint that the work is still stopping

_UNFINISHED: dict[str, str] = {}  # partial file or directory -> its final path
_EXIT_MESSAGES: list[Callable[[], str]] = []
_INTERRUPTS: list["_DeferredInterrupt"] = []
_EXIT_LOCK = threading.Lock()  # held forever at exit: no new partial files
_MID_LINE = [False]  # whether stdout is in the middle of a line
_STREAMS = [1, 2]  # descriptors of stdout and stderr; in a supervised process C++ has 1 and 2
_IS_LEADER = [True]  # whether this process writes the output of its group
# In a supervised process: stdout, stderr, and a pipe that closes with the supervisor.
SUPERVISED_ENV = "JAXLLM_SUPERVISED"


def setup_process() -> None:
    """Set up streams and signals. Call it first in a program's main thread, never in a library.

    Closed standard streams are opened on the null device. From now on SIGINT, SIGTERM and SIGHUP,
    unless ignored, end the process with one line and status 128 + signal.
    """
    _open_streams()
    if given := os.environ.pop(SUPERVISED_ENV, ""):
        _attach_supervisor(*map(int, given.split(",")))
    gc.set_threshold(START_GC_THRESHOLD)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_handle_signals, args=(reading, _terminal_state()), daemon=True).start()
    for number in _SIGNAL_WORDS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # the wakeup pipe handles it; raise nothing
    atexit.register(_ignore_signals)


def end_start() -> None:
    """Search for garbage more often from now on, but not among the objects of the start.

    Does nothing in a process that `setup_process` did not set up.
    """
    if gc.get_threshold()[0] == START_GC_THRESHOLD:
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, 20, 50)


def is_leader() -> bool:
    """Return whether this process writes the output: process 0 of a group, or a single process."""
    return _IS_LEADER[0]


def mute_follower() -> None:
    """Discard stdout and write no files from now on, because another process does."""
    _IS_LEADER[0] = False
    sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def is_supervised() -> bool:
    """Return whether this process has a supervisor."""
    return _STREAMS != [1, 2]


def forward_signals(send: Callable[[int], None]) -> None:
    """Pass signals to `send` from now on, instead of ending this process."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNAL_WORDS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: send(number))


@contextlib.contextmanager
def cleanup_on_exit(
    partial: str | os.PathLike[str], target: str | os.PathLike[str] = ""
) -> Iterator[None]:
    """If a signal ends the process within the block, remove `partial` and report `target`."""
    with _EXIT_LOCK:
        _UNFINISHED[os.fspath(partial)] = os.fspath(target)
    try:
        yield
    finally:
        with _EXIT_LOCK:
            del _UNFINISHED[os.fspath(partial)]


@contextlib.contextmanager
def exit_message(message: Callable[[], str]) -> Iterator[None]:
    """If a signal ends the process within the block, also write `message()`: results, how to
    resume.
    """
    _EXIT_MESSAGES.append(message)
    try:
        yield
    finally:
        _EXIT_MESSAGES.remove(message)


@contextlib.contextmanager
def defer_interrupt(hint: str) -> Iterator[Callable[[], bool]]:
    """Within the block, let the first Ctrl-C only set a flag; the second ends the process.

    Yields a function that returns the flag. In a group the first Ctrl-C ends the process, because
    it could not stop at the same point as the others. hint: written if the block is still running a
    moment after the first Ctrl-C.
    """
    one = _DeferredInterrupt(hint)
    if is_supervised():  # a group cannot stop at one common point
        yield one.requested.is_set
        return
    _INTERRUPTS.append(one)
    try:
        yield one.requested.is_set
    finally:
        _INTERRUPTS.remove(one)


def track_line_end(text: str) -> None:
    """Record whether text written to stdout ended a line."""
    if text:
        _MID_LINE[0] = not text.endswith("\n")


def line_prefix() -> str:
    """Return the prefix of a stderr line: a newline if stdout shares the file and is mid-line."""
    try:
        inside = _MID_LINE[0] and os.path.sameopenfile(*_STREAMS)
    except OSError:
        inside = False
    _MID_LINE[0] = _MID_LINE[0] and not inside
    return "\n" if inside else ""


def _ignore_signals() -> None:
    """Ignore signals while the interpreter exits: they would only change the status."""
    for number in _SIGNAL_WORDS:
        signal.signal(number, signal.SIG_IGN)


def _open_streams() -> None:
    """Open closed standard streams on the null device."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # fills the descriptor of a closed stream, which the next file would take
    os.close(descriptor)
    for descriptor, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):  # unencodable characters must not raise
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _attach_supervisor(stdout: int, stderr: int, pipe: int) -> None:
    """Use the supervisor's streams for Python, and exit when the supervisor does."""
    _STREAMS[:] = stdout, stderr
    sys.stdout = os.fdopen(stdout, "w", encoding="utf-8", errors="backslashreplace")
    sys.stderr = os.fdopen(stderr, "w", 1, encoding="utf-8", errors="backslashreplace")

    def wait() -> None:
        os.read(pipe, 1)  # returns when the supervisor exits; nothing is ever written
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


class _DeferredInterrupt:
    def __init__(self, hint: str) -> None:
        self.hint = hint
        self.requested = threading.Event()


def _handle_signals(reading: int, terminal: Any) -> None:
    """Read signal numbers from the pipe forever, and act on them."""
    while True:
        waiting = [one for one in _INTERRUPTS if one.requested.is_set() and one.hint]
        if not select.select([reading], [], [], HINT_DELAY_S if waiting else None)[0]:
            for one in waiting:
                if one in _INTERRUPTS:
                    _write_line(one.hint)
                one.hint = ""
            continue
        for number in os.read(reading, 64):
            stops = _INTERRUPTS[-1] if number == signal.SIGINT and _INTERRUPTS else None
            if stops is not None and not stops.requested.is_set():
                stops.requested.set()
            elif number in _SIGNAL_WORDS:
                _exit_on_signal(number, terminal)


def _exit_on_signal(number: int, terminal: Any) -> Never:
    try:
        _EXIT_LOCK.acquire(timeout=0.2)
        if terminal is not None:
            restore, *arguments = terminal
            restore(*arguments)
        within = tuple(partial + os.sep for partial in _UNFINISHED)
        outer = [partial for partial in _UNFINISHED if not partial.startswith(within)]
        lost = [_UNFINISHED[partial] for partial in outer if _remove(partial)]
        said = [
            *(say() for say in _EXIT_MESSAGES),
            *(f"{name} was not written" for name in lost if name),
        ]
        _write_line(
            "; ".join([f"jaxllm: {_SIGNAL_WORDS[signal.Signals(number)]}", *filter(None, said)])
        )
        for partial in _UNFINISHED:  # the main thread may have added some meanwhile
            _remove(partial)
    finally:
        os._exit(128 + number)


def _write_line(line: str) -> None:
    """Write one line to stderr, without its lock and without blocking on its reader."""
    with contextlib.suppress(OSError):
        stderr = _STREAMS[1]
        # After the echo of ^C: show the cursor (spinners hide it), end bracketed paste.
        after_echo = "\x1b[?25h\x1b[?2004l\n" if os.isatty(stderr) else ""
        if select.select([], [stderr], [], 0.1)[1]:
            os.write(stderr, f"{after_echo or line_prefix()}{line}\n".encode(errors="replace"))


def _remove(partial: str) -> bool:
    """Remove a partial file or directory; return whether there was one. Ignores OS errors."""
    with contextlib.suppress(OSError):
        if not os.path.isdir(partial):
            os.unlink(partial)
            return True
        for folder, folders, files in os.walk(partial, topdown=False):
            for name in files:
                os.unlink(os.path.join(folder, name))
            for name in folders:
                os.rmdir(os.path.join(folder, name))
        os.rmdir(partial)
        return True
    return False


def _terminal_state() -> Any:
    """Return a function and arguments that restore the terminal, which line editing changes."""
    with contextlib.suppress(ImportError, OSError):
        import termios

        if os.isatty(0):
            return termios.tcsetattr, 0, termios.TCSANOW, termios.tcgetattr(0)
    return None
