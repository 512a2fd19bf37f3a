"""`jaxllm train distill`: a smaller student learns from a model."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.console import spinner
from jaxllm.cli.fields import Flags
from jaxllm.cli.options import Out
from jaxllm.cli.train_run import (
    ModelToTrain,
    TrainOptions,
    check_run,
    load_training_model,
    run_training,
)
from jaxllm.errors import ConfigError
from jaxllm.research.distill.settings import Distillation

if TYPE_CHECKING:
    from jaxllm.train.data.examples import Examples
    from jaxllm.train.data.rows import Data
    from jaxllm.train.jobs import TrainJob

DISTRIBUTED = True  # all processes compute the student together
EXAMPLE = "Example: jaxllm train distill demo:llama student --data story.txt --layers 3"
Positive = Annotated[int | None, typer.Option(min=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions(TrainOptions):
    """The flags of a run.

    Attributes:
        lr: Peak learning rate [default: 3e-4].
    """


def distill(
    model: ModelToTrain,
    target: Out,
    loss: Annotated[
        dict[str, Any],
        Flags(Distillation, "alpha", "beta", "temperature", "top_k", "on_policy", "hidden"),
    ],
    student: str | None = None,
    layers: Positive = None,
    heads: Positive = None,
    channels: Positive = None,
    written: Positive = None,
    max_new_tokens: Positive = None,
    *,
    options: DistillOptions,
) -> None:
    """Distill MODEL into a smaller student. The result is a complete model.

    The logged loss is the training objective: with --alpha 1 the divergence. The teacher's logits
    or texts are saved in OUT.taught; the state in OUT.parts, during the run.

    Args:
        student: Student model [default: a part of MODEL].
        layers: Number of MODEL's layers in the student.
        heads: Number of MODEL's key/value heads in the student.
        channels: Number of MODEL's channels per MLP in the student.
        written: Sequence-level distillation: tokens of each example that the teacher continues.
        max_new_tokens: Maximum new tokens for --written or --on-policy [default: 128, or what
            fits].
    """
    with spinner("starting"):
        from jaxllm.research.distill import sequence_kd
        from jaxllm.research.distill.job import distill as job_of
        from jaxllm.research.distill.student import (
            StudentSize,
            check_student,
            make_student,
            select_full_rows,
        )

        if written is not None:
            loss["alpha"] = 0.0
        asked = Distillation(**loss, new_tokens=max_new_tokens or 128)
        part = StudentSize(layers, heads, channels)
        if (student is None) == (part == StudentSize()):
            raise ConfigError(
                "the student must be either --student DIR or a part of MODEL: --layers, --heads or"
                " --channels"
            )
        checked = check_run(model, target, options, 3e-4)
        check_student(checked.checkpoint.config, part)
        new = 0
        if written is not None:
            new = sequence_kd.new_token_count(checked.checkpoint.config, written, max_new_tokens)
    teacher = load_training_model(model, options)
    directory, seed = target.with_name(f"{target.name}.taught"), options.seed

    def make_job(data: "Data", eval_data: "Data | None") -> "TrainJob":
        taught = None if student is None else load_training_model(student, options)
        taught = taught or make_student(teacher, part, select_full_rows(data.batch(0)))
        more: Any = {"eval_data": eval_data, "directory": directory, "seed": seed}
        return job_of(teacher, taught, data, asked, **more)

    def read_teacher_texts(path: Path) -> "Examples":
        assert written is not None
        return sequence_kd.complete_examples(teacher, path, written, directory, seed, new)

    how = None if written is None else read_teacher_texts
    run_training(teacher, make_job, target, options, checked, f"a student of {model}", how)
