"""The training loop: resuming, checkpoints, early stopping and invalid plans."""

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

from jaxllm.errors import CheckpointError, ConfigError, NonFiniteError
from jaxllm.train import loop
from jaxllm.train.checkpointing import StateStore
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.loop import StepRecord, TrainPlan, TrainResult, train
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import SCHEDULES, Optimizer
from jaxllm.train.partition import combine, partition
from jaxllm.train.plots import moving_mean, plot
from jaxllm.train.step import Setup, init_state, train_step
from jaxllm.weights.paths import flatten
from tests.tiny_models import random_model, tokens

STEPS = 6


@dataclasses.dataclass(frozen=True)
class Texts:
    """Random texts that a tiny model can overfit."""

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


@pytest.fixture
def save_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "SAVE_FACTOR", 0.0)


def test_train_lowers_validation_loss_and_keeps_inputs() -> None:
    """Training leaves the given parameters unchanged, records every step, evaluates as planned and
    lowers the validation loss.
    """
    before = bits(PARAMS)
    found = run(eval_data=Texts(), plan=TrainPlan(steps=STEPS, eval_steps=4))
    assert bits(PARAMS) == before
    assert [r.step for r in found.records] == list(range(1, STEPS + 1))
    assert [r.step for r in found.records if r.held_out is not None] == [4, 6]
    assert found.initial_loss is not None
    assert found.records[-1].held_out is not None
    assert found.records[-1].held_out < found.initial_loss - 0.5
    assert found.best is None


@pytest.mark.usefixtures("save_each_step")
def test_train_resumes_bit_identically_after_interruptions(tmp_path: Path) -> None:
    """After three interruptions, the resumed run has the parameters and records of an uninterrupted
    one.
    """
    whole = run()
    directory = tmp_path / "parts"

    class Stopped(Exception):
        pass

    remaining = []

    def stop(params: Any, rows: Rows, key: jax.Array) -> Rows:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise Stopped
        return rows

    for steps in (1, 2, 2):
        remaining[:] = [steps]
        with pytest.raises(Stopped):
            run(directory, prepare=stop)
    messages: list[str] = []
    again = run(directory, log=messages.append)
    assert messages[0] == "resuming after step 5 of 6"
    assert bits(again.params) == bits(whole.params)
    assert again.records == whole.records


