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
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoints.resume import TensorStore
from jaxllm.errors import CheckpointError, ConfigError, NonFiniteError
from jaxllm.train import loop
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.loop import TrainPlan, TrainResult, train
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import SCHEDULES, Optimizer
from jaxllm.train.partition import combine, partition
from jaxllm.train.step import Setup, init_state, train_step
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
SETUP = Setup(MODEL, NextToken(), Optimizer(steps=STEPS, lr=0.02))


def run(
    directory: Path | None = None, plan: TrainPlan | None = None, **options: Any
) -> TrainResult:
    plan = plan or TrainPlan(steps=STEPS)
    setup = options.pop("setup", SETUP)
    return train(PARAMS, Texts(), setup, plan, directory=directory, show_progress=False, **options)


def bits(params: Any) -> dict[str, bytes]:
    return {path: np.asarray(x).tobytes() for path, x in flatten(params)}


def test_a_run_learns_and_leaves_what_it_was_given() -> None:
    before = bits(PARAMS)
    found = run(eval_data=Texts(), plan=TrainPlan(steps=STEPS, eval_steps=4))
    assert bits(PARAMS) == before
    assert [r.step for r in found.records] == list(range(1, STEPS + 1))
    assert [r.step for r in found.records if r.held_out is not None] == [4, 6]
    assert found.initial_loss is not None
    assert found.records[-1].held_out is not None
    assert found.records[-1].held_out < found.initial_loss - 0.5
    assert found.best is None


def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run()
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "SAVE_FACTOR", 0.0)
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
    again = run(directory, log=said.append)
    assert said[0] == "resuming after step 5 of 6"
    assert bits(again.params) == bits(whole.params)
    assert again.records == whole.records


