"""The loop: steps, what is measured on the way, and an end that loses nothing.

A step is a pure function of the state, the number of its batch and the run's key. So a run that is
killed and goes on from its last kept state ends with the same bits as one that was not. A run that
continues with more steps or another rate is the steps done, then steps of the new settings.
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

KEEP_SECONDS = 30.0  # between two states that are kept,
KEEP_SHARE = 20  # and so many times what keeping the last one took
_SPEED = 20  # steps over which the speed is taken
MOST_STEPS = (1 << 31) - 1  # steps are counted in int32
_PREPARING = 0x5EED  # apart from the keys of steps

Say = Callable[[str], None]
# Told the parameters, the rows of a step `[A, B, T]` and its key: the rows that it is to run.
Prepare = Callable[[Params, Rows, jax.Array], Rows]
# Takes the records so far and the held-out loss before the first step.
Report = Callable[[Sequence["Record"], float | None], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How long, and what is looked at on the way.

    steps: of the optimiser. gradient_accumulation_steps: batches a step. seed: of the run's key.
    eval_steps: steps between two measurements of the held-out loss, None for one at the end.
    patience: so many of these without a better one end the run, whose result is then the best; None
    for never. save_steps: steps between two checkpoints, None for none.

    Raises ConfigError for what is no whole number from 1 up (of the seed: from 0).
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
    """What a step measured. step: from 1. loss: a token, in nats where it is a likelihood. weight:
    what it was divided by, as a rule tokens. norm: of the gradient. held_out: the loss of what is
    not trained on, after the step, where it was measured. also: what the objective shows beside.
    """

    step: int
    loss: float
    weight: float
    norm: float
    held_out: float | None
    also: dict[str, float]


class Run(NamedTuple):
    """What came of it. before: the held-out loss before the first step. params: those after step
    `best` where patience was asked for, else those of the last step.
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
    """Train parameters on data; those that are given stay as they are.

    rules, like: what is trained, and the formats that it runs in, as `trained.split` has them.
    given: for the objective. held_out: what the loss is measured on as it stands. prepare: changes
    rows on the host before a step, as a pure function (samples of the model itself, say).
    directory: where the state is kept, by default nowhere; a run continues from a state that is
    there, also with other values of the settings in `keeping.FREE`. report: is called after each
    measurement, whenever the state is kept, and at the end, also if that is an error. checkpoint:
    is called with the parameters and the step every `plan.save_steps` steps. sample: a text of the
    parameters, said after each measurement. say: takes a line for people.

    Raises ConfigError where there is nothing to train or to train on, CheckpointError where the
    state cannot be kept, NonFiniteError as soon as a loss or a gradient is not finite. The last
    state that was kept stays then, if a step from it was finite: another rate can continue there.
    """
    if not data.tokens:
        raise ConfigError("there is nothing to learn: no label of the data counts")
    if plan.patience is not None and held_out is None:
        raise ConfigError("patience needs held-out data, whose loss it waits for")
    if isinstance(setup.model, Placed):
        setup.model.check_rows(data.batch(0).token_BT.shape[0])
    named = prepare if dataclasses.is_dataclass(prepare) else None  # a function has no value
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
        return f"{done}; {where}, from which the same goes on"

    with journal.kept():
        state, records, before, best = _continued(journal, state, form, plan, settings, say)
        if held_out is not None and before is None:
            before = loss(state.trained)
            say(f"before: held-out loss {before:.4f}")
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
    """Return the state to begin with, the records so far, the held-out loss before all, and what
    was best: those that were kept, if there are any. state: before the first step.

    Raises CheckpointError for the state of another run, ConfigError if it is after more steps than
    are asked for.
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
            f" {journal.directory} is after that many. Ask for more, or remove it."
        )
    changed = "".join(f"; {x}" for x in differences(facts["settings"], settings, free=True))
    say(f"going on after step {len(records)} of {plan.steps}{changed}")
    return state, records, facts["before"], kept_best(journal, state, form)


def _rows(data: Data, step: int, accumulate: int) -> Rows:
    """The batches of a step, `[A, B, T]`."""
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
    """The record with the least held-out loss, of equal ones the first."""
    measured = [r for r in records if r.held_out is not None]
    return min(measured, key=lambda r: r.held_out or 0.0, default=None)


def _has_waited(records: list[Record], patience: int | None) -> bool:
    """Whether so many measurements have not been better than the best."""
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
    remedy = "Try a lower lr: the run then starts again, since no earlier state was kept."
    if told(lambda: "there" if journal.parts() else ""):
        remedy = (
            f"An earlier state is in {journal.directory}: the same run with a lower lr continues"
            " from there."
        )
    return (
        f"the {what} of step {record.step} is not finite: got {record.loss:g}, and the step was not"
        f" taken. {remedy}"
    )


class _Pace:
    """What clocks say: how fast it goes, and when a state is to be kept again."""

    def __init__(self) -> None:
        self._began = 0.0
        self._steps: list[tuple[float, float]] = []  # seconds and tokens of each
        self._saved, self._pause = time.monotonic(), KEEP_SECONDS

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def end(self, record: Record) -> None:
        """It has ended."""
        taken = time.monotonic() - self._began, record.weight
        self._steps = [*self._steps[-_SPEED:], taken] if record.step > 1 else []

    @property
    def speed(self) -> float:
        """Tokens that counted a second over the last steps, without the first, which compiles."""
        seconds, weight = (sum(column) for column in zip((0.0, 0.0), *self._steps, strict=True))
        return weight / seconds if seconds else 0.0

    def note(self, record: Record) -> str:
        """What a bar says of a step that has just ended."""
        return f"{_in_words(record).partition(': ')[2]}{self.words}"

    @property
    def words(self) -> str:
        """The speed, once there is one."""
        return f", {self.speed:,.0f} tokens/s" if self._steps else ""

    def is_time(self) -> bool:
        """Whether a state should be kept now."""
        return time.monotonic() - self._saved > self._pause

    def time(self, save: Callable[[], None]) -> None:
        """Keep a state, and note when the next is to be kept."""
        began = time.monotonic()
        save()
        self._saved = time.monotonic()
        self._pause = max(KEEP_SECONDS, KEEP_SHARE * (self._saved - began))
