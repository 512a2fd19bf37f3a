"""The training loop: steps, evaluations, and checkpoints to resume from.

A step is a pure function of the state, its batch number and the run's key. So a run that is killed
and resumed from its last saved state ends with the same bits as an uninterrupted one. A run can be
resumed with more steps or another learning rate, which then apply to the remaining steps.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoints.resume import TensorStore
from jaxllm.errors import ConfigError, NonFiniteError
from jaxllm.runtime import signals
from jaxllm.runtime.multihost import broadcast_from_zero
from jaxllm.runtime.progress import status_bar
from jaxllm.sharding.sharded_model import check_rows
from jaxllm.train.checkpointing import (
    StateLayout,
    StateStore,
    collect_settings,
    differences,
    open_store,
)
from jaxllm.train.data.rows import IGNORED, Data, Rows
from jaxllm.train.partition import ALL_PARAMS, Rules, TrainedParams, combine, partition
from jaxllm.train.settings import TrainPlan
from jaxllm.train.step import Metrics, Setup, TrainState, eval_step, init_state, train_step
from jaxllm.weights.paths import Params

SAVE_SECONDS = 30.0  # at least, between two saved states,
SAVE_FACTOR = 20  # and this many times the duration of the last save
_SPEED_STEPS = 20  # steps over which the speed is averaged
_PREPARE_SALT = 0x5EED  # makes keys that differ from those of steps

Log = Callable[[str], None]
# Maps parameters, the rows of a step `[A, B, T]` and a key to the rows to train on.
PrepareRows = Callable[[Params, Rows, jax.Array], Rows]
# Takes the records so far and the validation loss before the first step.
Report = Callable[[Sequence["StepRecord"], float | None], None]


class StepRecord(NamedTuple):
    """The metrics of a step.

    Attributes:
        step: number of the step, from 1.
        loss: per token, in nats if it is a likelihood.
        weight: divisor of the loss, usually the number of labels.
        norm: global norm of the gradient.
        held_out: validation loss after the step, if it was evaluated.
        also: the objective's further metrics.
    """

    step: int
    loss: float
    weight: float
    norm: float
    held_out: float | None
    also: dict[str, float]


class TrainResult(NamedTuple):
    """The result of a run.

    Attributes:
        params: after step `best` if the plan has patience, else after the last step.
        initial_loss: validation loss before the first step.
    """

    params: Params
    records: list[StepRecord]
    initial_loss: float | None
    best: StepRecord | None


def train(
    params: Params,
    data: Data,
    setup: Setup,
    plan: TrainPlan,
    *,
    rules: Rules = ALL_PARAMS,
    compute_params: Params | None = None,
    extra_inputs: Any = None,
    eval_data: Data | None = None,
    prepare: PrepareRows | None = None,
    directory: Path | None = None,
    report: Report = lambda *_: None,
    checkpoint: Callable[[Params, int], None] = lambda *_: None,
    sample: Callable[[Params], str] | None = None,
    show_progress: bool | None = None,
    log: Log = lambda _: None,
) -> TrainResult:
    """Train parameters on data; the given arrays are not modified.

    Args:
        rules, compute_params: as in `partition.partition`.
        extra_inputs: further arrays for the objective.
        eval_data: validation data.
        prepare: a pure function that changes rows on the host before a step (on-policy samples,
            say).
        directory: where the state is saved; default: nowhere. A run resumes from a state in it; the
            settings in `checkpointing.CHANGEABLE` may differ.
        report: called after each evaluation and each save, and at the end, also after a loss that
            is not finite.
        checkpoint: called with the parameters and the step every `plan.save_steps` steps.
        sample: returns a text generated with the parameters, logged after each evaluation.
        log: takes a line to log.

    Raises:
        ConfigError: if there is nothing to train or no data.
        CheckpointError: if the state cannot be saved.
        NonFiniteError: as soon as a loss or gradient is not finite. The last saved state stays if a
            step from it was finite, so the run can be resumed with another learning rate.
    """
    if not data.tokens:
        raise ConfigError("the data has no labels to learn: all of them are ignored")
    if plan.patience is not None and eval_data is None:
        raise ConfigError("patience needs validation data: give eval_data")
    check_rows(setup.model, data.batch(0).token_BT.shape[0])
    named = prepare if dataclasses.is_dataclass(prepare) else None  # functions have no stable repr
    settings = collect_settings(
        setup, plan, rules=rules, prepare=named, data=data.digest,
        held_out=None if eval_data is None else eval_data.digest,
    )  # fmt: skip
    store = TensorStore()
    if directory is not None:
        store = open_store(setup.model.gather_lazy(params), extra_inputs, settings, directory)
    trained, rest = partition(params, rules, compute_params, setup.model.unsharded_paths)
    states = StateStore(store, StateLayout.from_model(setup.model, rest), settings)
    key, state = jax.random.key(plan.seed), init_state(trained, setup)
    del trained

    def eval_loss(trained: TrainedParams) -> float:
        assert eval_data is not None
        each = [
            eval_step(trained, rest, extra_inputs, eval_data.batch(n), key, setup=setup)
            for n in range(len(eval_data))
        ]
        total, weight = (float(sum(column)) for column in zip(*(m[:2] for m in each), strict=True))
        return total / (weight or 1.0)

    def read_rows(number: int) -> Rows:
        rows = _stack_batches(data, number, plan.gradient_accumulation_steps)
        if prepare is None:
            return rows
        row_key = jax.random.fold_in(jax.random.fold_in(key, number), _PREPARE_SALT)
        return prepare(combine(state.trained, rest), rows, row_key)

    def save_now() -> None:
        states.save(state, {"records": [list(r) for r in records], "before": before})
        saved[0] = len(records)
        report(records, before)

    def describe_progress() -> str:
        done = f"{len(records)} of {plan.steps} steps done"
        if store.directory is None or not saved[0]:
            return done
        where = f"the state after step {saved[0]} is in {store.directory}"
        return f"{done}; {where}: the same command resumes from it"

    with store.lock():
        state, records, before, best = _resume(states, state, plan, log)
        if eval_data is not None and before is None:
            before = eval_loss(state.trained)
            log(f"before training: held-out loss {before:.4f}")
        saved, pace, rows = [len(records)], _Pace(), None
        keeps = store.directory is not None
        bar = status_bar("train", plan.steps, show_progress, len(records))
        with signals.exit_message(describe_progress), bar as noted:
            while len(records) < plan.steps and not _is_out_of_patience(records, plan.patience):
                pace.start_step()
                number, iteration = divmod(len(records), plan.num_iterations)
                rows = read_rows(number) if rows is None or iteration == 0 else rows
                state, metrics = train_step(state, rest, extra_inputs, rows, key, setup=setup)
                record = _make_record(len(records) + 1, metrics)
                pace.end_step(int((rows.label_BT != IGNORED).sum()))
                if not bool(metrics.finite):
                    report(records, before)
                    if saved[0] == len(records):
                        states.restore_previous()
                    raise NonFiniteError(_divergence_message(record, store))
                if saved[0] == len(records):
                    states.drop_previous()
                is_last = record.step == plan.steps
                is_due = is_last or (plan.eval_steps and record.step % plan.eval_steps == 0)
                if eval_data is not None and is_due:
                    record = record._replace(held_out=eval_loss(state.trained))
                records.append(record)
                noted(record.step, _format_record(record).partition(": ")[2] + pace.speed_text)
                if is_due:
                    log(f"{_format_record(record)}{pace.speed_text}")
                    report(records, before)
                    if plan.patience is not None and _best_record(records) is record:
                        best = {path: jnp.copy(x) for path, x in state.trained.items()}
                        states.save_best(best)
                    if sample is not None:
                        log(sample(combine(state.trained, rest)))
                if plan.save_steps and record.step % plan.save_steps == 0:
                    checkpoint(combine(state.trained, rest), record.step)
                is_whole = record.step % plan.num_iterations == 0  # else its rows would be lost
                can_save = keeps and is_whole
                if can_save and broadcast_from_zero(lambda: "now" if pace.is_save_due() else ""):
                    pace.time_save(save_now)
            if keeps and saved[0] < len(records):
                save_now()
        report(records, before)
    chosen = _best_record(records) if plan.patience is not None else None
    if chosen is not None and best is not None:
        state = state.replace(trained=best)
    return TrainResult(combine(state.trained, rest), records, before, chosen)


def _resume(
    states: StateStore, state: TrainState, plan: TrainPlan, log: Log
) -> tuple[TrainState, list[StepRecord], float | None, TrainedParams | None]:
    """Return the saved state, the records so far, the initial validation loss, and the best arrays;
    if nothing is saved, the given state.

    Raises CheckpointError for the state of another run, ConfigError if it has more steps than the
    plan.
    """
    saved = states.load(state)
    if saved is None:
        states.check_unused()
        return state, [], None, None
    state, facts = saved
    records = [StepRecord(*row) for row in facts["records"]]
    if len(records) > plan.steps:
        raise ConfigError(
            f"steps must be at least {len(records)}, got {plan.steps}: the state in"
            f" {states.store.directory} has that many. Ask for more, or remove it."
        )
    changes = differences(facts["settings"], states.settings, changeable=True)
    changed = "".join(f"; {x}" for x in changes)
    log(f"resuming after step {len(records)} of {plan.steps}{changed}")
    return state, records, facts["before"], states.load_best(state)


def _stack_batches(data: Data, step: int, num_batches: int) -> Rows:
    """Return the batches of a step, `[A, B, T]`."""
    batches = [data.batch(step * num_batches + n) for n in range(num_batches)]
    rows: Rows = jax.tree.map(lambda *x: np.stack(x), *batches)
    return rows


def _make_record(step: int, metrics: Metrics) -> StepRecord:
    m = jax.device_get(metrics)
    also = {name: float(value) for name, value in m.extras.items()}
    return StepRecord(step, float(m.loss), float(m.weight), float(m.grad_norm), None, also)


def _best_record(records: list[StepRecord]) -> StepRecord | None:
    """Return the record with the lowest validation loss, the first of equal ones."""
    measured = [r for r in records if r.held_out is not None]
    return min(measured, key=lambda r: r.held_out or 0.0, default=None)


def _is_out_of_patience(records: list[StepRecord], patience: int | None) -> bool:
    """Return whether `patience` evaluations have passed since the best one."""
    best = _best_record(records)
    if patience is None or best is None:
        return False
    after = [r for r in records if r.held_out is not None and r.step > best.step]
    return len(after) >= patience


def _format_record(record: StepRecord) -> str:
    also = "".join(f", {name} {value:.4f}" for name, value in record.also.items())
    held = "" if record.held_out is None else f", held-out {record.held_out:.4f}"
    return f"step {record.step}: loss {record.loss:.4f}{held}{also}"


def _divergence_message(record: StepRecord, store: TensorStore) -> str:
    what = "loss" if not math.isfinite(record.loss) else "gradient"
    remedy = "Try a lower lr: the run then starts again, since no earlier state was saved."
    if broadcast_from_zero(lambda: "there" if store.part_paths() else ""):
        remedy = (
            f"An earlier state is in {store.directory}: the same run with a lower lr continues"
            " from there."
        )
    return (
        f"the {what} of step {record.step} is not finite: got loss {record.loss:g}; the step was"
        f" not applied. {remedy}"
    )


class _Pace:
    """The training speed, and when to save the state again."""

    def __init__(self) -> None:
        self._step_start = 0.0
        self._steps: list[tuple[float, int]] | None = None  # seconds and labels of each
        self._last_save, self._save_interval = time.monotonic(), SAVE_SECONDS

    def start_step(self) -> None:
        self._step_start = time.monotonic()

    def end_step(self, labels: int) -> None:
        step = time.monotonic() - self._step_start, labels
        self._steps = [] if self._steps is None else [*self._steps[-_SPEED_STEPS:], step]

    @property
    def speed_text(self) -> str:
        """The speed over the last steps, without the first, which compiles."""
        if not self._steps:
            return ""
        seconds, labels = (sum(column) for column in zip(*self._steps, strict=True))
        return f", {labels / seconds if seconds else 0.0:,.0f} tokens/s"

    def is_save_due(self) -> bool:
        return time.monotonic() - self._last_save > self._save_interval

    def time_save(self, save: Callable[[], None]) -> None:
        """Save the state, and schedule the next save."""
        start = time.monotonic()
        save()
        self._last_save = time.monotonic()
        self._save_interval = max(SAVE_SECONDS, SAVE_FACTOR * (self._last_save - start))
