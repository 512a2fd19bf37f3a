"""The loop: a killed run ends like one that was not, and nothing is lost on the way."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.compress.journal import Journal
from jaxllm.errors import CheckpointError, ConfigError, NonFiniteError
from jaxllm.train import loop
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.keeping import journal_of
from jaxllm.train.loop import Plan, Run, train
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.step import Setup
from jaxllm.weights.paths import flatten
from tests.twins import random_model, tokens

STEPS = 6


@dataclasses.dataclass(frozen=True)
class Texts:
    """Random texts: what a tiny model learns by heart."""

    seed: int = 0
    count: int = 4
    digest: str = "texts"
    tokens: int = 4 * 14

    def __len__(self) -> int:
        return self.count

    def batch(self, number: int) -> Rows:
        ids = tokens(2, 8, self.seed + number % self.count).astype(np.int32)
        label = np.concatenate([ids[:, 1:], np.full((2, 1), IGNORED)], 1).astype(np.int32)
        position = np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8))
        return Rows(ids, label, position, np.zeros((2, 8), np.int32))


MODEL, PARAMS = random_model("llama", num_hidden_layers=1)
SETUP = Setup(MODEL, NextToken(), Optimizer(steps=STEPS, rate=0.02))


def run(directory: Path | None = None, plan: Plan | None = None, **options: Any) -> Run:
    plan = plan or Plan(steps=STEPS)
    setup = options.pop("setup", SETUP)
    journal = Journal() if directory is None else journal_of(PARAMS, None, [setup, plan], directory)
    with journal.kept():
        return train(PARAMS, Texts(), setup, plan, journal=journal, show_progress=False, **options)


def bits(params: Any) -> dict[str, bytes]:
    return {path: np.asarray(x).tobytes() for path, x in flatten(params)}


def test_a_run_learns_and_leaves_what_it_was_given() -> None:
    before = bits(PARAMS)
    found = run(held_out=Texts(), plan=Plan(steps=STEPS, evaluate_every=4))
    assert bits(PARAMS) == before
    assert [r.step for r in found.records] == list(range(1, STEPS + 1))
    assert [r.step for r in found.records if r.held_out is not None] == [4, 6]
    assert found.before is not None
    assert found.records[-1].held_out is not None
    assert found.records[-1].held_out < found.before - 0.5
    assert found.best is None


def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run()
    monkeypatch.setattr(loop, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(loop, "KEEP_SHARE", 0.0)
    directory = tmp_path / "parts"

    class Stopped(Exception):
        pass

    left = []

    def stop(params: Any, rows: Rows, key: jax.Array) -> Rows:
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        return rows

    for steps in (1, 2, 2):
        left[:] = [steps]
        with pytest.raises(Stopped):
            run(directory, prepare=stop)
    said: list[str] = []
    again = run(directory, say=said.append)
    assert said[0] == "going on after step 5 of 6"
    assert bits(again.params) == bits(whole.params)
    assert again.records == whole.records


def test_the_state_of_another_run_is_refused_and_stays(tmp_path: Path) -> None:
    run(tmp_path)
    kept = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="holds the state of another run"):
        run(tmp_path, setup=SETUP._replace(optimizer=Optimizer(steps=STEPS, rate=0.01)))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == kept


def test_a_run_that_diverges_stops_at_once_and_keeps_the_state_before(tmp_path: Path) -> None:
    setup = SETUP._replace(optimizer=Optimizer(steps=STEPS, rate=1e30, clip=None, warmup=0.0))
    with pytest.raises(NonFiniteError, match=r"of step 2 is not finite .* lower rate.*is in"):
        run(tmp_path, setup=setup)
    assert [p.name for p in tmp_path.iterdir() if p.suffix] == ["state.part"]


def test_patience_ends_a_run_whose_result_is_the_best() -> None:
    setup = SETUP._replace(optimizer=Optimizer(steps=40, rate=0.05, schedule="constant"))
    plan = Plan(steps=40, evaluate_every=2, patience=2)
    found = run(setup=setup, plan=plan, held_out=Texts(seed=100))
    held = [r.held_out for r in found.records if r.held_out is not None]
    assert found.best is not None
    assert found.best.held_out == min(held)
    assert len(found.records) == found.best.step + 4 < 40
    until = run(setup=setup, plan=Plan(steps=found.best.step), held_out=Texts(seed=100))
    assert bits(until.params) == bits(found.params)


def test_a_state_that_cannot_be_kept_is_said_and_the_last_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(loop, "KEEP_SHARE", 0.0)
    calls: list[int] = []
    real = loop.keep

    def full(journal: Journal, state: Any, *kept: Any) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise CheckpointError("cannot write state.part: No space left on device")
        real(journal, state, *kept)

    monkeypatch.setattr(loop, "keep", full)
    with pytest.raises(CheckpointError, match="No space left"):
        run(tmp_path)
    monkeypatch.setattr(loop, "keep", real)
    said: list[str] = []
    assert bits(run(tmp_path, say=said.append).params) == bits(run().params)
    assert said[0] == "going on after step 2 of 6"


def test_bad_plans_are_refused() -> None:
    for wrong in (0, 1.5, True, "3", None, 1 << 40):
        for name in ("steps", "accumulate"):
            with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1 "):
                Plan(**{"steps": 1, name: wrong})
    for seed in (-1, 1.0, "a", None, 1 << 32):
        with pytest.raises(ConfigError, match="seed must be a whole number from 0 "):
            Plan(steps=1, seed=seed)  # type: ignore[arg-type]
    assert Plan(steps=np.int64(3)) == Plan(steps=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="patience needs held-out data"):
        run(plan=Plan(steps=2, patience=1))
    with pytest.raises(ConfigError, match="no label of the data counts"):
        train(PARAMS, Texts(tokens=0), SETUP, Plan(steps=1))


@pytest.mark.full
def test_a_run_killed_ten_times_at_random_moments_ends_bit_equal(tmp_path: Path) -> None:
    """Each time in a process of its own, by SIGKILL."""
    program = [sys.executable, "-m", "tests.train.killed", str(tmp_path)]
    whole = subprocess.run([*program, "whole"], check=True, capture_output=True, text=True).stdout
    rng, kills = Random(0), 0
    while kills < 10:
        process = subprocess.Popen([*program, "parts"], stdout=subprocess.PIPE, text=True)
        time.sleep(rng.uniform(2.0, 8.0))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
    assert kills == 10
    again = subprocess.run([*program, "parts"], check=True, capture_output=True, text=True).stdout
    assert again == whole
