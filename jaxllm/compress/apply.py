"""A recipe applied to a model, step by step, so that an interrupted run goes on where it was."""

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
_WHOLE = "whole"  # the key of all parameters after a step


def _silent(_: str) -> None:
    """Nobody is told."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A step that is done. subject: what it made; None where an earlier run made it, and what came
    after it is there. seconds: what it took, None where that is not known any more. journal: its
    own, for what else is to be kept of it (under keys that begin with "row").
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
    """The model after all steps of a recipe; `lm` stays as it is.

    steps: the lines of a recipe, such as `quantize: gptq int4-g64`. journal: where what is finished
    is kept, as `journal_of` makes it; by default nowhere. again: whether a step may be done that
    was done before. say: takes a line for people.

    Raises ConfigError, before any work, for lines that are no recipe, or none for this model, then
    what the steps raise.
    """
    recipe = parse_lines(_lines(steps), STEPS)
    check(lm, recipe, calibrated=calibration is not None, again=again)
    subject = subject_of(lm)
    own = journal or Journal()
    for stage in stages(lm, recipe, calibration, own, show_progress=show_progress, say=say):
        subject = stage.subject or subject
    return compressed(lm, recipe, subject)


def pruned(lm: LM, name: str) -> LM:
    """The model in the sparse format `name`, without the smaller half of its layers' weights.

    By magnitude alone: that is for timing, for weights that are sparse take as long to read
    whichever of them are left; no way to a model that is any good. The tokens' table and the head
    are in the format's numbers, not sparse. Raises ConfigError for a format that is not sparse, and
    what the steps raise.
    """
    if (wanted := sparse.parse(name)) is None:
        raise ConfigError(
            f"weights are pruned to a sparse format, one of {', '.join(sparse.FORMATS)}, not"
            f" {name!r:.40}"
        )
    half = "2:4" if wanted.pattern == sparse.TWO_OF_FOUR else "50%"
    return compress(lm, [f"prune: magnitude {half}", f"quantize: rtn {name}"], again=True)


def check(lm: LM, recipe: Recipe, *, calibrated: bool, again: bool) -> None:
    """Raise ConfigError, before any work, for a recipe that cannot or should not be applied."""
    check_recipe(recipe, lm.config, calibrated=calibrated)
    if not again:
        check_again(recipe, lm.recipe)


def subject_of(lm: LM) -> Subject:
    """What the first step is given."""
    return Subject(lm.config, lm.params, lm.model.precision)


def compressed(lm: LM, recipe: Recipe, subject: Subject) -> LM:
    """The model that `recipe` made of `lm`. Its precision keeps every weight as it is."""
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
    """Each step as it is done, from the last one whose result an earlier run has left.

    journal: what it has of a step counts for the same lines up to there. After a calibrated step it
    has all parameters, in place of the step's own layers and of what the step before it left.
    """
    lines = [str(line) for line in recipe]
    journals = [journal.within(f"{n + 1}", *lines[: n + 1]) for n in range(len(recipe))]
    begin, subject, seconds = _resumed(journals)
    done = 0

    def so_far() -> str:
        told = f"{done} of {len(recipe)} steps done"
        if not journal.parts():
            return told
        return f"{told}; what is finished is in {journal.directory}, from which the same goes on"

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
    """A journal of what is made of this model with this calibration. Reads all weights once."""
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
    check_line(line, shapes_of(subject.params))  # the steps before may have taken its matrices away
    start = time.perf_counter()
    work = Work(calibration, journal, show_progress, say)
    made = line.step.run(subject, line.argument, line.options, work)
    jax.block_until_ready(made.params)
    _check_form(made, str(line))
    return made, time.perf_counter() - start


def _check_form(subject: Subject, where: str) -> None:
    """Raise ConfigError for parameters that are not of their configuration: no file would load."""
    wanted = shapes_of(models.param_shapes(models.build(subject.config)))
    found = shapes_of(subject.params)
    for path in wanted.keys() | found.keys():
        if wanted.get(path) != found.get(path):
            raise ConfigError(
                f"{where} left {path} with shape {found.get(path)}, its configuration says"
                f" {wanted.get(path)}"
            )


def _keep(journal: Journal, subject: Subject, seconds: float) -> None:
    """Keep a step's result, then let its layers go."""
    facts = {
        "config": subject.config.to_dict(),
        "precision": dataclasses.asdict(subject.precision),
        "seconds": seconds,
    }
    journal.put(_WHOLE, subject.params, facts)
    journal.forget(_WHOLE, "row")


def _resumed(journals: Sequence[Journal]) -> tuple[int, Subject | None, float]:
    """How many steps are done, what the last of them made, and the seconds that it took."""
    for number in range(len(journals), 0, -1):
        if (found := journals[number - 1].get_with(_WHOLE)) is not None:
            params, facts = found
            return number, _subject(params, facts), float(facts["seconds"])
    return 0, None, 0.0


def _subject(params: Params, facts: dict[str, Any]) -> Subject:
    config = models.config_from_dict(facts["config"])
    return Subject(config, params, Precision.from_dict(facts["precision"]))


def _lines(steps: Sequence[str]) -> list[str]:
    """Raises ConfigError for what is no list of lines."""
    if isinstance(steps, str) or not all(isinstance(line, str) for line in steps):
        raise ConfigError(f"a recipe is a list of lines, got {steps!r:.60}")
    return list(steps)
