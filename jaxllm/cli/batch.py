"""`jaxllm generate --batch`: the lines of a file, answered as they finish, and gone on with."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from jaxllm import distributed, process
from jaxllm.cli.console import note, read_stdin, write
from jaxllm.cli.options import check_writable
from jaxllm.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jaxllm.api import LM


def answer_file(
    opened: Callable[[], "LM"],
    file: str,
    out: Path | None,
    options: dict[str, Any],
    *,
    rows: int,
    resume: bool,
) -> None:
    """Answer the lines of a file, with a progress bar on a terminal; failures are counted.

    opened: loads the model, when everything else has been found in order. out: where the answers
    go, by default stdout. resume: leave out the lines whose answers are in `out` already.
    """
    from jaxllm.batchfile import answer
    from jaxllm.files import locked, read_text
    from jaxllm.progress import steps_bar

    lines = (read_stdin() if file == "-" else read_text(Path(file))).splitlines()
    distributed.agree({f"--batch {file}": distributed.digest(lines)})
    held = distributed.told(lambda: _held(out, resume).decode()).encode()
    out = out if process.leads() else None
    lines, there = _unanswered(lines, held)
    if there:
        note(f"{out}: {there} answers are there; {sum(map(bool, lines))} lines to go")
    lm = opened()
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        put: Callable[[str], None] = write
        count = 0
        if out is not None:
            stack.enter_context(locked(out))
            put = _appended(stack.enter_context(open(out, "r+b", buffering=0)), out, len(held))
            stack.enter_context(
                process.saying(lambda: f"{there + count} answers are in {out}; --resume goes on")
            )
        progress = stack.enter_context(steps_bar(f"answering {file}", sum(map(bool, lines))))

        def done() -> None:
            nonlocal count
            count += 1
            progress()

        answered, failed = answer(lm, lines, options, rows=rows, write=put, done=done)
    where = f" in {out}" if out else ""
    note(f"{answered} answers{where}, {failed} of them errors; {time.perf_counter() - start:.1f} s")
    if failed:
        raise typer.Exit(1)


def _held(out: Path | None, resume: bool) -> bytes:
    """The whole lines of answers that are there; what an interrupt has cut off does not count.

    Raises ConfigError or CheckpointError where the answers cannot go there.
    """
    from jaxllm.files import read_bytes

    if out is None:
        if resume:
            raise ConfigError("--resume goes on with the answers in --out FILE; name it")
        return b""
    check_writable("--out", out)
    content = read_bytes(out) if out.exists() else b""
    if content and not resume:
        raise CheckpointError(f"{out} exists: --resume goes on with it, or name another file")
    return content[: content.rfind(b"\n") + 1]


def _unanswered(lines: list[str], held: bytes) -> tuple[list[str], int]:
    """The lines, empty where they have been answered, and how many these are."""
    from jaxllm.batchfile import read_lines
    from jaxllm.files import parse_json

    answers = [parse_json(line, f"--out, line {n + 1}") for n, line in enumerate(held.splitlines())]
    if not all(isinstance(answer, dict) and "id" in answer for answer in answers):
        raise CheckpointError("--resume: the file holds other lines than answers; name another")
    there = {json.dumps(answer["id"]) for answer in answers}
    for number, request, _ in list(read_lines(lines)):
        if json.dumps(request["id"]) in there:
            lines[number] = ""
    return lines, len(there)


def _appended(file: BinaryIO, out: Path, start: int) -> Callable[[str], None]:
    """What puts each line at the end of the file, from `start`, at once and whole."""

    def put(line: str) -> None:
        with _named(out):
            left = line.encode()
            while left:
                left = left[file.write(left) :]

    with _named(out):
        file.truncate(start)
        file.seek(start)
    return put


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the system's with the name of the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
