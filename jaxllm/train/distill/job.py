"""Distillation as a job: a student after its teacher."""

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
    """A student, all of it, after a teacher. The result is a model of its own.

    directory: where what the teacher says is recorded, if `options` ask for that. Raises what
    `distill.teaching` raises.
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
