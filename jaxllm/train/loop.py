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

from jaxllm import process
from jaxllm.compress.journal import Journal
from jaxllm.distributed import told
from jaxllm.errors import ConfigError, NonFiniteError
from jaxllm.progress import noted_bar
from jaxllm.train.data.rows import Data, Rows
from jaxllm.train.keeping import (
    check_unused,
    confirm,
    differences,
    fall_back,
    journal_of,
    keep,
    keep_best,
    kept,
    kept_best,
    settings_of,
)
from jaxllm.train.spread import Form
from jaxllm.train.step import Metrics, Setup, TrainState, measure, start, train_step
from jaxllm.train.trained import ALL, Rules, Trained, join, split
from jaxllm.weights.paths import Params, Placed, later, names_of
from jaxllm.whole import check_seed, whole

KEEP_SECONDS = 30.0  # at least, between two saved states,
KEEP_SHARE = 20  # and this many times the duration of the last save
_SPEED = 20  # steps over which the speed is averaged
MOST_STEPS = (1 << 31) - 1  # steps are counted in int32
_PREPARING = 0x5EED  # makes keys that differ from those of steps

Say = Callable[[str], None]
# Maps parameters, the rows of a step `[A, B, T]` and a key to the rows to train on.
Prepare = Callable[[Params, Rows, jax.Array], Rows]
# Takes the records so far and the validation loss before the first step.
Report = Callable[[Sequence["Record"], float | None], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of a run, and how often it is evaluated and saved.

    Attributes:
      steps: optimizer steps.
      gradient_accumulation_steps: batches per step.
      seed: of the run's key.
      eval_steps: steps between evaluations; None for one at the end.
      patience: evaluations without a better one after which the run ends and returns the best; None
        for no early stopping.
      save_steps: steps between checkpoints; None for none.

    Raises ConfigError for values that are not integers of at least 1 (the seed: at least 0).
    """

    steps: int
    gradient_accumulation_steps: int = 1
    seed: int = 0
    eval_steps: int | None = None
    patience: int | None = None
    save_steps: int | None = None

    def __post_init__(self) -> None:
        required = ("steps", "gradient_accumulation_steps")
        for name in (*required, "eval_steps", "patience", "save_steps"):
            value = getattr(self, name)
            if value is not None or name in required:
                object.__setattr__(self, name, whole(name, value, 1, MOST_STEPS, ConfigError))
        object.__setattr__(self, "seed", check_seed(self.seed))


class Record(NamedTuple):
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


class Run(NamedTuple):
    """The result of a run.

    Attributes:
      params: after step `best` if the plan has patience, else after the last step.
      before: validation loss before the first step.
    """

    params: Params
    records: list[Record]
    before: float | None
    best: Record | None


def train(
    params: Params,
    data: Data,
    setup: Setup,
    plan: Plan,
    *,
    rules: Rules = ALL,
    like: Params | None = None,
    given: Any = None,
    held_out: Data | None = None,
    prepare: Prepare | None = None,
    directory: Path | None = None,
    report: Report = lambda *_: None,
    checkpoint: Callable[[Params, int], None] = lambda *_: None,
    sample: Callable[[Params], str] | None = None,
    show_progress: bool | None = None,
    say: Say = lambda _: None,
) -> Run:
    """Train parameters on data; the given arrays are not modified.

    Args:
      rules, like: which parameters are trained and their compute dtype, as in `trained.split`.
      given: further arrays for the objective.
      held_out: validation data.
      prepare: a pure function that changes rows on the host before a step (on-policy samples, say).
      directory: where the state is saved; default: nowhere. A run resumes from a state in it; the
        settings in `keeping.FREE` may differ.
      report: called after each evaluation and each save, and at the end, also after a loss that is
        not finite.
      checkpoint: called with the parameters and the step every `plan.save_steps` steps.
      sample: returns a text generated with the parameters, logged after each evaluation.
      say: takes a line to log.

    Raises:
      ConfigError: if there is nothing to train or no data.
      CheckpointError: if the state cannot be saved.
      NonFiniteError: as soon as a loss or gradient is not finite. The last saved state stays if a
        step from it was finite, so the run can be resumed with another learning rate.
    """
    if not data.tokens:
        raise ConfigError("the data has no labels to learn: all of them are ignored")
    if plan.patience is not None and held_out is None:
        raise ConfigError("patience needs validation data (held_out)")
    if isinstance(setup.model, Placed):
        setup.model.check_rows(data.batch(0).token_BT.shape[0])
    named = prepare if dataclasses.is_dataclass(prepare) else None  # functions have no stable repr
    settings = settings_of(
        setup, plan, rules=rules, prepare=named, data=data.digest,
        held_out=None if held_out is None else held_out.digest,
    )  # fmt: skip
    journal = Journal()
    if directory is not None:
        journal = journal_of(later(setup.model, params), given, settings, directory)
    trained, rest = split(params, rules, like, names_of(setup.model))
    form = Form.of(setup.model, rest)
    key, state = jax.random.key(plan.seed), start(trained, setup)
    del trained

    def loss(trained: Trained) -> float:
        assert held_out is not None
        each = [
            measure(trained, rest, given, held_out.batch(n), key, setup=setup)
            for n in range(len(held_out))
        ]
        total, weight = (float(sum(column)) for column in zip(*(m[:2] for m in each), strict=True))
        return total / (weight or 1.0)

    def save() -> None:
        facts = {"records": [list(r) for r in records], "before": before, "settings": settings}
        keep(journal, state, facts, form)
        saved[0] = len(records)
        report(records, before)

    def so_far() -> str:
        done = f"{len(records)} of {plan.steps} steps done"
        if journal.directory is None or not saved[0]:
            return done
        where = f"the state after step {saved[0]} is in {journal.directory}"
        return f"{done}; {where}: the same command resumes from it"

    with journal.kept():
        state, records, before, best = _continued(journal, state, form, plan, settings, say)
        if held_out is not None and before is None:
            before = loss(state.trained)
            say(f"before training: held-out loss {before:.4f}")
        saved, pace = [len(records)], _Pace()
        keeps = journal.directory is not None
        bar = noted_bar("train", plan.steps, show_progress, len(records))
        with process.saying(so_far), bar as noted:
            while len(records) < plan.steps and not _has_waited(records, plan.patience):
                pace.begin()
                rows = _rows(data, len(records), plan.gradient_accumulation_steps)
                if prepare is not None:
                    own = jax.random.fold_in(jax.random.fold_in(key, len(records)), _PREPARING)
                    rows = prepare(join(state.trained, rest), rows, own)
                state, metrics = train_step(state, rest, given, rows, key, setup=setup)
                record = _record(len(records) + 1, metrics)
                pace.end(record)
                if not bool(metrics.finite):
                    report(records, before)
                    if saved[0] == len(records):
                        fall_back(journal)
                    raise NonFiniteError(_diverged(record, journal))
                if saved[0] == len(records):
                    confirm(journal)
                if held_out is not None and _is_due(record.step, plan):
                    record = record._replace(held_out=loss(state.trained))
                records.append(record)
                noted(record.step, pace.note(record))
                if record.held_out is not None:
                    say(f"{_in_words(record)}{pace.words}")
                    report(records, before)
                    if plan.patience is not None and _best(records) is record:
                        best = {path: jnp.copy(x) for path, x in state.trained.items()}
                        keep_best(journal, best, form)
                    if sample is not None:
                        say(sample(join(state.trained, rest)))
                if plan.save_steps and record.step % plan.save_steps == 0:
                    checkpoint(join(state.trained, rest), record.step)
                if keeps and told(lambda: "now" if pace.is_time() else ""):
                    pace.time(save)
            if keeps and saved[0] < len(records):
                save()
        report(records, before)
    chosen = _best(records) if plan.patience is not None else None
    if chosen is not None and best is not None:
        state = state.replace(trained=best)
    return Run(join(state.trained, rest), records, before, chosen)


def _continued(
    journal: Journal,
    state: TrainState,
    form: Form,
    plan: Plan,
    settings: dict[str, str],
    say: Say,
) -> tuple[TrainState, list[Record], float | None, Trained | None]:
    """Return the saved state, the records so far, the initial validation loss, and the best arrays;
    if nothing is saved, the given state.

    Raises CheckpointError for the state of another run, ConfigError if it has more steps than the
    plan.
    """
    found = kept(journal, state, form)
    if found is None:
        check_unused(journal, settings)
        return state, [], None, None
    state, facts = found
    records = [Record(*row) for row in facts["records"]]
    if len(records) > plan.steps:
        raise ConfigError(
            f"steps must be at least {len(records)}, got {plan.steps}: the state in"
            f" {journal.directory} has that many. Ask for more, or remove it."
        )
    changed = "".join(f"; {x}" for x in differences(facts["settings"], settings, free=True))
    say(f"resuming after step {len(records)} of {plan.steps}{changed}")
    return state, records, facts["before"], kept_best(journal, state, form)


def _rows(data: Data, step: int, accumulate: int) -> Rows:
    """Return the batches of a step, `[A, B, T]`."""
    batches = [data.batch(step * accumulate + n) for n in range(accumulate)]
    rows: Rows = jax.tree.map(lambda *x: np.stack(x), *batches)
    return rows


def _record(step: int, metrics: Metrics) -> Record:
    m = jax.device_get(metrics)
    also = {name: float(value) for name, value in m.also.items()}
    return Record(step, float(m.loss), float(m.weight), float(m.norm), None, also)


def _is_due(step: int, plan: Plan) -> bool:
    every = plan.eval_steps
    return step == plan.steps or (every is not None and step % every == 0)


def _best(records: list[Record]) -> Record | None:
    """Return the record with the lowest validation loss, the first of equal ones."""
    measured = [r for r in records if r.held_out is not None]
    return min(measured, key=lambda r: r.held_out or 0.0, default=None)


def _has_waited(records: list[Record], patience: int | None) -> bool:
    """Return whether `patience` evaluations have passed since the best one."""
    best = _best(records)
    if patience is None or best is None:
        return False
    after = [r for r in records if r.held_out is not None and r.step > best.step]
    return len(after) >= patience


def _in_words(record: Record) -> str:
    also = "".join(f", {name} {value:.4f}" for name, value in record.also.items())
    held = "" if record.held_out is None else f", held-out {record.held_out:.4f}"
    return f"step {record.step}: loss {record.loss:.4f}{held}{also}"


def _diverged(record: Record, journal: Journal) -> str:
    what = "loss" if not math.isfinite(record.loss) else "gradient"
    remedy = "Try a lower lr: the run then starts again, since no earlier state was saved."
    if told(lambda: "there" if journal.parts() else ""):
        remedy = (
            f"An earlier state is in {journal.directory}: the same run with a lower lr continues"
            " from there."
        )
    return (
        f"the {what} of step {record.step} is not finite: got loss {record.loss:g}; the step was"
        f" not applied. {remedy}"
    )


class _Pace:
    """Timing: the training speed, and when to save the state again."""

    def __init__(self) -> None:
        self._began = 0.0
        self._steps: list[tuple[float, float]] = []  # seconds and labels of each
        self._saved, self._pause = time.monotonic(), KEEP_SECONDS

    def begin(self) -> None:
        """Start timing a step."""
        self._began = time.monotonic()

    def end(self, record: Record) -> None:
        """Stop timing a step."""
        taken = time.monotonic() - self._began, record.weight
        self._steps = [*self._steps[-_SPEED:], taken] if record.step > 1 else []

    @property
    def speed(self) -> float:
        """Labels per second over the last steps, without the first, which compiles."""
        seconds, weight = (sum(column) for column in zip((0.0, 0.0), *self._steps, strict=True))
        return weight / seconds if seconds else 0.0

    def note(self, record: Record) -> str:
        """Return the text of the progress bar after a step."""
        return f"{_in_words(record).partition(': ')[2]}{self.words}"

    @property
    def words(self) -> str:
        """The speed as text, if it is known."""
        return f", {self.speed:,.0f} tokens/s" if self._steps else ""

    def is_time(self) -> bool:
        """Return whether the state should be saved now."""
        return time.monotonic() - self._saved > self._pause

    def time(self, save: Callable[[], None]) -> None:
        """Save the state, and schedule the next save."""
        began = time.monotonic()
        save()
        self._saved = time.monotonic()
        self._pause = max(KEEP_SECONDS, KEEP_SHARE * (self._saved - began))
