"""Apply a recipe to a model step by step; an interrupted run resumes where it stopped."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxllm import __version__, models
from jaxllm.cache.files import fingerprint
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.compress.calibration import Calibration
from jaxllm.compress.recipe import (
    ModelState,
    Recipe,
    RecipeStep,
    StepContext,
    check_recipe,
    check_repeats,
    check_step,
    parse_lines,
    shapes_by_path,
)
from jaxllm.compress.registry import STEPS
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.runtime import signals
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import Precision, match_precision
from jaxllm.weights.types import sparse

Log = Callable[[str], None]
_PARAMS_KEY = "whole"  # journal key of all parameters after a step


def _discard_log(_: str) -> None:
    """Discard a message."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """A finished step.

    state: its result; None if an earlier run finished this step and a later one. seconds: its
    duration; None if unknown. journal: the step's own, where callers may save more about it under
    keys that begin with "row".
    """

    line: RecipeStep
    state: ModelState | None
    seconds: float | None
    journal: TensorStore


def compress(
    lm: LM,
    steps: Sequence[str],
    *,
    calibration: Calibration | None = None,
    journal: TensorStore | None = None,
    allow_repeat: bool = False,
    show_progress: bool | None = None,
    log: Log = _discard_log,
) -> LM:
    """Return a new model to which all steps of a recipe were applied; `lm` does not change.

    Args:
        steps: Lines of a recipe, such as `quantize: gptq int4-g64`.
        calibration: Data for the calibrated steps.
        journal: Saves finished work (see `make_journal`); by default nothing is saved.
        allow_repeat: Allow a step that was already applied to this model.
        log: Called with each log line.

    Raises:
        ConfigError: Before any work, if the recipe is invalid or does not fit this model.
        JaxllmError: Whatever the steps raise.
    """
    recipe = parse_lines(_check_lines(steps), STEPS)
    check_applicable(lm, recipe, has_calibration=calibration is not None, allow_repeat=allow_repeat)
    subject = initial_state(lm)
    own = journal or TensorStore()
    for stage in run_steps(lm, recipe, calibration, own, show_progress=show_progress, log=log):
        subject = stage.state or subject
    return build_model(lm, recipe, subject)


def prune_to_format(lm: LM, format_name: str) -> LM:
    """Return the model in the sparse format `format_name`, with half of each layer's weights
    pruned.

    This is for timing only: it prunes by magnitude, which ruins the model, but the speed does not
    depend on which weights are left. The embedding table and the head are stored in the format's
    number type, but not pruned. Raises ConfigError if the format is not sparse.
    """
    if (wanted := sparse.parse(format_name)) is None:
        raise ConfigError(
            f"sparse format unknown: got {format_name!r:.40}, expected one of"
            f" {', '.join(sparse.FORMATS)}"
        )
    half = "2:4" if wanted.pattern == sparse.TWO_OF_FOUR else "50%"
    return compress(
        lm, [f"prune: magnitude {half}", f"quantize: rtn {format_name}"], allow_repeat=True
    )


def check_applicable(lm: LM, recipe: Recipe, *, has_calibration: bool, allow_repeat: bool) -> None:
    """Raise ConfigError, before any work, if a recipe cannot or should not be applied."""
    check_recipe(recipe, lm.config, has_calibration=has_calibration)
    if not allow_repeat:
        check_repeats(recipe, lm.recipe)


def initial_state(lm: LM) -> ModelState:
    """Return the input of the first step."""
    return ModelState(lm.config, lm.params, lm.model.precision)


def build_model(lm: LM, recipe: Recipe, state: ModelState) -> LM:
    """Return `lm` with the result of `recipe`; its precision keeps every weight's format."""
    precision = match_precision(state.params, state.precision)
    return dataclasses.replace(
        lm,
        config=state.config,
        model=models.build(state.config, precision),
        params=state.params,
        recipe=(*lm.recipe, *map(str, recipe)),
    )


