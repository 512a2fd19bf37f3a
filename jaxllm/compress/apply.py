"""Apply a recipe to a model step by step; an interrupted run resumes where it stopped."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxllm import __version__, models, process
from jaxllm.api import LM
from jaxllm.cache.files import fingerprint
from jaxllm.compress.data.calibration import Calibration
from jaxllm.compress.journal import Journal
from jaxllm.compress.recipe import (
    Line,
    Recipe,
    Subject,
    Work,
    check_again,
    check_line,
    check_recipe,
    parse_lines,
    shapes_of,
)
from jaxllm.compress.steps import STEPS
from jaxllm.errors import ConfigError
from jaxllm.weights.leaves import sparse
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import Precision, exactly

Say = Callable[[str], None]
_WHOLE = "whole"  # journal key of all parameters after a step


def _silent(_: str) -> None:
    """Discard a message."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A finished step.

    subject: its result; None if an earlier run finished this step and a later one. seconds: its
    duration; None if unknown. journal: the step's own, where callers may save more about it under
    keys that begin with "row".
    """

    line: Line
    subject: Subject | None
    seconds: float | None
    journal: Journal


def compress(
    lm: LM,
    steps: Sequence[str],
    *,
    calibration: Calibration | None = None,
    journal: Journal | None = None,
    again: bool = False,
    show_progress: bool | None = None,
    say: Say = _silent,
) -> LM:
    """Return a new model to which all steps of a recipe were applied; `lm` does not change.

    Args:
        steps: Lines of a recipe, such as `quantize: gptq int4-g64`.
        calibration: Data for the calibrated steps.
        journal: Saves finished work (see `journal_of`); by default nothing is saved.
        again: Allow a step that was already applied to this model.
        say: Called with each log line.

    Raises:
        ConfigError: Before any work, if the recipe is invalid or does not fit this model.
        JaxllmError: Whatever the steps raise.
    """
    recipe = parse_lines(_lines(steps), STEPS)
    check(lm, recipe, calibrated=calibration is not None, again=again)
    subject = subject_of(lm)
    own = journal or Journal()
    for stage in stages(lm, recipe, calibration, own, show_progress=show_progress, say=say):
        subject = stage.subject or subject
    return compressed(lm, recipe, subject)


def pruned(lm: LM, name: str) -> LM:
    """Return the model in the sparse format `name`, with half of each layer's weights pruned.

    This is for timing only: it prunes by magnitude, which ruins the model, but the speed does not
    depend on which weights are left. The embedding table and the head are stored in the format's
    number type, but not pruned. Raises ConfigError if the format is not sparse.
    """
    if (wanted := sparse.parse(name)) is None:
        raise ConfigError(
            f"sparse format unknown: got {name!r:.40}, expected one of {', '.join(sparse.FORMATS)}"
        )
    half = "2:4" if wanted.pattern == sparse.TWO_OF_FOUR else "50%"
    return compress(lm, [f"prune: magnitude {half}", f"quantize: rtn {name}"], again=True)


def check(lm: LM, recipe: Recipe, *, calibrated: bool, again: bool) -> None:
    """Raise ConfigError, before any work, if a recipe cannot or should not be applied."""
    check_recipe(recipe, lm.config, calibrated=calibrated)
    if not again:
        check_again(recipe, lm.recipe)


def subject_of(lm: LM) -> Subject:
    """Return the input of the first step."""
    return Subject(lm.config, lm.params, lm.model.precision)


def compressed(lm: LM, recipe: Recipe, subject: Subject) -> LM:
    """Return `lm` with the result of `recipe`; its precision keeps every weight's format."""
    precision = exactly(subject.params, subject.precision)
    return dataclasses.replace(
        lm,
        config=subject.config,
        model=models.build(subject.config, precision),
        params=subject.params,
        recipe=(*lm.recipe, *map(str, recipe)),
    )


