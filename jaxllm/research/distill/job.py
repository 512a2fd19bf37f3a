"""Distillation as a training job, made from its options.

Models of a family pad their vocabularies to different sizes (Qwen 2.5 has 151,936 and 152,064 rows
for the same tokens), so both are cut to the real tokens. If an id meant different tokens, every
loss would be silently wrong, so tokenizers are compared token by token.
"""

import dataclasses
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.research.distill.losses import (
    PARAMS_KEY,
    DistillLossConfig,
    HiddenLossConfig,
    OnlineTeacherLoss,
    RecordedTeacherLoss,
    even_pairs,
    remove_projections,
    with_projections,
)
from jaxllm.research.distill.on_policy import OnPolicySampler
from jaxllm.research.distill.settings import Distillation
from jaxllm.research.distill.teacher import RecordedTeacher, record_teacher
from jaxllm.sharding.sharded_model import replicate_arrays, with_sharded_rows
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.train.data.rows import Data
from jaxllm.train.jobs import TrainJob
from jaxllm.train.objective import NextToken
from jaxllm.weights.paths import Params

_MAX_SHOWN = 3


def distill(
    teacher: LM,
    student: LM,
    data: Data,
    options: Distillation,
    *,
    eval_data: Data | None = None,
    directory: Path | None = None,
    seed: int = 0,
    show_progress: bool | None = None,
) -> TrainJob:
    """Train all weights of a student on its teacher. The result is an ordinary model.

    With `top_k` the teacher's outputs are recorded now.

    Args:
        directory: where they are recorded, also for later runs.
        seed: of the projections.

    Raises:
        ConfigError: For different tokenizers, layers that do not exist, rows longer than either
            context, a record with another key, or if `top_k` has no directory.
    """

    def finish(params: Params, directory: Path) -> None:
        extract_student(student, params).save(directory)

    job = TrainJob(
        lm=student,
        params=student.params,
        objective=NextToken(),
        extra_inputs=(),
        data=data,
        eval_data=eval_data,
        finish=finish,
    )
    if options.alpha == 0 and options.hidden is None:
        return job
    size = common_vocab_size(teacher, student)
    loss = DistillLossConfig(options.beta, options.temperature, options.alpha)
    _check_width(data, teacher, student)
    if options.top_k:
        if directory is None:
            raise ConfigError("top_k records the teacher's outputs on disk: give a directory")

        def record(data: Data, part: str) -> RecordedTeacher:
            return record_teacher(
                directory / part,
                teacher.model,
                teacher.params,
                data,
                k=min(options.top_k, size),
                temperature=options.temperature,
                size=size,
                show_progress=show_progress,
            )

        return dataclasses.replace(
            job,
            objective=RecordedTeacherLoss(size, loss),
            eval_data=None if eval_data is None else record(eval_data, "held-out"),
            data=record(data, "data"),
        )
    params, hidden, prepare = student.params, None, None
    if options.hidden is not None:
        layers = student.config.num_hidden_layers, teacher.config.num_hidden_layers
        pairs = options.pairs or even_pairs(*layers)
        hidden = HiddenLossConfig(options.hidden, pairs, options.hidden_weight)
        params = with_projections(params, hidden, student.config, teacher.config, seed)
        if PARAMS_KEY in params:
            params[PARAMS_KEY] = replicate_arrays(student.model, params[PARAMS_KEY])
    if options.on_policy:
        prepare = OnPolicySampler(
            student.model,
            options.on_policy,
            options.prompt_tokens,
            options.new_tokens,
            options.sample_temperature,
            eos_token_ids(student),
        )
    objective = OnlineTeacherLoss(with_sharded_rows(teacher.model), size, loss, hidden)
    return dataclasses.replace(
        job, params=params, objective=objective, extra_inputs=teacher.params, prepare=prepare
    )


def _check_width(data: Data, teacher: LM, student: LM) -> None:
    width = int(data.batch(0).token_BT.shape[1])
    for name, lm in (("teacher", teacher), ("student", student)):
        if width > lm.config.context_length:
            raise ConfigError(
                f"rows of {width} tokens exceed the {name}'s context of"
                f" {lm.config.context_length}: use shorter rows"
            )


def common_vocab_size(teacher: LM, student: LM) -> int:
    """Return the number of common tokens: ids from 0 that mean the same and exist in both models.

    Raises ConfigError if the tokenizers differ, or one is missing.
    """
    tokenizers = _get_tokenizer(teacher, "teacher"), _get_tokenizer(student, "student")
    check_tokenizers(*tokenizers)
    return min(tokenizers[0].vocab_size, teacher.config.vocab_size, student.config.vocab_size)


def check_tokenizers(teacher: Tokenizer, student: Tokenizer) -> None:
    """Raise ConfigError, with examples, if an id has different tokens in the two tokenizers.

    The ids that end a text may differ, as they do for instruction-tuned models of a family.
    """
    sizes, unlike = (teacher.vocab_size, student.vocab_size), teacher.unlike_ids(student)
    if unlike:
        shown = "; ".join(
            f"{i} is {teacher.token(i)!r:.40} and {student.token(i)!r:.40}"
            for i in unlike[:_MAX_SHOWN]
        )
        raise ConfigError(
            f"teacher and student have different tokenizers: {len(unlike)} of {max(sizes)} ids"
            f" differ ({shown}). Train on texts that the teacher writes (sequence-level"
            " distillation) instead"
        )


def _get_tokenizer(lm: LM, name: str) -> Tokenizer:
    if lm.tokenizer is None:
        raise ConfigError(
            f"the {name} {lm.path.name} has no tokenizer to compare with the other's: put its"
            " tokenizer files into the model's directory"
        )
    return lm.tokenizer


def eos_token_ids(lm: LM) -> tuple[int, ...]:
    """Return the checkpoint's ids that end a text."""
    ids = lm.generation.get("eos_token_id")
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def extract_student(student: LM, params: Params) -> LM:
    """Return the trained student, without projections."""
    return dataclasses.replace(student, params=remove_projections(params))
