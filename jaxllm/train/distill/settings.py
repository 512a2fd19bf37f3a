"""Setup of distillation from the options of `jaxllm train distill`.

The result is an ordinary training run: parameters, objective, data and preparation of rows.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from jaxllm.errors import ConfigError
from jaxllm.files import field_errors
from jaxllm.lm import LM
from jaxllm.train.data.rows import Data
from jaxllm.train.distill import feature_loss as states
from jaxllm.train.distill.cached_logits import RecordedData, record_teacher
from jaxllm.train.distill.divergences import DistillLossConfig
from jaxllm.train.distill.feature_loss import HiddenLossConfig
from jaxllm.train.distill.objectives import OnlineTeacherLoss, RecordedTeacherLoss
from jaxllm.train.distill.on_policy import OnPolicySampler
from jaxllm.train.distill.vocabulary import common_vocab_size
from jaxllm.train.objective import NextToken, Objective
from jaxllm.weights.paths import Params

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


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

    beta: Fraction = 0.0
    temperature: Positive = 1.0
    alpha: Fraction = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    on_policy: Fraction = 0.0
    prompt_tokens: PositiveInt = 16
    new_tokens: PositiveInt = 128
    sample_temperature: Positive = 1.0
    hidden: Literal["mse", "cosine"] | None = None
    hidden_weight: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 1.0
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        complaints = field_errors(self)
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
    def loss_config(self) -> DistillLossConfig:
        return DistillLossConfig(self.beta, self.temperature, self.alpha)


class DistillSetup(NamedTuple):
    """The inputs of a training run.

    Attributes:
      params: the student's, with projections if they are trained.
      extra_inputs: the objective's further arrays.
      data, held_out: with the teacher's outputs, if they were recorded.
      prepare: makes the rows of each step, or None.
    """

    params: Params
    objective: Objective
    extra_inputs: Any
    data: Data
    eval_data: Data | None
    prepare: OnPolicySampler | None


def prepare_distillation(
    student: LM,
    teacher: LM,
    data: Data,
    options: Distillation,
    *,
    eval_data: Data | None = None,
    directory: Path | None = None,
    seed: int = 0,
    show_progress: bool | None = None,
) -> DistillSetup:
    """Prepare distillation of `student`; with `top_k` the teacher's outputs are recorded now.

    Args:
      directory: where they are recorded, also for later runs.
      seed: of the projections.

    Raises ConfigError for different tokenizers, layers that do not exist, rows longer than either
    context, a record with another key, or if `top_k` has no directory.
    """
    if options.alpha == 0 and options.hidden is None:
        return DistillSetup(student.params, NextToken(), (), data, eval_data, None)
    size = common_vocab_size(teacher, student)
    _check_width(data, teacher, student)
    if options.top_k:
        if directory is None:
            raise ConfigError("top_k records the teacher's outputs on disk: give a directory")
        say = partial(
            record_teacher,
            teacher=teacher.model,
            params=teacher.params,
            k=min(options.top_k, size),
            temperature=options.temperature,
            size=size,
            show_progress=show_progress,
        )

        def record_data(data: Data, part: str) -> RecordedData:
            return RecordedData(data, say(directory / part, data=data))

        eval_data = None if eval_data is None else record_data(eval_data, "held-out")
        objective = RecordedTeacherLoss(size, options.loss_config)
        return DistillSetup(
            student.params, objective, (), record_data(data, "data"), eval_data, None
        )
    params, compared = student.params, None
    if options.hidden is not None:
        layers = student.config.num_hidden_layers, teacher.config.num_hidden_layers
        pairs = options.pairs or states.even_pairs(*layers)
        compared = HiddenLossConfig(options.hidden, pairs, options.hidden_weight)
        params = states.with_projections(params, compared, student.config, teacher.config, seed)
        if states.PARAMS_KEY in params:
            params[states.PARAMS_KEY] = student.model.replicate(params[states.PARAMS_KEY])
    prepare = None
    if options.on_policy:
        prepare = OnPolicySampler(
            student.model,
            options.on_policy,
            options.prompt_tokens,
            options.new_tokens,
            options.sample_temperature,
            eos_token_ids(student),
        )
    against = OnlineTeacherLoss(
        teacher.model.with_sharded_rows(), size, options.loss_config, compared
    )
    return DistillSetup(params, against, teacher.params, data, eval_data, prepare)


def _check_width(data: Data, teacher: LM, student: LM) -> None:
    width = int(data.batch(0).token_BT.shape[1])
    for name, lm in (("teacher", teacher), ("student", student)):
        if width > lm.config.context_length:
            raise ConfigError(
                f"rows of {width} tokens exceed the {name}'s context of"
                f" {lm.config.context_length}: use shorter rows"
            )


def eos_token_ids(lm: LM) -> tuple[int, ...]:
    """Return the checkpoint's ids that end a text."""
    found = lm.generation.get("eos_token_id")
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


def extract_student(student: LM, params: Params) -> LM:
    """Return the trained student, without projections."""
    return dataclasses.replace(student, params=states.remove_projections(params))
