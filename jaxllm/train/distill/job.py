"""Distillation as a training job."""

from pathlib import Path

from jaxllm.api import LM
from jaxllm.train.data.rows import Data
from jaxllm.train.distill.settings import Distillation, finished, teaching
from jaxllm.train.jobs import Job
from jaxllm.weights.paths import Params


def distill(
    teacher: LM,
    student: LM,
    data: Data,
    options: Distillation,
    *,
    held_out: Data | None = None,
    directory: Path | None = None,
    seed: int = 0,
) -> Job:
    """Train all weights of a student on its teacher. The result is an ordinary model.

    directory: where the teacher's outputs are recorded, if `options.top_k` is set. Raises what
    `settings.teaching` raises.
    """
    taught = teaching(
        student, teacher, data, options, held_out=held_out, directory=directory, seed=seed
    )

    def finish(params: Params, directory: Path) -> None:
        finished(student, params).save(directory)

    return Job(
        lm=student,
        params=taught.params,
        objective=taught.objective,
        given=taught.given,
        prepare=taught.prepare,
        data=taught.data,
        held_out=taught.held_out,
        finish=finish,
    )
