"""Ctrl-C at random moments of commands: their messages, exit times and leftover files.

    python scripts/tools/interrupts.py --moments 20

One decision: moments are uniform over the command's duration, measured by a complete run, from when
the process has installed its signal handlers (before that, Python starts). If a command ended
before its moment, another moment is drawn. A command passes if it prints one line (progress notes
in parentheses do not count), exits with status 130 within a second, and leaves no partial file. The
script marks others, and its exit status is 1. `chat` is interrupted twice, since the first
interrupt ends only an answer.
"""

import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from jaxllm.cli import run_command
from jaxllm.cli.console import log, write

EXAMPLE = "Example: python scripts/tools/interrupts.py --moments 5 --model demo:llama"
# No compile cache: an interrupt waits longest while a program compiles.
ENVIRONMENT = {**os.environ, "JAXLLM_COMPILE_CACHE": "0"}
TALK = "Once upon a time\nOne day\n" * 8
STORY = "Once upon a time there was a girl. She had a red ball. " * 200
# The arguments of each command, in which DST is a path that does not exist yet, and its stdin.
COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("generate MODEL -n 600 --overflow slide", ""),
    "convert": ("convert MODEL DST --dtype bfloat16", ""),
    "quantize": ("quantize MODEL DST --bits 4", ""),
    "perplexity": ("perplexity MODEL --text - --window 64 --batch 2", STORY),
    "chat": ("chat MODEL -n 40 --overflow slide", TALK),
}


@dataclass(frozen=True)
class Outcome:
    """How an interrupted command ended."""

    moment: float
    status: int
    seconds: float
    """Time from the last signal to the end."""
    lines: list[str]
    """Lines of stderr."""
    leftovers: list[str]
    """Names of partial files."""

    @property
    def passes(self) -> bool:
        messages = [line for line in self.lines if not line.startswith("(")]
        one_line = len(messages) == 1 and "interrupted" in messages[0]
        return one_line and self.status == 130 and self.seconds < 1 and not self.leftovers

    def row(self, name: str) -> str:
        last = self.lines[-1] if self.lines else ""
        return (
            f"{name:10} {self.moment:7.2f} {self.seconds:7.2f} {self.status:6} {len(self.lines):5}"
            f"  {','.join(self.leftovers) or '-':10} {'' if self.passes else 'WRONG '}{last:.110}"
        )


def interrupt_command(
    arguments: Sequence[str], stdin: str, folder: Path, moment: float, signals: int = 1
) -> Outcome:
    """Run `jaxllm ARGUMENTS` in an empty folder; interrupt it `moment` seconds after its start.

    Args:
        signals: number of signals, 0.05 s apart.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "jaxllm", *arguments],
        cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(stdin.encode())
        process.stdin.close()
        _wait_for_handlers(process)
        ready = time.perf_counter()
        if moment < math.inf:
            time.sleep(moment)
            for number in range(signals):
                time.sleep(0.05 * (number > 0))
                process.send_signal(signal.SIGINT)
        sent = time.perf_counter() if moment < math.inf else ready
        errors = process.stderr.read().decode()
        status = process.wait()
    seconds = time.perf_counter() - sent
    leftovers = sorted(path.name for path in folder.rglob("*") if ".partial" in path.name)
    return Outcome(moment, status, seconds, errors.splitlines(), leftovers)


def _wait_for_handlers(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the process handles SIGTERM, which Python does not do by default."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        time.sleep(1.0)
        return
    while process.poll() is None:
        caught = next(x for x in status.read_text().splitlines() if x.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.002)


def interrupts(
    moments: Annotated[int, typer.Option(min=1, help="Interrupts per command.")] = 20,
    model: Annotated[str, typer.Option(help="Model, as for jaxllm generate.")] = "demo:llama",
    commands: Annotated[str, typer.Option(help="Commands, comma-separated.")] = ",".join(COMMANDS),
    seed: Annotated[int, typer.Option(help="Random seed of the moments.")] = 1,
) -> None:
    """Interrupt commands at random moments and print a table of how they end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    draw = random.Random(seed)
    model = model if ":" in model else str(Path(model).absolute())
    failures = 0
    write("command     moment seconds status lines  leftovers  message\n")
    for name in commands.split(","):
        template, stdin = COMMANDS[name]
        arguments = [model if word == "MODEL" else word for word in template.split()]
        with tempfile.TemporaryDirectory() as folder:
            duration = interrupt_command(arguments, stdin, Path(folder), math.inf).seconds
        for _ in range(moments):
            outcome = _interrupt_in_time(
                arguments, stdin, lambda duration=duration: draw.uniform(0, duration), name
            )
            failures += not outcome.passes
            write(outcome.row(name) + "\n")
    log(f"{failures} interrupts failed")
    if failures:
        raise typer.Exit(1)


def _interrupt_in_time(
    arguments: Sequence[str], stdin: str, draw_moment: Callable[[], float], name: str
) -> Outcome:
    """Interrupt at a drawn moment; redraw, up to 20 times, if the command had already ended."""
    for _ in range(20):
        with tempfile.TemporaryDirectory() as folder:
            signals = 2 if name == "chat" else 1
            outcome = interrupt_command(arguments, stdin, Path(folder), draw_moment(), signals)
        if outcome.status != 0:
            break
    return outcome


if __name__ == "__main__":
    run_command(interrupts, "python scripts/tools/interrupts.py", EXAMPLE)
