"""Schedules of a pipeline as tables: what each stage does at each tick, one job or nothing.

A stage says in which order it does its jobs (`gpipe`, `one_f_one_b`, `forward`); `timed` gives each
job the first tick at which what it waits for is done. A job takes one tick, a backward one too, as
the closed forms count it. With `chunks`, each stage has several runs of layers, chunk c of stage s
being the `c * stages + s`-th of the model (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxllm.errors import ConfigError
from jaxllm.whole import whole

Name = Literal["gpipe", "1f1b"]
MOST = 1 << 12  # stages, microbatches, chunks: beyond any published run


class Job(NamedTuple):
    """A microbatch through one chunk of a stage's layers, or its gradient back through them."""

    forward: bool
    microbatch: int
    chunk: int = 0


Order = Sequence[Job]  # of one stage


@dataclasses.dataclass(frozen=True)
class Schedule:
    """ticks: what each stage does, `[ticks][stages]`; None: it waits.

    Each job stands once for its stage, after what it waits for: a forward one after the chunk
    before it, a backward one after its own forward and after the backward one of the chunk behind.
    """

    stages: int
    microbatches: int
    chunks: int
    ticks: tuple[tuple[Job | None, ...], ...]

    def __post_init__(self) -> None:
        done: dict[tuple[int, Job], int] = {}
        for tick, row in enumerate(self.ticks):
            for stage, job in enumerate(row):
                if job is None:
                    continue
                if (stage, job) in done:
                    raise ConfigError(f"tick {tick}: stage {stage} did {job} before")
                first = needed(self.stages, self.chunks, stage, job)
                late = [other for other in first if done.get(other, tick) >= tick]
                if late:
                    raise ConfigError(
                        f"tick {tick}: stage {stage} does {job} before stage {late[0][0]} has done"
                        f" {late[0][1]}"
                    )
                done[stage, job] = tick

    @property
    def busy(self) -> int:
        """Ticks at which a stage does something, of all stages together."""
        return sum(job is not None for row in self.ticks for job in row)

    @property
    def idle_share(self) -> float:
        """Idle ticks of all ticks: for m microbatches of v chunks over p stages,
        (p - 1) / (v m + p - 1).
        """
        return 1 - self.busy / (len(self.ticks) * self.stages)

    @property
    def overhead(self) -> float:
        """Idle ticks of busy ones, as Megatron's papers count: (p - 1) / (v m)."""
        return len(self.ticks) * self.stages / self.busy - 1

    def in_flight(self, stage: int) -> int:
        """The most chunks' inputs that a stage has at once for their backward jobs."""
        held, most = 0, 0
        for row in self.ticks:
            job = row[stage]
            held += 0 if job is None else 1 if job.forward else -1
            most = max(most, held)
        return most

    def __str__(self) -> str:
        """A line for each stage: the microbatch of each tick, a backward job's in brackets; a, b,
        ...: of which chunk, where there are several.
        """
        width = len(str(self.microbatches - 1)) + 2 + (self.chunks > 1)

        def cell(job: Job | None) -> str:
            if job is None:
                return ".".center(width)
            text = str(job.microbatch)
            if self.chunks > 1:
                text += chr(ord("a") + job.chunk) if self.chunks <= 26 else f":{job.chunk}"
            return (text if job.forward else f"[{text}]").center(width)

        label = len(str(self.stages - 1))
        lines = (
            f"stage {stage:>{label}} " + "".join(cell(row[stage]) for row in self.ticks)
            for stage in range(self.stages)
        )
        return "\n".join(line.rstrip() for line in lines)


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forward jobs, then all backward ones, the last first (Huang et al. 2018, arXiv
    1811.06965): a stage holds all microbatches at once.
    """
    p, m, v = _sizes(stages, microbatches, chunks)
    there = _depth_first(p, m, v)
    back = [Job(False, *job[1:]) for job in reversed(there)]
    return timed([[*there, *back]] * p, m, v)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Each stage goes back as soon as it can (PipeDream-flush, Narayanan et al. 2020, arXiv
    2006.09503): it holds as many microbatches as there are stages from it on, however many are run.
    With chunks, interleaved as Megatron has it.
    """
    p, m, v = _sizes(stages, microbatches, chunks)
    there = _depth_first(p, m, v)
    back = [Job(False, job.microbatch, v - 1 - job.chunk) for job in there]
    orders = []
    for stage in range(p):
        ahead = p - stage - 1 if v == 1 else 2 * (p - stage - 1) + (v - 1) * p
        ahead = min(ahead, len(there))
        order = there[:ahead]
        for f, b in zip(there[ahead:], back, strict=False):
            order += [f, b]
        orders.append(order + back[len(there) - ahead :])
    return timed(orders, m, v)


def forward(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Forward jobs alone. Decoding is this with a chunk for each token: a group of rows goes round
    again when its token is drawn, which no tick waits for if there are as many groups as stages.
    """
    p, m, v = _sizes(stages, microbatches, chunks, whole_groups=False)
    return timed([_depth_first(p, m, v)] * p, m, v)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def timed(orders: Sequence[Order], microbatches: int, chunks: int) -> Schedule:
    """The schedule in which each stage does its jobs in this order, each as early as it can."""
    p, todo = len(orders), [list(order) for order in orders]
    done: set[tuple[int, Job]] = set()
    ticks = []
    while any(todo):
        row: list[Job | None] = [None] * p
        for stage, jobs in enumerate(todo):
            if jobs and done.issuperset(needed(p, chunks, stage, jobs[0])):
                row[stage] = jobs.pop(0)
        if not any(row):
            raise ConfigError("these orders of jobs wait for each other")
        done |= {(stage, job) for stage, job in enumerate(row) if job is not None}
        ticks.append(tuple(row))
    return Schedule(p, microbatches, chunks, tuple(ticks))


def needed(stages: int, chunks: int, stage: int, job: Job) -> list[tuple[int, Job]]:
    """Of which stages which jobs must be done before a stage can do this one."""
    forward, microbatch, chunk = job
    step = -1 if forward else 1
    found = [] if forward else [(stage, Job(True, microbatch, chunk))]
    other, turn = (stage + step) % stages, chunk
    if not 0 <= stage + step < stages:
        turn += step
    if 0 <= turn < chunks:
        found.append((other, Job(forward, microbatch, turn)))
    return found


def _depth_first(stages: int, microbatches: int, chunks: int) -> list[Job]:
    """Forward jobs of every stage: as many microbatches as there are stages go through all chunks
    before the next ones begin.
    """
    groups = range(0, microbatches, stages)
    return [
        Job(True, microbatch, chunk)
        for first in groups
        for chunk in range(chunks)
        for microbatch in range(first, min(first + stages, microbatches))
    ]


def _sizes(
    stages: int, microbatches: int, chunks: int, whole_groups: bool = True
) -> tuple[int, int, int]:
    p = whole("stages", stages, 1, MOST, ConfigError)
    m = whole("microbatches", microbatches, 1, MOST, ConfigError)
    v = whole("chunks of a stage", chunks, 1, MOST, ConfigError)
    if whole_groups and v > 1 and m % p:
        raise ConfigError(
            f"{m} microbatches are no multiple of {p} stages, which interleaved stages ({v} chunks"
            " each) need: give a multiple, or one chunk"
        )
    return p, m, v
