"""Every command with invalid files: each must fail with a one-line message.

    python scripts/tools/bad_files.py

Inputs are missing, empty, directories or of another kind. Outputs go to a folder that does not
exist, onto a directory, or to a full disk (a small tmpfs, if this user may mount one). One
decision: commands run in this process, one after the other. A command passes if it prints one line
and exits with status 1 or 2. The script marks others, and its exit status is 1.
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from jaxllm import cli
from jaxllm.cli.console import log, write

EXAMPLE = "Example: python scripts/tools/bad_files.py --reads-only"
JUNK = bytes(range(256)) * 8
# Commands that read, and commands that write, the file BAD.
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
    "batch demo:llama LINES -n 2 --out BAD",
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
# Files that may be missing or empty: the command creates them or continues them.
VALID = {
    ("missing", "generate --prompt-cache BAD -p Once -n 2"),
    ("missing", "perplexity demo:llama --text @STORY --journal BAD"),
    ("empty", "perplexity demo:llama --text @STORY --journal BAD"),
}


@dataclass(frozen=True)
class Outcome:
    """How a command ended with an invalid file."""

    kind: str
    """How the file is invalid."""
    command: str
    status: int
    lines: list[str]
    """Lines of stderr, and of leftover files."""

    @property
    def passes(self) -> bool:
        return self.status in (1, 2) and len(self.lines) == 1

    def row(self) -> str:
        mark = "" if self.passes else f"WRONG (status {self.status}) "
        return f"{self.kind:9} {self.command}\n          {mark}{' / '.join(self.lines)}"


def try_reads(folder: Path) -> Iterator[Outcome]:
    """Run every reading command with every kind of invalid file."""
    (folder / "empty").write_bytes(b"")
    (folder / "junk").write_bytes(JUNK)
    (folder / "directory").mkdir()
    for kind in ("missing", "empty", "junk", "directory"):
        for command in READS:
            if (kind, command) not in VALID:
                yield run_with_file(kind, command, folder / kind, folder)


def try_writes(folder: Path) -> Iterator[Outcome]:
    """Run every writing command with a folder that does not exist, and onto a directory."""
    (folder / "file").write_text("mine", encoding="utf-8")
    taken = folder / "taken.npy"
    for name in (folder / "taken", taken, folder / "taken.safetensors"):
        name.mkdir()
        (name / "config.json").write_text("mine", encoding="utf-8")
    for command in WRITES:
        yield run_with_file("no folder", command, folder / "file" / "below", folder)
        if not command.startswith(("vectors", "export")):  # these accept such a directory
            yield run_with_file("directory", command, folder / "taken", folder)


def try_full_disk(folder: Path) -> Iterator[Outcome]:
    """Run every writing command on a full disk; yield nothing if a disk cannot be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        log("full disk: skipped: this user cannot mount a tmpfs")
        return
    try:
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while filler.write(b"x" * 4096):
                pass
        for number, command in enumerate(WRITES):
            before = sorted(path.name for path in disk.iterdir())
            outcome = run_with_file("full disk", command, disk / f"x{number}", folder)
            left = {path.name for path in disk.iterdir()} - {*before}
            # Complete lines of results and journals may stay.
            allowed = {path for path in left if (disk / path).is_file() and ".partial" not in path}
            if left - allowed:
                outcome = replace(outcome, lines=[*outcome.lines, f"left {left}"])
            yield outcome
            for name in allowed:
                (disk / name).unlink()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def run_with_file(kind: str, command: str, bad: Path, folder: Path) -> Outcome:
    """Run a command in this process, with BAD replaced by a path."""
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
    lines = [line.replace(f"{folder}{os.sep}", "") for line in err.getvalue().splitlines()]
    return Outcome(kind, command, status, [line for line in lines if line])


def bad_files(
    reads_only: Annotated[
        bool, typer.Option("--reads-only", help="Invalid input files only.")
    ] = False,
) -> None:
    """Run every command with invalid files and print its message."""
    failures = count = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = [try_reads(folder)]
        kinds += [] if reads_only else [try_writes(folder), try_full_disk(folder)]
        for outcomes in kinds:
            for outcome in outcomes:
                write(outcome.row() + "\n")
                count += 1
                failures += not outcome.passes
    log(f"{count} commands, {failures} failures")
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    cli.run_command(bad_files, "python scripts/tools/bad_files.py", EXAMPLE)