def test_train_refuses_state_of_different_run(tmp_path: Path) -> None:
    """A changed optimizer, seed, validation set or shorter plan is refused, and the stored state is
    unchanged.
    """
    run(tmp_path)
    stored = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = dataclasses.replace(SETUP.optimizer, weight_decay=0.5)
    for changes, message in (
        ({"setup": SETUP._replace(optimizer=other)}, r"weight_decay was 0\.01, is 0\.5"),
        ({"plan": TrainPlan(steps=STEPS, seed=3)}, "seed was 0, is 3"),
        ({"eval_data": Texts(digest="more")}, "held_out was None, is 'more'"),
        ({"plan": TrainPlan(steps=STEPS - 1)}, "steps must be at least 6, got 5"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            run(tmp_path, **changes)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == stored


def train_manually(*phases: tuple[int, Optimizer]) -> dict[str, bytes]:
    """Train up to each step with the optimizer given for it, without the loop."""
    trained, rest = partition(PARAMS)
    state = init_state(trained, SETUP)
    for until, optimizer in phases:
        setup = SETUP._replace(optimizer=optimizer)
        while int(state.step) < until:
            rows = jax.tree.map(lambda x: x[None], Texts().batch(int(state.step)))
            state, _ = train_step(state, rest, None, rows, jax.random.key(0), setup=setup)
    return bits(combine(state.trained, rest))


def test_extended_run_follows_new_schedule(tmp_path: Path) -> None:
    """It equals the finished steps followed by steps of the new optimizer at their own step
    numbers, bit for bit.
    """
    run(tmp_path, eval_data=Texts())
    longer, messages = Optimizer(steps=9, lr=0.01), list[str]()
    found = run(
        tmp_path, TrainPlan(steps=9, eval_steps=2), setup=SETUP._replace(optimizer=longer),
        eval_data=Texts(), log=messages.append,
    )  # fmt: skip
    assert messages[0] == (
        f"resuming after step {STEPS} of 9; steps was 6, is 9; lr was 0.02, is 0.01;"
        " eval_steps was None, is 2"
    )
    assert bits(found.params) == train_manually((STEPS, SETUP.optimizer), (9, longer))
    assert [r.step for r in found.records if r.held_out is not None] == [6, 8, 9]


def test_lower_learning_rate_continues_after_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved state is the last one from which a step was finite, since no rate rescues a later
    one; without one, nothing is saved.
    """
    monkeypatch.setitem(SCHEDULES, "constant", lambda done: jnp.where(done < 0.5, 0.0, 1.0))
    wild, calm = (
        Optimizer(steps=STEPS, lr=lr, schedule="constant", floor=0.0, warmup=0.0)
        for lr in (1e30, 1e-3)
    )
    with pytest.raises(NonFiniteError, match=r"step 5 is not finite: got .*no earlier state was"):
        run(tmp_path, setup=SETUP._replace(optimizer=wild))
    assert not tmp_path.exists()  # nothing was saved: a lower rate starts from scratch
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "SAVE_FACTOR", 0.0)
    reports, messages = list[list[int]](), list[str]()

    def report(records: Any, before: float | None) -> None:
        reports.append([r.step for r in records])

    with pytest.raises(NonFiniteError, match=r"with a lower lr continues from there"):
        run(tmp_path, setup=SETUP._replace(optimizer=wild), report=report)
    assert reports[-1] == [1, 2, 3, 4]
    found = run(tmp_path, setup=SETUP._replace(optimizer=calm), log=messages.append)
    assert messages[0] == "resuming after step 3 of 6; lr was 1e+30, is 0.001"
    assert bits(found.params) == train_manually((3, wild), (STEPS, calm))


def test_checkpoints_hold_parameters_of_their_step() -> None:
    """The parameters passed to the checkpoint callback are those of a run that ends at
    that step.
    """
    found: dict[int, dict[str, bytes]] = {}

    def checkpoint(params: Any, step: int) -> None:
        found[step] = bits(params)

    run(plan=TrainPlan(steps=STEPS, save_steps=2), checkpoint=checkpoint)
    assert sorted(found) == [2, 4, 6]
    assert found[4] == train_manually((4, SETUP.optimizer))


def test_patience_stops_run_and_returns_best() -> None:
    setup = SETUP._replace(optimizer=Optimizer(steps=40, lr=0.05, schedule="constant"))
    plan = TrainPlan(steps=40, eval_steps=2, patience=2)
    found = run(setup=setup, plan=plan, eval_data=Texts(seed=100))
    validation_losses = [r.held_out for r in found.records if r.held_out is not None]
    assert found.best is not None
    assert found.best.held_out == min(validation_losses)
    assert len(found.records) == found.best.step + 4 < 40
    until = run(setup=setup, plan=TrainPlan(steps=found.best.step), eval_data=Texts(seed=100))
    assert bits(until.params) == bits(found.params)


@pytest.mark.usefixtures("save_each_step")
def test_failed_state_write_keeps_previous_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write raises an error, and the run resumes from the previous state."""
    calls: list[int] = []
    real = StateStore.save

    def full(states: StateStore, state: Any, facts: Any) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise CheckpointError("cannot write state.part: No space left on device")
        real(states, state, facts)

    monkeypatch.setattr(StateStore, "save", full)
    with pytest.raises(CheckpointError, match="No space left"):
        run(tmp_path)
    monkeypatch.setattr(StateStore, "save", real)
    messages: list[str] = []
    assert bits(run(tmp_path, log=messages.append).params) == bits(run().params)
    assert messages[0] == "resuming after step 2 of 6"


def test_train_plan_refuses_invalid_values() -> None:
    for wrong in (0, 1.5, True, "3", None, 1 << 40):
        for name in ("steps", "gradient_accumulation_steps"):
            with pytest.raises(ConfigError, match=f"{name} must be a whole number"):
                TrainPlan(**{"steps": 1, name: wrong})
    for seed in (-1, 1.0, "a", None, 1 << 32):
        with pytest.raises(ConfigError, match="seed must be a whole number"):
            TrainPlan(steps=1, seed=seed)  # type: ignore[arg-type]
    assert TrainPlan(steps=np.int64(3)) == TrainPlan(steps=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="patience needs validation data"):
        run(plan=TrainPlan(steps=2, patience=1))
    with pytest.raises(ConfigError, match="the data has no labels to learn"):
        train(PARAMS, Texts(tokens=0), SETUP, TrainPlan(steps=1))


@pytest.mark.full
def test_train_survives_ten_random_kills_bit_identically(tmp_path: Path) -> None:
    """Each run is a separate process killed by SIGKILL at a random moment."""
    program = [sys.executable, "-m", "tests.train.slow_run", str(tmp_path)]
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


@pytest.mark.parametrize(("count", "labels"), [(9, 2), (80, 3)])
def test_plot_draws_and_labels_every_loss(
    count: int, labels: int, figures: list[Any], tmp_path: Path
) -> None:
    """A long run also has a moving mean, and the ticks are integer steps."""
    losses = 6 * 0.9 ** np.arange(count)
    records = [
        StepRecord(n, float(x), 1.0, 1.0, float(x) if n % 3 == 0 else None, {})
        for n, x in enumerate(losses, 1)
    ]
    plot(records, 6.5, tmp_path / "losses.png", "losses")
    (axes,) = figures[0].axes
    lines = {str(line.get_label()): line for line in axes.lines}
    np.testing.assert_array_equal(lines["training loss"].get_ydata(), losses)
    assert len(lines) == labels == len(axes.get_legend_handles_labels()[0])
    assert lines["validation loss"].get_xdata()[0] == 0
    assert all(tick == round(tick) for tick in axes.get_xticks())
    mean = lines.get("mean over 5 steps")
    if mean is not None:
        assert mean.get_ydata()[-1] == losses[-1]


def test_moving_mean_is_centered_and_exact_at_ends() -> None:
    """The moving mean of a linear sequence is the sequence itself."""
    line = [3.0, 5.0, 7.0, 9.0, 11.0, 13.0]
    assert moving_mean(line, 5) == line
    assert moving_mean([0.0, 3.0, 0.0, 3.0, 6.0], 3) == [0.0, 1.0, 2.0, 3.0, 6.0]
