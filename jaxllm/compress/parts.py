"""Steps after which a model has fewer heads, channels or layers."""

import dataclasses
import re
from typing import Annotated, Literal

import msgspec

from jaxllm.compress import influence, salience, structure
from jaxllm.compress.recipe import Argument, Options, Subject, Work, share
from jaxllm.compress.salience import Salience
from jaxllm.compress.structure import Kind
from jaxllm.errors import ConfigError

End = Annotated[int, msgspec.Meta(ge=-1)]


class Cut(Options, frozen=True):
    """by: the salience by which the least go (`compress/salience.py`)."""

    by: Salience = "inputs"


class CutLayers(Options, frozen=True):
    """by: influence, those that change the stream least; angle, the run of layers that does. first,
    last: how many at the ends stay in any case; -1 for LLM-Pruner's 4 and 2 of 32.
    """

    by: Literal["influence", "angle"] = "influence"
    first: End = -1
    last: End = -1


def part(text: str) -> int | float:
    """How many go: a number, or a share such as `25%`. Raises ConfigError for what is neither."""
    if re.fullmatch(r"[1-9]\d{0,6}", text):
        return int(text)
    try:
        return share(text)
    except ConfigError as error:
        raise ConfigError(f"a number of them, or {error}") from None


PART = Argument("COUNT|SHARE%", part)


def heads(subject: Subject, argument: str, options: Cut, work: Work) -> Subject:
    """Key/value heads with all their query heads; as many query heads are counted."""
    config = subject.config
    together = config.num_attention_heads // config.num_key_value_heads
    structure.narrower(config, "heads", 1)  # a family that keeps its heads says so first
    gone = structure.removed(config.num_attention_heads, part(argument), "query heads", together)
    return _narrowed(subject, "heads", gone // together, options, work)


def channels(subject: Subject, argument: str, options: Cut, work: Work) -> Subject:
    """Hidden numbers of the MLPs."""
    total = subject.config.intermediate_size
    gone = structure.removed(total, part(argument), "channels")
    return _narrowed(subject, "channels", gone, options, work)


def layers(subject: Subject, argument: str, options: CutLayers, work: Work) -> Subject:
    """Layers, all at once. Raises ConfigError where modules have formats by their path."""
    if any(row.activations or row.output for _, row in subject.precision.overrides):
        raise ConfigError(
            "layers are cut before modules are given formats by path: numbers would name others"
        )
    assert work.calibration is not None
    model, params, token_NT = subject.model, subject.params, work.calibration.token_NT
    total = subject.config.num_hidden_layers
    gone = structure.removed(total, part(argument), "layers")
    ends = zip((options.first, options.last), influence.kept_at_ends(total), strict=True)
    first, last = (usual if given < 0 else given for given, usual in ends)
    if options.by == "influence":
        each = influence.block_influence(model, params, token_NT)
        kept = influence.without_least(each, gone, first, last)
    else:
        each = influence.angular_distance(model, params, token_NT, gone)
        kept = influence.without_run(each, gone, first, last)
    work.say(f"without the layers {', '.join(str(n) for n in range(total) if n not in kept)}")
    config, found = structure.cut_layers(subject.config, params, kept)
    return dataclasses.replace(subject, config=config, params=found)


def _narrowed(subject: Subject, kind: Kind, gone: int, options: Cut, work: Work) -> Subject:
    assert work.calibration is not None
    found = salience.salience(
        subject.model,
        subject.params,
        kind,
        options.by,
        work.calibration.token_NT,
        show_progress=work.show_progress,
    )
    kept = salience.least(found, gone)
    config, params = structure.cut(subject.config, subject.params, kind, kept)
    return dataclasses.replace(subject, config=config, params=params)
