"""Signals and streams: a signal ends a command at once, with one line and no partial files."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

BUSY = "import sys, time\nprint('ready', flush=True)\nwhile True: "
WORKS = {
    "sleeping": BUSY + "time.sleep(99)",
    "computing": BUSY + "pass",
    "swallowing": BUSY + "\n    try: time.sleep(99)\n    except BaseException: pass",
    "cleaning": BUSY + "\n    try: time.sleep(99)\n    finally: time.sleep(99)",
    "writing": """
from jaxllm.files import atomic_directory, atomic_file
with atomic_directory(Path("model")) as made, atomic_file(made / "weights") as file:
    file.write(b"half")
    {busy}
""",
    "one file": """
from jaxllm.files import atomic_file
with atomic_file(Path("x")) as file:
    {busy}
""",
    "telling": 'with signals.exit_message(lambda: "3 of 7 are done"):\n    {busy}\n',
}
MESSAGES = {
    "writing": "; model was not written",
    "one file": "; x was not written",
    "telling": "; 3 of 7 are done",
}


@pytest.fixture(autouse=True)
def _default_sigint() -> Iterator[None]:
    """Start programs as from a terminal: background processes would ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


Program = Callable[..., "subprocess.Popen[bytes]"]
SETUP = "from pathlib import Path\nfrom jaxllm.runtime import signals\nsignals.setup_process()\n"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Program]:
    """Start Python in a temporary folder, whose modules it can import; kill it after the test."""
    programs: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> "subprocess.Popen[bytes]":
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        program = subprocess.Popen(
            [sys.executable, *arguments], cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        programs.append(program)
        return program

    yield start
    for program in programs:
        program.kill()
        program.communicate()


@pytest.mark.parametrize("work", WORKS)
def test_sigint_prints_one_line_and_leaves_nothing(
    work: str, started: Program, tmp_path: Path
) -> None:
    """SIGINT ends any program with exit code 130, one line on stderr and no file."""
    busy = "\n    ".join(WORKS["sleeping"].splitlines())
    process = started("-c", SETUP + WORKS[work].replace("{busy}", busy))
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert err.decode() == f"jaxllm: interrupted{MESSAGES.get(work, '')}\n"
    assert list(tmp_path.iterdir()) == []


def test_sigterm_exits_cleanly_and_ignored_sigint_stays_ignored(started: Program) -> None:
    """SIGTERM exits with code 143 and one line; a process that ignored SIGINT before still does."""
    process = started("-c", SETUP + WORKS["sleeping"])
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert process.communicate()[1] == b"jaxllm: terminated\n"
    assert process.returncode == 143
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        " from jaxllm.runtime import signals;"
        " signals.setup_process(); signal.raise_signal(signal.SIGINT); print('on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, b"on\n")


def test_sigint_at_exit_keeps_successful_status() -> None:
    """A SIGINT during interpreter exit leaves the successful status of a finished program."""
    code = (
        "import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT);"
        " from jaxllm.runtime import signals; signals.setup_process(); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"done\n", b"")


def test_deferred_interrupt_sets_flag_and_second_exits(started: Program) -> None:
    """The first SIGINT sets a flag and prints a message; the second ends the process."""
    code = """
import time
with signals.defer_interrupt("a moment") as asked:
    print("ready", flush=True)
    while not asked():
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(99)
"""
    process = started("-c", SETUP + code)
    assert process.stdout is not None
    assert process.stderr is not None
    for expected in (b"ready\n", b"asked\n"):
        assert process.stdout.readline() == expected
        if expected == b"ready\n":
            process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == b"a moment\n"  # printed if the wait is long
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == b"jaxllm: interrupted\n"
    assert process.returncode == 130


def test_sigint_during_imports_exits_cleanly(started: Program, tmp_path: Path) -> None:
    """A signal handler that raised during an import could become an ImportError or be lost."""
    (tmp_path / "typer.py").write_text("print('ready', flush=True)\nimport time\ntime.sleep(99)\n")
    process = started("-m", "jaxllm", "info")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == b"jaxllm: interrupted\n"
    assert process.returncode == 130


STREAMS = {
    "--version > /dev/full": (1, "jaxllm: stdout: No space left on device\n"),
    "--help > /dev/full": (1, "jaxllm: stdout: No space left on device\n"),
    "--version > /dev/full 2>&1": (1, ""),
    "--version >&-": (0, ""),
    "--version >&- 2>&- <&-": (0, ""),
    "--nonsense 2>&-": (2, ""),
    "--nonsense 2> /dev/full": (2, ""),
    "--help | true": (0, ""),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_closed_or_full_streams_exit_cleanly() -> None:
    """Closed, full and broken outputs give the documented exit code, one line on stderr at most."""
    for arguments, expected in STREAMS.items():
        command = f"{sys.executable} -m jaxllm {arguments}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stderr) == expected, arguments


def test_log_starts_on_new_terminal_line() -> None:
    """Log lines start on a new line if stdout and stderr share a terminal, and add no newline to
    stdout otherwise.
    """
    code = (
        "from jaxllm.cli.console import log, write\n"
        "write('a text'); log('one'); log('two'); write('line\\n'); log('three')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
    )
    assert done.stdout == b"a text\none\ntwo\nline\nthree\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == (b"a textline\n", b"one\ntwo\nthree\n")


def test_chat_terminal_edits_lines_and_stops_on_interrupt(tmp_path: Path) -> None:
    """Typed lines can be edited and cleared, Ctrl-C stops an answer, and Ctrl-D during an answer
    exits and drops later input.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxllm", "chat", "-n", "400", "--system", "One day", "--seed", "5"],
        cwd=ROOT, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "TERM": "dumb", "JAXLLM_CHAT_HISTORY": str(tmp_path / "history")},
    )  # fmt: skip
    os.close(theirs)
    seen = b""

    def until(found: Callable[[bytes], Any]) -> None:
        nonlocal seen
        while not found(seen):
            try:
                seen += os.read(ours, 1000)
            except OSError:  # the program has ended: show its output
                raise AssertionError((seen, process.communicate()[1].decode())) from None

    def begins_to_answer(text: bytes) -> bool:
        return text.count(b"\n") >= 1 and len(text.split(b"\n", 1)[1]) > 5

    try:
        until(lambda text: b"> " in text)
        seen = b""
        os.write(ours, b"/nonsense\x03Toz\x7fm\r")
        until(begins_to_answer)
        process.send_signal(signal.SIGINT)
        until(lambda text: text.count(b"\n") >= 2 and text.endswith(b"> "))
        assert len(seen) < 1200, "stopped before 400 tokens"
        seen = b""
        os.write(ours, b"Then\r")
        until(begins_to_answer)
        os.write(ours, b"\x04ls\n")
        assert process.stderr is not None
        err = process.stderr.read()
        assert process.wait() == 0
        assert b"context 512, seed 5\n/help lists the commands" in err
        assert b"nonsense" not in err
        assert (tmp_path / "history").read_text().count("\n+") == 2, "Tom, Then"
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


def test_interrupted_perplexity_reports_progress_and_journals_batches(
    started: Program, tmp_path: Path
) -> None:
    """SIGINT prints batches done, perplexity and how to resume; the journal holds the batches."""
    journal = tmp_path / "journal"
    (tmp_path / "story.txt").write_text("Once upon a time there was a girl. " * 400)
    process = started(
        "-m", "jaxllm", "perplexity", "demo:llama", "--text", "@story.txt", "--window", "16",
        "--batch", "1", "--journal", "journal",
    )  # fmt: skip
    while process.poll() is None and (
        not journal.exists() or journal.read_bytes().count(b"\n") < 3
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    (message,) = err.decode().splitlines()
    assert "batches done, perplexity " in message
    assert message.endswith("the same command resumes from journal")
    complete_lines = [
        json.loads(line.partition(b" ")[2])  # after the checksum
        for line in journal.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]
    assert len(complete_lines) >= 3
