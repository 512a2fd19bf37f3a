"""Setup of distillation from the options of `jaxllm train distill`.

The result is an ordinary training run: parameters, objective, data and preparation of rows.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from jaxllm.api import LM
from jaxllm.errors import ConfigError
from jaxllm.files import complaints_of
from jaxllm.train.data.rows import Data
from jaxllm.train.distill import hidden as states
from jaxllm.train.distill.divergences import Mix
from jaxllm.train.distill.hidden import Hidden
from jaxllm.train.distill.objectives import FromBuckets, FromTeacher
from jaxllm.train.distill.recorded import TaughtData, record
from jaxllm.train.distill.sampled import Sampled
from jaxllm.train.distill.vocabulary import shared_size
from jaxllm.train.jobs import everywhere, in_training
from jaxllm.train.objective import NextToken, Objective
from jaxllm.weights.paths import Params

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
Whole = Annotated[int, msgspec.Meta(ge=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """Options of distillation.

    Attributes:
      beta: divergence: 0 is forward KL, 1 reverse KL, between them Jensen-Shannon.
      temperature: of both distributions in the divergence.
      alpha: weight of the divergence in the loss; the rest is cross-entropy with the labels. With 0
        and no `hidden` no teacher runs, and its tokenizer may differ.
      top_k: record the teacher's top-k tokens once, instead of running it in each step; 0: run it.
      on_policy: fraction of steps whose rows the student generates, from the rows' prompts or the
        first `prompt_tokens` of a text, at most `new_tokens` at `sample_temperature`.
      hidden: also compare hidden states, by "mse" or "cosine", with `hidden_weight`.
      pairs: layers of student and teacher to compare; default: evenly spaced.

    Raises ConfigError for values out of range, or that exclude each other.
    """

    beta: Share = 0.0
    temperature: Positive = 1.0
    alpha: Share = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    on_policy: Share = 0.0
    prompt_tokens: Whole = 16
    new_tokens: Whole = 128
    sample_temperature: Positive = 1.0
    hidden: Literal["mse", "cosine"] | None = None
    hidden_weight: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 1.0
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        complaints = complaints_of(self)
        if self.top_k and self.on_policy:
            complaints.append(
                "recorded teacher outputs (top_k) do not cover rows that the student generates"
                " (on_policy): drop one of them"
            )
        if self.top_k and self.hidden:
            complaints.append("hidden states need a running teacher: drop top_k or hidden")
        if self.alpha == 0 and (self.top_k or self.on_policy):
            complaints.append(
                "with alpha 0 the teacher's outputs are not used: drop top_k and on_policy, or set"
                " alpha above 0"
            )
        if self.pairs and not self.hidden:
            complaints.append("pairs of layers need hidden: set it to mse or cosine")
        if complaints:
            raise ConfigError("; ".join(complaints))

    @property
    def mix(self) -> Mix:
        return Mix(self.beta, self.temperature, self.alpha)


class Teaching(NamedTuple):
    """The inputs of a training run.

    Attributes:
      params: the student's, with projections if they are trained.
      given: the objective's further arrays.
      data, held_out: with the teacher's outputs, if they were recorded.
      prepare: makes the rows of each step, or None.
    """

    params: Params
    objective: Objective
    given: Any
    data: Data
    held_out: Data | None
    prepare: Sampled | None


def teaching(
    student: LM,
    teacher: LM,
    data: Data,
    options: Distillation,
    *,
    held_out: Data | None = None,
    directory: Path | None = None,
    seed: int = 0,
    show_progress: bool | None = None,
) -> Teaching:
    """Prepare distillation of `student`; with `top_k` the teacher's outputs are recorded now.

    Args:
      directory: where they are recorded, also for later runs.
      seed: of the projections.

    Raises ConfigError for different tokenizers, layers that do not exist, rows longer than either
    context, a record with another key, or if `top_k` has no directory.
    """
    if options.alpha == 0 and options.hidden is None:
        return Teaching(student.params, NextToken(), (), data, held_out, None)
    size = shared_size(teacher, student)
    _check_width(data, teacher, student)
    if options.top_k:
        if directory is None:
            raise ConfigError("top_k records the teacher's outputs on disk: give a directory")
        say = partial(
            record,
            teacher=teacher.model,
            params=teacher.params,
            k=min(options.top_k, size),
            temperature=options.temperature,
            size=size,
            show_progress=show_progress,
        )

        def taught(data: Data, part: str) -> TaughtData:
            return TaughtData(data, say(directory / part, data=data))

        held_out = None if held_out is None else taught(held_out, "held-out")
        objective = FromBuckets(size, options.mix)
        return Teaching(student.params, objective, (), taught(data, "data"), held_out, None)
    params, compared = student.params, None
    if options.hidden is not None:
        layers = student.config.num_hidden_layers, teacher.config.num_hidden_layers
        pairs = options.pairs or states.evenly(*layers)
        compared = Hidden(options.hidden, pairs, options.hidden_weight)
        params = states.with_projections(params, compared, student.config, teacher.config, seed)
        if states.PLACE in params:
            params[states.PLACE] = everywhere(student.model, params[states.PLACE])
    prepare = None
    if options.on_policy:
        prepare = Sampled(
            student.model,
            options.on_policy,
            options.prompt_tokens,
            options.new_tokens,
            options.sample_temperature,
            ends(student),
        )
    against = FromTeacher(in_training(teacher.model), size, options.mix, compared)
    return Teaching(params, against, teacher.params, data, held_out, prepare)


def _check_width(data: Data, teacher: LM, student: LM) -> None:
    width = int(data.batch(0).token_BT.shape[1])
    for name, lm in (("teacher", teacher), ("student", student)):
        if width > lm.config.context_length:
            raise ConfigError(
                f"rows of {width} tokens exceed the {name}'s context of"
                f" {lm.config.context_length}: use shorter rows"
            )


def ends(lm: LM) -> tuple[int, ...]:
    """Return the checkpoint's ids that end a text."""
    found = lm.generation.get("eos_token_id")
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


def finished(student: LM, params: Params) -> LM:
    """Return the trained student, without projections."""
    return dataclasses.replace(student, params=states.without_projections(params))