def test_the_state_of_another_run_is_refused_and_stays(tmp_path: Path) -> None:
    run(tmp_path)
    kept = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = dataclasses.replace(SETUP.optimizer, weight_decay=0.5)
    for changes, message in (
        ({"setup": SETUP._replace(optimizer=other)}, r"weight_decay was 0\.01, is 0\.5"),
        ({"plan": TrainPlan(steps=STEPS, seed=3)}, "seed was 0, is 3"),
        ({"eval_data": Texts(digest="more")}, "held_out was None, is 'more'"),
        ({"plan": TrainPlan(steps=STEPS - 1)}, "steps must be at least 6, got 5"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            run(tmp_path, **changes)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == kept


def own_loop(*phases: tuple[int, Optimizer]) -> dict[str, bytes]:
    """Train up to each step by the optimizer beside it, without the loop."""
    trained, rest = partition(PARAMS)
    state = init_state(trained, SETUP)
    for until, optimizer in phases:
        setup = SETUP._replace(optimizer=optimizer)
        while int(state.step) < until:
            rows = jax.tree.map(lambda x: x[None], Texts().batch(int(state.step)))
            state, _ = train_step(state, rest, None, rows, jax.random.key(0), setup=setup)
    return bits(combine(state.trained, rest))


def test_a_prolonged_run_takes_the_new_schedule(tmp_path: Path) -> None:
    """It is the steps done, then steps of the new optimizer at their own numbers, bit for bit."""
    run(tmp_path, eval_data=Texts())
    longer, said = Optimizer(steps=9, lr=0.01), list[str]()
    found = run(
        tmp_path, TrainPlan(steps=9, eval_steps=2), setup=SETUP._replace(optimizer=longer),
        eval_data=Texts(), log=said.append,
    )  # fmt: skip
    assert said[0] == (
        f"resuming after step {STEPS} of 9; steps was 6, is 9; lr was 0.02, is 0.01;"
        " eval_steps was None, is 2"
    )
    assert bits(found.params) == own_loop((STEPS, SETUP.optimizer), (9, longer))
    assert [r.step for r in found.records if r.held_out is not None] == [6, 8, 9]


def test_a_lower_rate_continues_after_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last state that a step was finite from: of the one before the step that was not,
    no rate makes another.
    """
    monkeypatch.setitem(SCHEDULES, "late", lambda done: jnp.where(done < 0.5, 0.0, 1.0))
    wild, calm = (
        Optimizer(steps=STEPS, lr=lr, schedule="late", floor=0.0, warmup=0.0) for lr in (1e30, 1e-3)
    )
    with pytest.raises(NonFiniteError, match=r"step 5 is not finite: got .*no earlier state was"):
        run(tmp_path, setup=SETUP._replace(optimizer=wild))
    assert not tmp_path.exists()  # nothing was kept: a lower rate begins anew
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "SAVE_FACTOR", 0.0)
    reports, said = list[list[int]](), list[str]()

    def report(records: Any, before: float | None) -> None:
        reports.append([r.step for r in records])

    with pytest.raises(NonFiniteError, match=r"with a lower lr continues from there"):
        run(tmp_path, setup=SETUP._replace(optimizer=wild), report=report)
    assert reports[-1] == [1, 2, 3, 4]
    found = run(tmp_path, setup=SETUP._replace(optimizer=calm), log=said.append)
    assert said[0] == "resuming after step 3 of 6; lr was 1e+30, is 0.001"
    assert bits(found.params) == own_loop((3, wild), (STEPS, calm))


def test_checkpoints_are_of_their_steps() -> None:
    """What is handed over at a step are the parameters of a run that ends there."""
    found: dict[int, dict[str, bytes]] = {}

    def checkpoint(params: Any, step: int) -> None:
        found[step] = bits(params)

    run(plan=TrainPlan(steps=STEPS, save_steps=2), checkpoint=checkpoint)
    assert sorted(found) == [2, 4, 6]
    assert found[4] == own_loop((4, SETUP.optimizer))


def test_patience_ends_a_run_whose_result_is_the_best() -> None:
    setup = SETUP._replace(optimizer=Optimizer(steps=40, lr=0.05, schedule="constant"))
    plan = TrainPlan(steps=40, eval_steps=2, patience=2)
    found = run(setup=setup, plan=plan, eval_data=Texts(seed=100))
    held = [r.held_out for r in found.records if r.held_out is not None]
    assert found.best is not None
    assert found.best.held_out == min(held)
    assert len(found.records) == found.best.step + 4 < 40
    until = run(setup=setup, plan=TrainPlan(steps=found.best.step), eval_data=Texts(seed=100))
    assert bits(until.params) == bits(found.params)


def test_a_state_that_cannot_be_kept_is_said_and_the_last_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "SAVE_FACTOR", 0.0)
    calls: list[int] = []
    real = loop.save_state

    def full(journal: TensorStore, state: Any, *kept: Any) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise CheckpointError("cannot write state.part: No space left on device")
        real(journal, state, *kept)

    monkeypatch.setattr(loop, "save_state", full)
    with pytest.raises(CheckpointError, match="No space left"):
        run(tmp_path)
    monkeypatch.setattr(loop, "save_state", real)
    said: list[str] = []
    assert bits(run(tmp_path, log=said.append).params) == bits(run().params)
    assert said[0] == "resuming after step 2 of 6"


def test_bad_plans_are_refused() -> None:
    for wrong in (0, 1.5, True, "3", None, 1 << 40):
        for name in ("steps", "gradient_accumulation_steps"):
            with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1 "):
                TrainPlan(**{"steps": 1, name: wrong})
    for seed in (-1, 1.0, "a", None, 1 << 32):
        with pytest.raises(ConfigError, match="seed must be a whole number from 0 "):
            TrainPlan(steps=1, seed=seed)  # type: ignore[arg-type]
    assert TrainPlan(steps=np.int64(3)) == TrainPlan(steps=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="patience needs validation data"):
        run(plan=TrainPlan(steps=2, patience=1))
    with pytest.raises(ConfigError, match="the data has no labels to learn"):
        train(PARAMS, Texts(tokens=0), SETUP, TrainPlan(steps=1))


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
