"""Worker processes: crashing rows, hangs and killed drivers; every row is answered once."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from jaxllm.batch_inference.job import BatchJob, row_seed
from jaxllm.batch_inference.processes import ProcessWorkers, assign_cores
from jaxllm.batch_inference.rows import read_lines
from jaxllm.batch_inference.runner import run_job
from jaxllm.errors import CheckpointError
from tests.batch_inference.crashing_models import (
    HANGS,
    OPTIONS,
    check_crashing_rows,
    load_crashing_lm,
    read_answers,
)
from tests.batch_inference.process_kills import alive, children, start_jaxllm
from tests.conftest import Run


def test_crashing_rows_fail_without_affecting_other_rows(model: Path, tmp_path: Path) -> None:
    """Only rows that crash their worker or raise get an error; all other rows equal single requests
    with the same seed.
    """
    workers = ProcessWorkers(partial(load_crashing_lm, model), 2)
    check_crashing_rows(workers, model, tmp_path / "out")


def test_hanging_row_fails_after_two_tries(model: Path, tmp_path: Path) -> None:
    """A row that never returns is tried twice and then fails. A fake clock advances only while the
    row hangs, so no other row times out.
    """
    hung, messages, ticks = model / "hung", list[str](), [0]
    late = "a worker had no answer after 0.4 s and was killed"

    def clock() -> float:
        ticks[0] += hung.exists() and len(hung.read_bytes()) > messages.count(late)
        return 0.1 * ticks[0]

    prompts = [[5 + n, 6] for n in range(6)]
    prompts[4] = HANGS
    rows = read_lines(map(json.dumps, prompts))
    job = BatchJob(task="generate", options=OPTIONS, rows=2, group=3, tries=1, timeout=0.4)
    workers = ProcessWorkers(partial(load_crashing_lm, model), 1, messages.append, clock)
    assert run_job(rows, job, workers, tmp_path / "out") == (6, 1)
    assert len(hung.read_bytes()) == 2
    answers, lm = read_answers(tmp_path / "out"), jaxllm.load(model)
    error = "line 5 crashed its worker 1 times, or had no answer after 0.4 s"
    assert answers[4] == {"id": 5, "line": 5, "error": error}
    for n in (0, 3, 5):
        single = lm.generate(prompts[n], **{**OPTIONS, "seed": row_seed(5, n + 1)})
        assert answers[n]["tokens"] == single.tokens
    assert messages == [late, "a worker has crashed; lines 4 to 6 run again"] * 2


def test_model_load_error_is_raised_once(tmp_path: Path) -> None:
    """A model that cannot be loaded raises its error once, not once per worker."""
    rows = read_lines(["[5]", "[6]"])
    job = BatchJob(task="generate", options=OPTIONS, group=1)
    workers = ProcessWorkers(partial(load_crashing_lm, tmp_path / "nowhere"), 2)
    with pytest.raises(CheckpointError, match="nowhere"):
        run_job(rows, job, workers, tmp_path / "out")


def test_cores_are_divided_between_workers() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert assign_cores(1, len(cores)) == [cores]
    assert assign_cores(len(cores), 1) == [[core] for core in cores]
    assert assign_cores(len(cores) + 1, 1)[-1] == cores[:1]


def signal_at_work(
    command: list[Any], journal: Path, number: signal.Signals
) -> tuple[int, set[int], str]:
    """Start a command and signal it once its journal holds two groups.

    Returns:
        Its exit status, the workers that it had, and its stderr.
    """
    driver = start_jaxllm(command)
    while driver.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    workers = children(driver.pid)
    driver.send_signal(number)
    _, err = driver.communicate()  # returns once every process that holds stderr has ended
    return driver.returncode, workers, err.decode()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_killed_driver_leaves_no_workers_and_resumes(model: Path, tmp_path: Path, run: Run) -> None:
    """After SIGKILL the workers exit, and --resume completes the output byte for byte."""
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(f"[{5 + n}, 7]\n" for n in range(40)))
    options = ["-m", model, "-n", 24, "--temperature", 1, "--group", 2, "--batch-size", 2]
    command = ["batch", file, *options, "--out", out, "--workers", 2]
    journal = tmp_path / "out.jsonl.parts" / "journal"
    returned, workers, err = signal_at_work(command, journal, signal.SIGKILL)
    assert returned == -signal.SIGKILL, err
    while any(map(alive, workers)):
        time.sleep(0.05)
    there = journal.read_bytes().count(b"\n") - 1
    assert there < 20
    status, _, err_text = run(*command, "--resume")
    assert status == 0, err_text
    assert f"{2 * there} rows are done, {40 - 2 * there} to go" in err_text
    assert run("batch", file, *options, "--out", tmp_path / "whole", "--workers", 0)[0] == 0
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "whole"}


def test_interrupted_driver_prints_one_line(model: Path, tmp_path: Path) -> None:
    """After SIGINT stderr holds one line: neither workers nor multiprocessing print anything on
    exit.
    """
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(f"[{5 + n}, 7]\n" for n in range(400)))
    options = ["-n", 24, "--group", 2, "--batch-size", 2, "--workers", 2]
    command = ["batch", model, file, *options, "--out", out]
    journal = tmp_path / "out.jsonl.parts" / "journal"
    returned, workers, err = signal_at_work(command, journal, signal.SIGINT)
    assert returned == 130, err
    (messages,) = err.splitlines()
    assert messages.startswith("jaxllm: interrupted; ")
    while any(map(alive, workers)):
        time.sleep(0.05)
