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
    KILLER,
    ONCE,
    OPTIONS,
    RAISER,
    load_crashing_lm,
)
from tests.batch_inference.process_kills import alive, children, start_jaxllm
from tests.conftest import Run
from tests.tiny_models import save_random


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "m"
    save_random(directory, "llama", num_hidden_layers=1, eos_token_id=None)
    return directory


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_crashing_rows_fail_without_affecting_other_rows(model: Path, tmp_path: Path) -> None:
    """Only rows that crash their worker or raise get an error; all other rows equal single requests
    with the same seed.
    """
    prompts = [[5 + n, 6] for n in range(12)]
    prompts[2], prompts[5], prompts[9] = ONCE, KILLER, RAISER
    rows = read_lines(map(json.dumps, prompts))
    job = BatchJob(task="generate", options=OPTIONS, rows=2, group=3, tries=1)
    found = run_job(
        rows, job, ProcessWorkers(partial(load_crashing_lm, model), 2), tmp_path / "out"
    )
    assert found == (12, 2)
    answers, lm = lines(tmp_path / "out"), jaxllm.load(model)
    assert [answer["id"] for answer in answers] == list(range(1, 13))
    assert answers[5]["error"] == "line 6 crashed its worker 1 times"
    assert answers[9]["error"] == "line 10: MemoryError: no room"
    for n in set(range(12)) - {5, 9}:
        single = lm.generate(prompts[n], **{**OPTIONS, "seed": row_seed(5, n + 1)})
        assert answers[n]["tokens"] == single.tokens


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
    answers, lm = lines(tmp_path / "out"), jaxllm.load(model)
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
    with pytest.raises(CheckpointError, match="nowhere"):
        run_job(
            rows,
            job,
            ProcessWorkers(partial(load_crashing_lm, tmp_path / "nowhere"), 2),
            tmp_path / "out",
        )


def test_cores_are_divided_between_workers() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert assign_cores(1, len(cores)) == [cores]
    assert assign_cores(len(cores), 1) == [[core] for core in cores]
    assert assign_cores(len(cores) + 1, 1)[-1] == cores[:1]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_killed_driver_leaves_no_workers_and_resumes(model: Path, tmp_path: Path, run: Run) -> None:
    """After SIGKILL the workers exit, and --resume completes the output byte for byte."""
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(f"[{5 + n}, 7]\n" for n in range(40)))
    options = ["-m", model, "-n", 24, "--temperature", 1, "--group", 2, "--batch-size", 2]
    command = ["batch", file, *options, "--out", out, "--workers", 2]
    driver = start_jaxllm(command)
    journal = tmp_path / "out.jsonl.parts" / "journal"
    while driver.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    workers = children(driver.pid)
    driver.send_signal(signal.SIGKILL)
    _, err = driver.communicate()
    assert driver.returncode == -signal.SIGKILL, err.decode()
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
    driver = start_jaxllm(["batch", model, file, *options, "--out", out])
    journal = tmp_path / "out.jsonl.parts" / "journal"
    while driver.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    workers = children(driver.pid)
    driver.send_signal(signal.SIGINT)
    _, err = driver.communicate()  # returns once every process that holds stderr has ended
    assert driver.returncode == 130, err.decode()
    (messages,) = err.decode().splitlines()
    assert messages.startswith("jaxllm: interrupted; ")
    while any(map(alive, workers)):
        time.sleep(0.05)
