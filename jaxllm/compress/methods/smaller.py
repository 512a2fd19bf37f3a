"""Structured pruning: methods that drop heads, channels or layers."""

import dataclasses
import re
from typing import Annotated, Literal

import msgspec
import numpy as np

from jaxllm.compress.matrices.sparsity import share
from jaxllm.compress.recipe import Options, Subject, Work
from jaxllm.compress.structure import influence, salience, structure
from jaxllm.compress.structure.salience import Salience
from jaxllm.errors import ConfigError

Ends = Annotated[int, msgspec.Meta(ge=-1)]


class Groups(Options, frozen=True):
    """by: criterion of importance: the size of a group's weights, that times the size of their
    inputs, or the change of the loss to first or second order (see `structure.salience`).
    """

    by: Salience = "inputs"


class Layers(Options, frozen=True):
    """by: influence of single layers, or angle of a run. first, last: layers at either end that
    are never dropped; -1 as in LLM-Pruner, 4 and 2 of 32.
    """

    by: Literal["influence", "angle"] = "influence"
    first: Ends = -1
    last: Ends = -1


def heads(subject: Subject, argument: str, options: Groups, work: Work) -> Subject:
    """Drop key/value heads with the query heads that share them."""
    return _narrower(subject, "heads", argument, options, work)


def channels(subject: Subject, argument: str, options: Groups, work: Work) -> Subject:
    """Drop channels of the MLPs."""
    return _narrower(subject, "channels", argument, options, work)


def layers(subject: Subject, argument: str, options: Layers, work: Work) -> Subject:
    """Drop the layers that change the residual stream least.

    Raises ConfigError if modules have formats by path, since the remaining layers are renumbered.
    """
    if any(row.activations or row.output for _, row in subject.precision.overrides):
        raise ConfigError("layers cannot be dropped after modules were given formats by path")
    assert work.calibration is not None
    model, count, token_NT = subject.model, subject.config.num_hidden_layers, _rows(work)
    gone = structure.removed(count, amount(argument), "layers")
    papers = influence.kept_at_ends(count)
    first, last = (
        paper if own < 0 else own
        for own, paper in zip((options.first, options.last), papers, strict=True)
    )
    if options.by == "influence":
        measured = influence.block_influence(model, subject.params, token_NT)
        kept = influence.without_least(measured, gone, first, last)
    else:
        measured = influence.angular_distance(model, subject.params, token_NT, gone)
        kept = influence.without_run(measured, gone, first, last)
    work.say(f"dropping layers {', '.join(str(i) for i in range(count) if i not in kept)}")
    config, params = structure.cut_layers(subject.config, subject.params, kept)
    return dataclasses.replace(subject, config=config, params=params)


def amount(text: str) -> float | int:
    """Parse how much to drop: `25%`, or a count such as 2. Raises ConfigError."""
    return int(text) if re.fullmatch(r"[1-9]\d{0,6}", text) else share(text)


def _narrower(
    subject: Subject, kind: structure.Kind, argument: str, options: Groups, work: Work
) -> Subject:
    total = structure.groups(subject.config, kind)
    gone = structure.removed(total, amount(argument), kind)
    structure.narrower(subject.config, kind, total - gone)  # raises before the work
    found = salience.salience(
        subject.model,
        subject.params,
        kind,
        options.by,
        _rows(work),
        show_progress=work.show_progress,
    )
    kept = salience.least(found, gone)
    config, params = structure.cut(subject.config, subject.params, kind, kept)
    return dataclasses.replace(subject, config=config, params=params)


def _rows(work: Work) -> np.ndarray:
    assert work.calibration is not None
    return work.calibration.token_NT
