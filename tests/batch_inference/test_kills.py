"""The command is killed or interrupted at any time; running it again completes its output."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

# A shell starts background jobs with SIGINT ignored, and jaxllm then ignores it, too.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("jaxllm", run_name="__main__", alter_sys=True)
"""
ROWS = 400


def start(model: Any, folder: Path) -> "subprocess.Popen[bytes]":
    """Start `jaxllm batch` in a process, with `ROWS` rows of which each hundredth fails."""
    rows = [
        {"id": f"row {n}", "prompt": [5 + n % 90, 7]}
        | ({"temperature": -1} if n % 100 == 50 else {})
        for n in range(ROWS)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["-n", "24", "--temperature", "0.9", "--seed", "11", "--out", folder / "out.jsonl"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "batch", model, file, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def count_lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def signal_after(process: Any, out: Path, lines: int, number: signal.Signals) -> str:
    """Signal a command once its output has some lines; return its stderr."""
    while process.poll() is None and count_lines(out) < lines:
        time.sleep(0.005)
    process.send_signal(number)
    return str(process.communicate()[1].decode())


def read_answers(out: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    answers = {line.pop("id"): line for line in lines}
    assert len(answers) == len(lines) == ROWS
    assert sum("error" in answer for answer in answers.values()) == ROWS // 100
    return answers


def test_interrupted_command_prints_one_line(model: Path, tmp_path: Path) -> None:
    """After SIGINT the answers are in the file, and one line tells how to go on."""
    process, out = start(model, tmp_path), tmp_path / "out.jsonl"
    (message,) = signal_after(process, out, 3, signal.SIGINT).splitlines()
    assert process.returncode == 130
    assert message.startswith("jaxllm: interrupted; ")
    assert message.endswith(f"of {ROWS} answers are in {out}; the same command continues")
    assert 3 <= count_lines(out) < ROWS


@pytest.mark.full
def test_random_kills_do_not_change_answers(model: Path, tmp_path: Path) -> None:
    """After SIGKILL at random times, every row has one answer, that of an uninterrupted run."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = start(model, tmp_path / "whole")
    assert whole.communicate() and whole.returncode == 1  # rows have failed
    chance, out, kills = random.Random(0), tmp_path / "killed" / "out.jsonl", 0
    while count_lines(out) < ROWS * 0.8:
        process = start(model, tmp_path / "killed")
        signal_after(process, out, count_lines(out) + chance.randint(1, 60), signal.SIGKILL)
        kills += process.returncode == -signal.SIGKILL
    process = start(model, tmp_path / "killed")
    assert b"rows are done" in process.communicate()[1] and process.returncode == 1
    assert kills >= 4
    assert read_answers(out) == read_answers(tmp_path / "whole" / "out.jsonl")
