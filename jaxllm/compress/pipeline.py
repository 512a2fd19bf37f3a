"""Apply a recipe to a model step by step; an interrupted run resumes where it stopped."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
from jaxllm.compress.registry import find_steps
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.runtime import signals
from jaxllm.weights.precision import Precision, match_precision

Log = Callable[[str], None]
_PARAMS_KEY = "whole"  # store key of all parameters after a step


@dataclasses.dataclass(frozen=True)
class StepResult:
    """A finished step.

    state: its result; None if an earlier run finished this step and a later one. seconds: its
    duration; None if unknown. store: the step's own, where callers may save more about it under
    keys that begin with "row".
    """

    line: RecipeStep
    state: ModelState | None
    seconds: float | None
    store: TensorStore


def compress(
    lm: LM,
    steps: Sequence[str],
    *,
    calibration: Calibration | None = None,
    store: TensorStore | None = None,
    allow_repeat: bool = False,
    show_progress: bool | None = None,
    log: Log = lambda _: None,
) -> LM:
    """Return a new model to which all steps of a recipe were applied; `lm` does not change.

    Args:
        steps: Lines of a recipe, such as `quantize: gptq int4-g64`.
        calibration: Data for the calibrated steps.
        store: Saves finished work (see `make_store`); by default nothing is saved.
        allow_repeat: Allow a step that was already applied to this model.
        log: Called with each log line.

    Raises:
        ConfigError: Before any work, if the recipe is invalid or does not fit this model.
        JaxllmError: Whatever the steps raise.
    """
    if isinstance(steps, str) or not all(isinstance(line, str) for line in steps):
        raise ConfigError(f"recipe has the wrong type: got {steps!r:.60}, expected a list of lines")
    recipe = parse_lines(steps, find_steps())
    check_applicable(lm, recipe, has_calibration=calibration is not None, allow_repeat=allow_repeat)
    state = initial_state(lm)
    store = store or TensorStore()
    for result in run_steps(lm, recipe, calibration, store, show_progress=show_progress, log=log):
        state = result.state or state
    return build_model(lm, recipe, state)


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
    store: TensorStore,
    *,
    show_progress: bool | None = None,
    log: Log = lambda _: None,
) -> Iterator[StepResult]:
    """Run the steps, and yield each as it finishes.

    A resumed run starts after the last step whose result is in `store`; saved work is used only
    if all lines up to its step are the same. After a calibrated step the store holds all
    parameters; the layers saved during that step and the earlier results are deleted.
    """
    lines = [str(line) for line in recipe]
    stores = [store.child(f"{n + 1}", *lines[: n + 1]) for n in range(len(recipe))]
    begin, subject, seconds = _find_resume_point(stores)
    done = 0

    def describe_progress() -> str:
        text = f"{done} of {len(recipe)} steps done"
        if not store.part_paths():
            return text
        return f"{text}; the same command resumes from {store.directory}"

    with signals.exit_message(describe_progress):
        for number in range(begin):
            last = number == begin - 1
            done = number + 1
            state, duration = (subject, seconds) if last else (None, None)
            yield StepResult(recipe[number], state, duration, stores[number])
        subject = subject or initial_state(lm)
        for number in range(begin, len(recipe)):
            line, parts = recipe[number], stores[number]
            subject, seconds = _run_step(line, subject, calibration, parts, show_progress, log)
            if line.step.needs_calibration:
                _save_result(parts, subject, seconds)
                for older in stores[:number]:
                    older.clear("row")
            done = number + 1
            yield StepResult(line, subject, seconds, parts)


def make_store(
    lm: LM, calibration: Calibration | None, directory: Path, log: Log = lambda _: None
) -> TensorStore:
    """Return a store for this model and calibration. Reads all weights once."""
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
    store: TensorStore,
    show_progress: bool | None,
    log: Log,
) -> tuple[ModelState, float]:
    check_step(line, shapes_by_path(state.params))  # earlier steps may have removed its matrices
    start = time.perf_counter()
    result = line.step.run(
        StepContext(state, line.argument, line.options, calibration, store, show_progress, log)
    )
    jax.block_until_ready(result.params)
    _check_shapes(result, str(line))
    return result, time.perf_counter() - start


def _check_shapes(state: ModelState, step: str) -> None:
    """Raise ConfigError if shapes do not match the configuration: the result would not load."""
    wanted = shapes_by_path(models.param_shapes(models.build(state.config)))
    shapes = shapes_by_path(state.params)
    for path in wanted.keys() | shapes.keys():
        if wanted.get(path) != shapes.get(path):
            raise ConfigError(
                f"{step}: result has the wrong shape at {path}: got {shapes.get(path)}, expected"
                f" {wanted.get(path)} by its configuration"
            )


def _save_result(store: TensorStore, state: ModelState, seconds: float) -> None:
    """Save a step's result, then delete the layers that it saved on the way."""
    facts = {
        "config": state.config.to_dict(),
        "precision": dataclasses.asdict(state.precision),
        "seconds": seconds,
    }
    store.put(_PARAMS_KEY, state.params, facts)
    store.clear(_PARAMS_KEY, "row")


def _find_resume_point(stores: Sequence[TensorStore]) -> tuple[int, ModelState | None, float]:
    """Return the number of finished steps, the last one's result, and its seconds."""
    for number in range(len(stores), 0, -1):
        if (part := stores[number - 1].get_with_facts(_PARAMS_KEY)) is not None:
            params, facts = part
            config = models.config_from_dict(facts["config"])
            state = ModelState(config, params, Precision.from_dict(facts["precision"]))
            return number, state, float(facts["seconds"])
    return 0, None, 0.0
