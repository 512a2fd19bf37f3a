"""Distillation as a training job."""

from pathlib import Path

from jaxllm.lm import LM
from jaxllm.train.data.rows import Data
from jaxllm.train.distill.settings import Distillation, extract_student, prepare_distillation
from jaxllm.train.jobs import TrainJob
from jaxllm.weights.paths import Params


def distill(
    teacher: LM,
    student: LM,
    data: Data,
    options: Distillation,
    *,
    eval_data: Data | None = None,
    directory: Path | None = None,
    seed: int = 0,
) -> TrainJob:
    """Train all weights of a student on its teacher. The result is an ordinary model.

    directory: where the teacher's outputs are recorded, if `options.top_k` is set. Raises what
    `settings.prepare_distillation` raises.
    """
    taught = prepare_distillation(
        student, teacher, data, options, eval_data=eval_data, directory=directory, seed=seed
    )

    def finish(params: Params, directory: Path) -> None:
        extract_student(student, params).save(directory)

    return TrainJob(
        lm=student,
        params=taught.params,
        objective=taught.objective,
        extra_inputs=taught.extra_inputs,
        prepare=taught.prepare,
        data=taught.data,
        eval_data=taught.eval_data,
        finish=finish,
    )
