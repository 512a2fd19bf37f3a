"""Pipeline schedules against the closed forms of the papers."""

from fractions import Fraction

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.research.pipeline.schedule import (
    SCHEDULES,
    Job,
    Schedule,
    forward_only,
    gpipe,
    job_dependencies,
    one_f_one_b,
)

SIZES = [(1, 1), (1, 5), (2, 2), (2, 6), (4, 1), (4, 4), (4, 16), (3, 7), (8, 24)]
CHUNKED = [(2, 4, 2), (4, 4, 2), (4, 8, 3), (3, 9, 4), (8, 16, 2)]


def count_busy(schedule: Schedule) -> int:
    """Return the number of busy ticks, summed over stages."""
    return sum(job is not None for row in schedule.ticks for job in row)


def idle_share(schedule: Schedule) -> float:
    """Return the idle share of all ticks."""
    return 1 - count_busy(schedule) / (len(schedule.ticks) * schedule.stages)


def overhead(schedule: Schedule) -> float:
    """Return the idle ticks per busy tick, as in Megatron's papers."""
    return len(schedule.ticks) * schedule.stages / count_busy(schedule) - 1


def max_in_flight(schedule: Schedule, stage: int) -> int:
    """Return the maximum number of inputs that a stage stores for backward jobs."""
    jobs = [row[stage] for row in schedule.ticks]
    return int(np.cumsum([0 if x is None else 1 if x.forward else -1 for x in jobs]).max())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m", "v"), [*((p, m, 1) for p, m in SIZES), *CHUNKED])
def test_ticks_and_bubble_equal_closed_forms(name: str, p: int, m: int, v: int) -> None:
    """For p stages of v chunks and m microbatches: 2 (v m + p - 1) ticks, bubble
    (p - 1)/(v m + p - 1), overhead (p - 1)/(v m).
    """
    schedule = SCHEDULES[name](p, m, v)
    assert len(schedule.ticks) == 2 * (v * m + p - 1)
    assert count_busy(schedule) == 2 * v * m * p
    assert idle_share(schedule) == pytest.approx(float(Fraction(p - 1, v * m + p - 1)))
    assert overhead(schedule) == pytest.approx(float(Fraction(p - 1, v * m)))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_holds_all_one_f_one_b_few(p: int, m: int) -> None:
    """GPipe has all m microbatches in flight; 1F1B at most min(p - s, m) on stage s."""
    assert [max_in_flight(gpipe(p, m), s) for s in range(p)] == [m] * p
    assert [max_in_flight(one_f_one_b(p, m), s) for s in range(p)] == [
        min(p - s, m) for s in range(p)
    ]


@pytest.mark.parametrize(("p", "m", "v"), CHUNKED)
def test_interleaved_in_flight_equals_megatron(p: int, m: int, v: int) -> None:
    """Stage 0 has p (v - 1) + 2 (p - 1) + 1 chunks in flight, or all of them."""
    most = min(m * v, p * (v - 1) + 2 * (p - 1) + 1)
    assert max_in_flight(one_f_one_b(p, m, v), 0) == most
    assert max_in_flight(gpipe(p, m, v), 0) == m * v


@pytest.mark.parametrize(
    ("p", "groups", "tokens"),
    [(2, 2, 5), (4, 4, 9), (4, 8, 3), (3, 5, 1), (4, 1, 50), (4, 3, 50), (8, 2, 50)],
)
def test_decoding_ticks_equal_closed_form(p: int, groups: int, tokens: int) -> None:
    """With as many row groups as stages, decoding idles only at its ends; with fewer, the idle
    fraction approaches 1 - groups/p.
    """
    schedule = forward_only(p, groups, tokens)
    assert len(schedule.ticks) == max(p, groups) * tokens + min(p, groups) - 1
    if groups < p:
        assert idle_share(schedule) == pytest.approx(1 - groups / p, abs=0.02)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m", "v"), [(3, 4, 1), *CHUNKED])
def test_jobs_run_once_after_their_dependencies(name: str, p: int, m: int, v: int) -> None:
    done: dict[tuple[int, Job], int] = {}
    for tick, row in enumerate(SCHEDULES[name](p, m, v).ticks):
        for stage, job in enumerate(row):
            if job is None:
                continue
            assert (stage, job) not in done
            assert all(done[other] < tick for other in job_dependencies(p, v, stage, job))
            done[stage, job] = tick
    assert len(done) == 2 * m * p * v


def test_schedule_refuses_invalid_sizes() -> None:
    with pytest.raises(ConfigError, match=r"multiple of 4 stages .*, got 6"):
        one_f_one_b(4, 6, 2)
    for sizes in ((0, 1), (1, 0), (2, 2.5), (2, 2, 0)):
        with pytest.raises(ConfigError):
            gpipe(*sizes)  # type: ignore[arg-type]
