"""Distillation by options: what `jaxllm train distill` asks for becomes what a run takes.

A run is then an ordinary one: parameters, an objective with what it is given, data, and what
prepares each step's rows.
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
    """How a student learns from its teacher.

    beta: the divergence: 0 forward KL, 1 reverse KL, between them Jensen-Shannon. temperature: of
    both distributions in it. alpha: its share of the loss; the rest is cross-entropy with the text.
    With alpha 0 no teacher runs (it wrote the texts, say), and its tokenizer may be another.
    top_k: the teacher's likeliest tokens are recorded once, with the rest as one bucket, and it
    does not run beside the student; 0: it runs, and says all.
    on_policy: the share of steps whose rows the student writes itself, from the rows' prompts or
    the first `prompt_tokens` of a text, at most `new_tokens` at `sample_temperature`.
    hidden: compare hidden states too, by "mse" or "cosine"; hidden_weight: how much they count;
    pairs: layers of student and teacher, by default evenly.

    Raises ConfigError for what cannot be, or not together.
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
                "what a teacher said before (top_k) says nothing of what the student writes"
                " (on_policy): leave one of them out"
            )
        if self.top_k and self.hidden:
            complaints.append("hidden states need the teacher to run: leave top_k or hidden out")
        if self.alpha == 0 and (self.top_k or self.on_policy):
            complaints.append(
                "with alpha 0 nothing is learned of what the teacher says: leave top_k and"
                " on_policy out, or give alpha a share"
            )
        if self.pairs and not self.hidden:
            complaints.append("pairs of layers are for hidden states: say hidden, mse or cosine")
        if complaints:
            raise ConfigError("; ".join(complaints))

    @property
    def mix(self) -> Mix:
        return Mix(self.beta, self.temperature, self.alpha)


class Teaching(NamedTuple):
    """What a run of training takes. params: the student's, with projections where they are trained.
    given: the arrays that the objective needs. data, held_out: with what the teacher said, where it
    was recorded. prepare: what makes each step's rows, or None.
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
    """All that distilling `student` takes. Where the teacher is recorded, it speaks now.

    directory: where records are kept, for runs to come too. seed: of projections. Raises
    ConfigError for tokenizers that differ, layers that there are not, rows wider than either
    context, a record of something else, or none named for top_k.
    """
    if options.alpha == 0 and options.hidden is None:
        return Teaching(student.params, NextToken(), (), data, held_out, None)
    size = shared_size(teacher, student)
    _check_width(data, teacher, student)
    if options.top_k:
        if directory is None:
            raise ConfigError("what the teacher says is recorded on disk: name a directory")
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
                f"the {name}'s context has {lm.config.context_length} tokens, a row {width}: ask"
                " for shorter rows"
            )


def ends(lm: LM) -> tuple[int, ...]:
    """The ids that end a text, as the checkpoint says."""
    found = lm.generation.get("eos_token_id")
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


def finished(student: LM, params: Params) -> LM:
    """The student with what it learned, without the projections that it learned it by."""
    return dataclasses.replace(student, params=states.without_projections(params))