def stages(
    lm: LM,
    recipe: Recipe,
    calibration: Calibration | None,
    journal: Journal,
    *,
    show_progress: bool | None = None,
    say: Say = _silent,
) -> Iterator[Stage]:
    """Run the steps, and yield each as it finishes.

    A resumed run starts after the last step whose result is in `journal`; saved work is used only
    if all lines up to its step are the same. After a calibrated step the journal holds all
    parameters; the layers saved during that step and the earlier results are deleted.
    """
    lines = [str(line) for line in recipe]
    journals = [journal.within(f"{n + 1}", *lines[: n + 1]) for n in range(len(recipe))]
    begin, subject, seconds = _resumed(journals)
    done = 0

    def so_far() -> str:
        told = f"{done} of {len(recipe)} steps done"
        if not journal.parts():
            return told
        return f"{told}; the same command resumes from {journal.directory}"

    with process.saying(so_far):
        for number in range(begin):
            last = number == begin - 1
            done = number + 1
            made, took = (subject, seconds) if last else (None, None)
            yield Stage(recipe[number], made, took, journals[number])
        subject = subject or subject_of(lm)
        for number in range(begin, len(recipe)):
            line, own = recipe[number], journals[number]
            subject, seconds = _run(line, subject, calibration, own, show_progress, say)
            if line.step.calibrated:
                _keep(own, subject, seconds)
                for older in journals[:number]:
                    older.forget("row")
            done = number + 1
            yield Stage(line, subject, seconds, own)


def journal_of(
    lm: LM, calibration: Calibration | None, directory: Path, say: Say = _silent
) -> Journal:
    """Return a journal for this model and calibration. Reads all weights once."""
    whose = [
        __version__,
        fingerprint(lm.params),
        repr(lm.config),
        repr(lm.model.precision),
        calibration.digest if calibration else "",
    ]
    return Journal(directory, hashlib.sha256("\n".join(whose).encode()).hexdigest(), say=say)


def _run(
    line: Line,
    subject: Subject,
    calibration: Calibration | None,
    journal: Journal,
    show_progress: bool | None,
    say: Say,
) -> tuple[Subject, float]:
    check_line(line, shapes_of(subject.params))  # earlier steps may have removed its matrices
    start = time.perf_counter()
    work = Work(calibration, journal, show_progress, say)
    made = line.step.run(subject, line.argument, line.options, work)
    jax.block_until_ready(made.params)
    _check_form(made, str(line))
    return made, time.perf_counter() - start


def _check_form(subject: Subject, where: str) -> None:
    """Raise ConfigError if shapes do not match the configuration: the result would not load."""
    wanted = shapes_of(models.param_shapes(models.build(subject.config)))
    found = shapes_of(subject.params)
    for path in wanted.keys() | found.keys():
        if wanted.get(path) != found.get(path):
            raise ConfigError(
                f"{where}: result has the wrong shape at {path}: got {found.get(path)}, expected"
                f" {wanted.get(path)} by its configuration"
            )


def _keep(journal: Journal, subject: Subject, seconds: float) -> None:
    """Save a step's result, then delete the layers that it saved on the way."""
    facts = {
        "config": subject.config.to_dict(),
        "precision": dataclasses.asdict(subject.precision),
        "seconds": seconds,
    }
    journal.put(_WHOLE, subject.params, facts)
    journal.forget(_WHOLE, "row")


def _resumed(journals: Sequence[Journal]) -> tuple[int, Subject | None, float]:
    """Return the number of finished steps, the last one's result, and its seconds."""
    for number in range(len(journals), 0, -1):
        if (found := journals[number - 1].get_with(_WHOLE)) is not None:
            params, facts = found
            return number, _subject(params, facts), float(facts["seconds"])
    return 0, None, 0.0


def _subject(params: Params, facts: dict[str, Any]) -> Subject:
    config = models.config_from_dict(facts["config"])
    return Subject(config, params, Precision.from_dict(facts["precision"]))


def _lines(steps: Sequence[str]) -> list[str]:
    """Return the lines as a list. Raises ConfigError for anything but strings."""
    if isinstance(steps, str) or not all(isinstance(line, str) for line in steps):
        raise ConfigError(f"recipe has the wrong type: got {steps!r:.60}, expected a list of lines")
    return list(steps)
