"""Pipeline schedules as tables: what each stage does at each tick, one job or nothing.

`gpipe`, `one_f_one_b` and `forward_only` give the order of each stage's jobs; `build_schedule` runs
each job at the first tick at which its dependencies are done. Every job takes one tick, backward
jobs too, as the closed forms count it. With `chunks`, each stage has several runs of layers, and
chunk c of stage s is the `c * stages + s`-th of the model (Narayanan et al. 2021, arXiv 2104.04473,
section 2.2).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.errors import ConfigError
from jaxllm.runtime.validation import check_int

MAX_SIZE = 1 << 12  # stages, microbatches or chunks: more than in any published run


class Job(NamedTuple):
    """A microbatch through one chunk of a stage's layers, or its gradient back through it."""

    forward: bool
    microbatch: int
    chunk: int = 0


Order = Sequence[Job]  # of one stage


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The jobs of all stages by tick.

    Each job occurs once in its stage, after its dependencies: a forward job after the chunk before
    it, a backward job after its own forward job and after the backward job of the next chunk.
    """

    stages: int
    microbatches: int
    chunks: int
    ticks: tuple[tuple[Job | None, ...], ...]  # [ticks][stages]; None: the stage is idle


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Schedule all forward jobs, then all backward ones in reverse order.

    A stage stores all microbatches at once (Huang et al. 2018, arXiv 1811.06965).
    """
    p, m, v = _check_sizes(stages, microbatches, chunks)
    forward_jobs = _forward_order(p, m, v)
    backward_jobs = [Job(False, *job[1:]) for job in reversed(forward_jobs)]
    return build_schedule([[*forward_jobs, *backward_jobs]] * p, m, v)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Schedule each backward job as early as possible, or with chunks, interleaved as in Megatron.

    A stage stores as many microbatches as there are stages from it to the last, however many are
    run (PipeDream-flush, Narayanan et al. 2020, arXiv 2006.09503).
    """
    p, m, v = _check_sizes(stages, microbatches, chunks)
    forward_jobs = _forward_order(p, m, v)
    backward_jobs = [Job(False, job.microbatch, v - 1 - job.chunk) for job in forward_jobs]
    orders = []
    for stage in range(p):
        warmup = p - stage - 1 if v == 1 else 2 * (p - stage - 1) + (v - 1) * p
        warmup = min(warmup, len(forward_jobs))
        order = forward_jobs[:warmup]
        for f, b in zip(forward_jobs[warmup:], backward_jobs, strict=False):
            order += [f, b]
        orders.append(order + backward_jobs[len(forward_jobs) - warmup :])
    return build_schedule(orders, m, v)


def forward_only(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Schedule forward jobs only.

    Decoding is this with a chunk for each token: a group of rows enters again when its token is
    sampled. No tick waits for that if there are as many groups as stages.
    """
    p, m, v = _check_sizes(stages, microbatches, chunks, check_groups=False)
    return build_schedule([_forward_order(p, m, v)] * p, m, v)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def build_schedule(orders: Sequence[Order], microbatches: int, chunks: int) -> Schedule:
    """Return the schedule that runs each stage's jobs in this order, as early as possible."""
    p, todo = len(orders), [list(order) for order in orders]
    done: set[tuple[int, Job]] = set()
    ticks = []
    while any(todo):
        row: list[Job | None] = [None] * p
        for stage, jobs in enumerate(todo):
            if jobs and done.issuperset(job_dependencies(p, chunks, stage, jobs[0])):
                row[stage] = jobs.pop(0)
        if not any(row):
            raise ConfigError("orders of jobs are cyclic: each stage waits for another")
        done |= {(stage, job) for stage, job in enumerate(row) if job is not None}
        ticks.append(tuple(row))
    return Schedule(p, microbatches, chunks, tuple(ticks))


def job_dependencies(stages: int, chunks: int, stage: int, job: Job) -> list[tuple[int, Job]]:
    """Return the (stage, job) pairs that must be done before a stage can do this job."""
    forward, microbatch, chunk = job
    step = -1 if forward else 1
    dependencies = [] if forward else [(stage, Job(True, microbatch, chunk))]
    other, turn = (stage + step) % stages, chunk
    if not 0 <= stage + step < stages:
        turn += step
    if 0 <= turn < chunks:
        dependencies.append((other, Job(forward, microbatch, turn)))
    return dependencies


def _forward_order(stages: int, microbatches: int, chunks: int) -> list[Job]:
    """Return the forward jobs of a stage, in the order that every stage follows.

    As many microbatches as there are stages go through all chunks before the next ones start.
    """
    groups = range(0, microbatches, stages)
    return [
        Job(True, microbatch, chunk)
        for first in groups
        for chunk in range(chunks)
        for microbatch in range(first, min(first + stages, microbatches))
    ]


def _check_sizes(
    stages: int, microbatches: int, chunks: int, check_groups: bool = True
) -> tuple[int, int, int]:
    p = check_int("stages", stages, 1, MAX_SIZE, ConfigError)
    m = check_int("microbatches", microbatches, 1, MAX_SIZE, ConfigError)
    v = check_int("chunks of a stage", chunks, 1, MAX_SIZE, ConfigError)
    if check_groups and v > 1 and m % p:
        raise ConfigError(
            f"microbatches must be a multiple of {p} stages if stages have {v} chunks"
            f" (interleaved), got {m}. Use a multiple, or one chunk"
        )
    return p, m, v