def run_steps(
    lm: LM,
    recipe: Recipe,
    calibration: Calibration | None,
    journal: TensorStore,
    *,
    show_progress: bool | None = None,
    log: Log = _discard_log,
) -> Iterator[StepResult]:
    """Run the steps, and yield each as it finishes.

    A resumed run starts after the last step whose result is in `journal`; saved work is used only
    if all lines up to its step are the same. After a calibrated step the journal holds all
    parameters; the layers saved during that step and the earlier results are deleted.
    """
    lines = [str(line) for line in recipe]
    journals = [journal.child(f"{n + 1}", *lines[: n + 1]) for n in range(len(recipe))]
    begin, subject, seconds = _find_resume_point(journals)
    done = 0

    def describe_progress() -> str:
        told = f"{done} of {len(recipe)} steps done"
        if not journal.part_paths():
            return told
        return f"{told}; the same command resumes from {journal.directory}"

    with signals.exit_message(describe_progress):
        for number in range(begin):
            last = number == begin - 1
            done = number + 1
            made, took = (subject, seconds) if last else (None, None)
            yield StepResult(recipe[number], made, took, journals[number])
        subject = subject or initial_state(lm)
        for number in range(begin, len(recipe)):
            line, own = recipe[number], journals[number]
            subject, seconds = _run_step(line, subject, calibration, own, show_progress, log)
            if line.step.needs_calibration:
                _save_result(own, subject, seconds)
                for older in journals[:number]:
                    older.clear("row")
            done = number + 1
            yield StepResult(line, subject, seconds, own)


def make_journal(
    lm: LM, calibration: Calibration | None, directory: Path, log: Log = _discard_log
) -> TensorStore:
    """Return a journal for this model and calibration. Reads all weights once."""
    whose = [
        __version__,
        fingerprint(lm.params),
        repr(lm.config),
        repr(lm.model.precision),
        calibration.digest if calibration else "",
    ]
    return TensorStore(directory, hashlib.sha256("\n".join(whose).encode()).hexdigest(), log=log)


def _run_step(
    line: RecipeStep,
    state: ModelState,
    calibration: Calibration | None,
    journal: TensorStore,
    show_progress: bool | None,
    log: Log,
) -> tuple[ModelState, float]:
    check_step(line, shapes_by_path(state.params))  # earlier steps may have removed its matrices
    start = time.perf_counter()
    work = StepContext(calibration, journal, show_progress, log)
    made = line.step.run(state, line.argument, line.options, work)
    jax.block_until_ready(made.params)
    _check_shapes(made, str(line))
    return made, time.perf_counter() - start


def _check_shapes(state: ModelState, step: str) -> None:
    """Raise ConfigError if shapes do not match the configuration: the result would not load."""
    wanted = shapes_by_path(models.param_shapes(models.build(state.config)))
    found = shapes_by_path(state.params)
    for path in wanted.keys() | found.keys():
        if wanted.get(path) != found.get(path):
            raise ConfigError(
                f"{step}: result has the wrong shape at {path}: got {found.get(path)}, expected"
                f" {wanted.get(path)} by its configuration"
            )


def _save_result(journal: TensorStore, state: ModelState, seconds: float) -> None:
    """Save a step's result, then delete the layers that it saved on the way."""
    facts = {
        "config": state.config.to_dict(),
        "precision": dataclasses.asdict(state.precision),
        "seconds": seconds,
    }
    journal.put(_PARAMS_KEY, state.params, facts)
    journal.clear(_PARAMS_KEY, "row")


def _find_resume_point(journals: Sequence[TensorStore]) -> tuple[int, ModelState | None, float]:
    """Return the number of finished steps, the last one's result, and its seconds."""
    for number in range(len(journals), 0, -1):
        if (found := journals[number - 1].get_with_facts(_PARAMS_KEY)) is not None:
            params, facts = found
            return number, _load_state(params, facts), float(facts["seconds"])
    return 0, None, 0.0


def _load_state(params: Params, facts: dict[str, Any]) -> ModelState:
    config = models.config_from_dict(facts["config"])
    return ModelState(config, params, Precision.from_dict(facts["precision"]))


def _check_lines(steps: Sequence[str]) -> list[str]:
    """Return the lines as a list. Raises ConfigError for anything but strings."""
    if isinstance(steps, str) or not all(isinstance(line, str) for line in steps):
        raise ConfigError(f"recipe has the wrong type: got {steps!r:.60}, expected a list of lines")
    return list(steps)
