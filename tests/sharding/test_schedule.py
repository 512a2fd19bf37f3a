"""Pipeline schedules against the closed forms of the papers."""

from fractions import Fraction

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.sharding.pipeline.schedule import (
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
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_ticks_and_bubble_equal_closed_forms(name: str, p: int, m: int) -> None:
    """For p stages and m microbatches: 2 (m + p - 1) ticks, bubble (p - 1)/(m + p - 1), overhead (p
    - 1)/m.
    """
    schedule = SCHEDULES[name](p, m)
    assert len(schedule.ticks) == 2 * (m + p - 1)
    assert count_busy(schedule) == 2 * m * p
    assert idle_share(schedule) == pytest.approx(float(Fraction(p - 1, m + p - 1)))
    assert overhead(schedule) == pytest.approx(float(Fraction(p - 1, m)))


def test_bubble_equals_published_values() -> None:
    """Bubble fraction 75 %, 42.86 %, 15.8 % and overhead 300 %, 75 %, 18.75 %, as in the papers."""
    found = [gpipe(4, m) for m in (1, 4, 16)]
    assert [round(idle_share(s), 4) for s in found] == [0.75, 0.4286, 0.1579]
    assert [round(overhead(s), 4) for s in found] == [3.0, 0.75, 0.1875]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m", "v"), CHUNKED)
def test_chunks_divide_bubble_overhead(name: str, p: int, m: int, v: int) -> None:
    """With v chunks a stage the overhead is (p - 1)/(v m)."""
    schedule = SCHEDULES[name](p, m, v)
    assert count_busy(schedule) == 2 * m * p * v
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


@pytest.mark.parametrize(("p", "groups", "tokens"), [(2, 2, 5), (4, 4, 9), (4, 8, 3), (3, 5, 1)])
def test_decoding_is_full_with_enough_groups(p: int, groups: int, tokens: int) -> None:
    """With at least as many row groups as stages, decoding idles only at the start and the end."""
    schedule = forward_only(p, groups, tokens)
    assert len(schedule.ticks) == groups * tokens + p - 1


@pytest.mark.parametrize(("p", "groups"), [(4, 1), (4, 3), (8, 2)])
def test_decoding_idles_with_few_groups(p: int, groups: int) -> None:
    """With fewer groups than stages, the idle fraction approaches 1 - groups/p."""
    tokens = 50
    schedule = forward_only(p, groups, tokens)
    assert len(schedule.ticks) == p * tokens + groups - 1
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
