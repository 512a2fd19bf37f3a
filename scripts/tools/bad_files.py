"""Every file that a command takes, wrong in every way: each is answered with one line.

    python scripts/tools/bad_files.py

What a command reads is missing, a directory, empty, of another kind; what it writes goes to a
folder that is not there, to a directory, to a full disk (a small tmpfs where this user may mount
one). Whatever is not one line and status 1 or 2 is marked, and the script's status is 1.
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from jaxllm import cli
from jaxllm.cli.console import log, write

EXAMPLE = "Example: python scripts/tools/bad_files.py --reads-only"
JUNK = bytes(range(256)) * 8
# Commands by what they read, and by what they write: BAD is the file.
READS = (
    "generate BAD",
    "generate --draft BAD -p Once -n 2",
    "generate --precision BAD",
    "batch demo:llama BAD",
    "generate --prompt-cache BAD -p Once -n 2",
    "chat BAD",
    "chat --precision BAD",
    "info BAD",
    "convert BAD DST",
    "convert BAD DST --to-hf",
    "convert demo:llama DST --precision BAD",
    "quantize BAD DST",
    "quantize demo:llama DST --rules BAD",
    "bench BAD",
    "perplexity BAD --text @STORY",
    "perplexity demo:llama --text @BAD",
    "perplexity demo:llama --documents BAD",
    "perplexity demo:llama --text @STORY --journal BAD",
    "sensitivity BAD --text @STORY",
    "sensitivity demo:llama --text @BAD",
    "verify BAD",
    "verify demo:llama --against BAD",
    "vectors make BAD DST",
    "vectors check demo:llama BAD",
    "export BAD DST",
    "embed BAD --text x",
    "embed demo:llama --file BAD",
)
WRITES = (
    "batch demo:llama LINES -n 2 --workers 0 --out BAD",
    "generate -p Once -n 2 --prompt-cache BAD",
    "convert demo:llama BAD",
    "convert demo:llama BAD --to-hf",
    "quantize demo:llama BAD --bits 4",
    "perplexity demo:llama --text @STORY --journal BAD",
    "sensitivity demo:llama --text @STORY --plot BAD",
    "verify demo:llama --against demo:llama --tokens 1 --plot BAD",
    "vectors make demo:llama BAD",
    "export demo:llama BAD --num-tokens 4 --max-tokens 8",
    "embed demo:llama --text x --out BAD.npy",
    "embed demo:llama --text x --out BAD.safetensors",
)
# What may be missing or empty: it is made, or begun.
FINE = {
    ("missing", "generate --prompt-cache BAD -p Once -n 2"),
    ("missing", "perplexity demo:llama --text @STORY --journal BAD"),
    ("empty", "perplexity demo:llama --text @STORY --journal BAD"),
}


@dataclass(frozen=True)
class Answer:
    """What a command said to a file. kind: how the file was wrong."""

    kind: str
    command: str
    status: int
    lines: list[str]

    @property
    def well(self) -> bool:
        return self.status in (1, 2) and len(self.lines) == 1

    def row(self) -> str:
        mark = "" if self.well else f"WRONG (status {self.status}) "
        return f"{self.kind:9} {self.command}\n          {mark}{' / '.join(self.lines)}"


def read_badly(folder: Path) -> Iterator[Answer]:
    """Every command that reads, with every kind of file that it cannot read."""
    (folder / "empty").write_bytes(b"")
    (folder / "junk").write_bytes(JUNK)
    (folder / "directory").mkdir()
    for kind in ("missing", "empty", "junk", "directory"):
        for command in READS:
            if (kind, command) not in FINE:
                yield answered(kind, command, folder / kind, folder)


def write_badly(folder: Path) -> Iterator[Answer]:
    """Every command that writes, to a folder that is none and over another's directory."""
    (folder / "file").write_text("mine", encoding="utf-8")
    taken = folder / "taken.npy"
    for name in (folder / "taken", taken, folder / "taken.safetensors"):
        name.mkdir()
        (name / "config.json").write_text("mine", encoding="utf-8")
    for command in WRITES:
        yield answered("no folder", command, folder / "file" / "below", folder)
        if not command.startswith(("vectors", "export")):  # they take one that has neither
            yield answered("directory", command, folder / "taken", folder)


def write_to_full_disk(folder: Path) -> Iterator[Answer]:
    """Every command that writes, where there is no room; nothing where nothing can be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        log("full disk: left out, this user cannot mount a tmpfs")
        return
    try:
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while filler.write(b"x" * 4096):
                pass
        for number, command in enumerate(WRITES):
            before = sorted(path.name for path in disk.iterdir())
            answer = answered("full disk", command, disk / f"x{number}", folder)
            left = {path.name for path in disk.iterdir()} - {*before}
            # Lines of answers and journals that are whole are kept.
            kept = {path for path in left if (disk / path).is_file() and ".partial" not in path}
            if left - kept:
                answer = Answer(
                    answer.kind, command, answer.status, [*answer.lines, f"left {left}"]
                )
            yield answer
            for name in kept:
                (disk / name).unlink()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def answered(kind: str, command: str, bad: Path, folder: Path) -> Answer:
    """What a command says, run in this process."""
    (folder / "story.txt").write_text("Once upon a time. " * 9, encoding="utf-8")
    (folder / "lines.jsonl").write_text('"One day"\n' * 40, encoding="utf-8")
    names = {
        "DST": str(folder / "dst"),
        "@STORY": f"@{folder / 'story.txt'}",
        "LINES": str(folder / "lines.jsonl"),
    }
    words = [names.get(w, w.replace("BAD", str(bad))) for w in command.split()]
    out, err = io.StringIO(), io.StringIO()
    status = 0
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(b"One day\n"))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(words)
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else 1
    except BaseException as error:
        err.write(f"{type(error).__name__}: {error!s:.200}".replace("\n", " ") + "\n(traceback)\n")
    finally:
        sys.stdin = stdin
    if (folder / "dst").exists():
        shutil.rmtree(folder / "dst")
        err.write("left DST\n")
    shown = [line.replace(f"{folder}{os.sep}", "") for line in err.getvalue().splitlines()]
    return Answer(kind, command, status, [line for line in shown if line])


def bad_files(
    reads_only: Annotated[bool, typer.Option("--reads-only", help="Only what is read.")] = False,
) -> None:
    """Give every command wrong files and list the one line that each answers with."""
    wrong = count = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = [read_badly(folder)]
        kinds += [] if reads_only else [write_badly(folder), write_to_full_disk(folder)]
        for answers in kinds:
            for answer in answers:
                write(answer.row() + "\n")
                count += 1
                wrong += not answer.well
    log(f"{count} tried, {wrong} answered otherwise than with one line")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    cli.run_command(bad_files, "python scripts/tools/bad_files.py", EXAMPLE)
