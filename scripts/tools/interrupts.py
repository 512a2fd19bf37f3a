"""Ctrl-C at random moments of commands: what they say, how soon they end, what they leave.

    python scripts/tools/interrupts.py --moments 20

Each command runs once to its end; then it is interrupted at moments drawn evenly from that time,
counted from when the process has taken itself in hand (what is before that is Python's own start);
a moment at which it had ended is drawn again. A row that is not one line (the notes in brackets of
a command that was well under way aside), status 130, within a second and without a partial file is
marked, and the script's status is 1. `chat` is interrupted twice: once ends an answer only.
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
# Every run compiles what it runs: that is where an interrupt waits longest.
ENVIRONMENT = {**os.environ, "JAXLLM_COMPILE_CACHE": "0"}
TALK = "Once upon a time\nOne day\n" * 8
STORY = "Once upon a time there was a girl. She had a red ball. " * 200
# The arguments of each command, DST standing for a path that is not there yet, and its stdin.
COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("generate MODEL -n 600 --overflow slide", ""),
    "convert": ("convert MODEL DST --dtype bfloat16", ""),
    "quantize": ("quantize MODEL DST --bits 4", ""),
    "perplexity": ("perplexity MODEL --text - --window 64 --batch 2", STORY),
    "chat": ("chat MODEL -n 40 --overflow slide", TALK),
}


@dataclass(frozen=True)
class Ended:
    """How a command ended. seconds: from the last signal. lines: of stderr. left: file names."""

    moment: float
    status: int
    seconds: float
    lines: list[str]
    left: list[str]

    @property
    def well(self) -> bool:
        said = [line for line in self.lines if not line.startswith("(")]
        one = len(said) == 1 and "interrupted" in said[0]
        return one and self.status == 130 and self.seconds < 1 and not self.left

    def row(self, name: str) -> str:
        last = self.lines[-1] if self.lines else ""
        return (
            f"{name:10} {self.moment:7.2f} {self.seconds:7.2f} {self.status:6} {len(self.lines):5}"
            f"  {','.join(self.left) or '-':10} {'' if self.well else 'WRONG '}{last:.110}"
        )


def interrupted(
    arguments: Sequence[str], stdin: str, folder: Path, moment: float, times: int = 1
) -> Ended:
    """Run `jaxllm ARGUMENTS` in an empty folder and interrupt it `moment` seconds after its start.

    times: how many signals, a little apart: a talk is ended by the second.
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
        _wait_until_in_hand(process)
        in_hand = time.perf_counter()
        if moment < math.inf:
            time.sleep(moment)
            for number in range(times):
                time.sleep(0.05 * (number > 0))
                process.send_signal(signal.SIGINT)
        sent = time.perf_counter() if moment < math.inf else in_hand
        said = process.stderr.read().decode()
        status = process.wait()
    seconds = time.perf_counter() - sent
    left = sorted(path.name for path in folder.rglob("*") if ".partial" in path.name)
    return Ended(moment, status, seconds, said.splitlines(), left)


def _wait_until_in_hand(process: "subprocess.Popen[bytes]") -> None:
    """Until it handles SIGTERM, which Python by itself does not."""
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
    moments: Annotated[int, typer.Option(min=1, help="Of each command.")] = 20,
    model: Annotated[str, typer.Option(help="As --model of generate.")] = "demo:llama",
    commands: Annotated[str, typer.Option(help="Which of them.")] = ",".join(COMMANDS),
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 1,
) -> None:
    """Interrupt commands at random moments and print a table of how they end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    draw = random.Random(seed)
    model = model if ":" in model else str(Path(model).absolute())
    wrong = 0
    write("command     moment   until status lines  left       said\n")
    for name in commands.split(","):
        template, stdin = COMMANDS[name]
        arguments = [model if word == "MODEL" else word for word in template.split()]
        with tempfile.TemporaryDirectory() as folder:
            lasts = interrupted(arguments, stdin, Path(folder), math.inf).seconds
        for _ in range(moments):
            ended = _one(arguments, stdin, lambda lasts=lasts: draw.uniform(0, lasts), name)
            wrong += not ended.well
            write(ended.row(name) + "\n")
    log(f"{wrong} ended otherwise than they should")
    if wrong:
        raise typer.Exit(1)


def _one(arguments: Sequence[str], stdin: str, moment: Callable[[], float], name: str) -> Ended:
    """The first of the moments at which the command had not ended yet."""
    for _ in range(20):
        with tempfile.TemporaryDirectory() as folder:
            times = 2 if name == "chat" else 1
            ended = interrupted(arguments, stdin, Path(folder), moment(), times)
        if ended.status != 0:
            break
    return ended


if __name__ == "__main__":
    run_command(interrupts, "python scripts/tools/interrupts.py", EXAMPLE)
