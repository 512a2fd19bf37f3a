"""The process of a command: streams that are there, and an end by Ctrl-C that leaves nothing.

Python's own way, an exception in the main thread, has to wait for XLA's compiler and for kernels,
and is lost in callbacks and imports. So a thread ends the process: the signal wakes it through a
pipe, it removes what is unfinished, says one line and exits. The main thread is never disturbed.
Only the standard library's lighter half is imported: this comes before everything else.
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

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    _WORDS[signal.SIGHUP] = "hung up"
SELDOM = 100_000  # objects: at 700 Python looks through all modules again and again as they load
PATIENCE = 0.7  # seconds until it is said that what is to stop has not stopped yet

_UNFINISHED: dict[str, str] = {}  # a partial file or directory, and what it was to become
_SAYING: list[Callable[[], str]] = []
_DEFERRED: list["_Deferred"] = []
_ENDING = threading.Lock()  # taken for good at the end: nothing new is begun any more
_LINE = [False]  # whether stdout stands in the middle of a line
_STREAMS = [1, 2]  # stdout's and stderr's descriptors; in a guard's child 1 and 2 are C++'s alone
_LEADS = [True]  # whether this process says what all of a group would say
GUARDED = "JAXLLM_GUARDED"  # in a guard's child: descriptors of stdout, stderr and the guard's life


def begin() -> None:
    """Take the process in hand: first thing in a program, in its main thread, never in a library.

    Standard streams that are closed become the null device; from now on SIGINT, SIGTERM and SIGHUP,
    where they are not ignored, end the process with one line and status 128 and the signal.
    """
    _open_streams()
    if given := os.environ.pop(GUARDED, ""):
        _under_guard(*map(int, given.split(",")))
    gc.set_threshold(SELDOM)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reading, _terminal()), daemon=True).start()
    for number in _WORDS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # the pipe has it; nothing is raised
    atexit.register(_complete)


def leads() -> bool:
    """Whether this process says what is to be said: of a group, the first."""
    return _LEADS[0]


def follow() -> None:
    """From now on stdout goes nowhere, and no file is written: another process does it."""
    _LEADS[0] = False
    sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def guarded() -> bool:
    """Whether this process is a guard's child."""
    return _STREAMS != [1, 2]


def hand_on(send: Callable[[int], None]) -> None:
    """From now on signals end nothing here; `send` is given them."""
    signal.set_wakeup_fd(-1)
    for number in _WORDS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: send(number))


@contextlib.contextmanager
def removing(
    partial: str | os.PathLike[str], target: str | os.PathLike[str] = ""
) -> Iterator[None]:
    """Within, an end of the process removes `partial`, and says that `target` was not written."""
    with _ENDING:
        _UNFINISHED[os.fspath(partial)] = os.fspath(target)
    try:
        yield
    finally:
        with _ENDING:
            del _UNFINISHED[os.fspath(partial)]


@contextlib.contextmanager
def saying(say: Callable[[], str]) -> Iterator[None]:
    """Within, an end of the process says this too: what there is, how to go on."""
    _SAYING.append(say)
    try:
        yield
    finally:
        _SAYING.remove(say)


@contextlib.contextmanager
def deferred(hint: str) -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C only makes what is yielded true; the second one ends the process.
    In a process of a group, which would stop alone, the first one does.

    hint: said where the block has not ended a moment after the first.
    """
    one = _Deferred(hint)
    if guarded():  # a group cannot stop at one place: it ends
        yield one.asked.is_set
        return
    _DEFERRED.append(one)
    try:
        yield one.asked.is_set
    finally:
        _DEFERRED.remove(one)


def printed(text: str) -> None:
    """Remember whether what stdout got ends with a line."""
    if text:
        _LINE[0] = not text.endswith("\n")


def fresh_line() -> str:
    """What goes before a line on stderr: a newline where stdout is the same and in mid-line."""
    try:
        inside = _LINE[0] and os.path.sameopenfile(*_STREAMS)
    except OSError:
        inside = False
    _LINE[0] = _LINE[0] and not inside
    return "\n" if inside else ""


def _complete() -> None:
    """The work is done, and the interpreter goes: a signal would only change the status."""
    for number in _WORDS:
        signal.signal(number, signal.SIG_IGN)


def _open_streams() -> None:
    """Where a standard stream is closed, the null device."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # it has taken the place of a closed one, which the next file would have taken
    os.close(descriptor)
    for descriptor, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):  # what a terminal cannot show ends nothing
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _under_guard(stdout: int, stderr: int, life: int) -> None:
    """Python's streams become the guard's; when the guard is gone this process ends."""
    _STREAMS[:] = stdout, stderr
    sys.stdout = os.fdopen(stdout, "w", encoding="utf-8", errors="backslashreplace")
    sys.stderr = os.fdopen(stderr, "w", 1, encoding="utf-8", errors="backslashreplace")

    def wait() -> None:
        os.read(life, 1)  # nothing is ever written
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


class _Deferred:
    def __init__(self, hint: str) -> None:
        self.hint = hint
        self.asked = threading.Event()


def _wait(reading: int, terminal: Any) -> None:
    """Read the numbers of signals, for ever."""
    while True:
        waiting = [one for one in _DEFERRED if one.asked.is_set() and one.hint]
        if not select.select([reading], [], [], PATIENCE if waiting else None)[0]:
            for one in waiting:
                if one in _DEFERRED:
                    _say(one.hint)
                one.hint = ""
            continue
        for number in os.read(reading, 64):
            stops = _DEFERRED[-1] if number == signal.SIGINT and _DEFERRED else None
            if stops is not None and not stops.asked.is_set():
                stops.asked.set()
            elif number in _WORDS:
                _end(number, terminal)


def _end(number: int, terminal: Any) -> Never:
    try:
        _ENDING.acquire(timeout=0.2)
        if terminal is not None:
            restore, *arguments = terminal
            restore(*arguments)
        within = tuple(partial + os.sep for partial in _UNFINISHED)
        outer = [partial for partial in _UNFINISHED if not partial.startswith(within)]
        lost = [_UNFINISHED[partial] for partial in outer if _remove(partial)]
        said = [*(say() for say in _SAYING), *(f"{name} was not written" for name in lost if name)]
        _say("; ".join([f"jaxllm: {_WORDS[signal.Signals(number)]}", *filter(None, said)]))
        for partial in _UNFINISHED:  # what the main thread may have added meanwhile
            _remove(partial)
    finally:
        os._exit(128 + number)


def _say(line: str) -> None:
    """One line on stderr, without its lock and without waiting for who reads it."""
    with contextlib.suppress(OSError):
        stderr = _STREAMS[1]
        # The echo of ^C; a spinner hid the cursor, a prompt asked for pastes in brackets.
        after_echo = "\x1b[?25h\x1b[?2004l\n" if os.isatty(stderr) else ""
        if select.select([], [stderr], [], 0.1)[1]:
            os.write(stderr, f"{after_echo or fresh_line()}{line}\n".encode(errors="replace"))


def _remove(partial: str) -> bool:
    """Whether there was something to remove; what is gone or cannot be removed is left."""
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


def _terminal() -> Any:
    """How to give the terminal back as it was: line editing changes it."""
    with contextlib.suppress(ImportError, OSError):
        import termios

        if os.isatty(0):
            return termios.tcsetattr, 0, termios.TCSANOW, termios.tcgetattr(0)
    return None
