"""Pipeline schedules against the closed forms of the papers."""

import dataclasses
from fractions import Fraction

import pytest

from jaxllm.errors import ConfigError
from jaxllm.sharding.pipeline.schedule import (
    SCHEDULES,
    Job,
    Schedule,
    forward_only,
    gpipe,
    one_f_one_b,
)

SIZES = [(1, 1), (1, 5), (2, 2), (2, 6), (4, 1), (4, 4), (4, 16), (3, 7), (8, 24)]
CHUNKED = [(2, 4, 2), (4, 4, 2), (4, 8, 3), (3, 9, 4), (8, 16, 2)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m", "v"), [*((p, m, 1) for p, m in SIZES), *CHUNKED])
def test_ticks_and_bubble_equal_closed_forms(name: str, p: int, m: int, v: int) -> None:
    """For p stages of v chunks and m microbatches: 2 (v m + p - 1) ticks, bubble
    (p - 1)/(v m + p - 1), overhead (p - 1)/(v m).
    """
    schedule = SCHEDULES[name](p, m, v)
    assert len(schedule.ticks) == 2 * (v * m + p - 1)
    assert schedule.busy_ticks == 2 * v * m * p
    assert schedule.bubble_fraction == pytest.approx(float(Fraction(p - 1, v * m + p - 1)))
    assert schedule.bubble_overhead == pytest.approx(float(Fraction(p - 1, v * m)))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_holds_all_one_f_one_b_few(p: int, m: int) -> None:
    """GPipe has all m microbatches in flight; 1F1B at most min(p - s, m) on stage s."""
    assert [gpipe(p, m).max_in_flight(s) for s in range(p)] == [m] * p
    assert [one_f_one_b(p, m).max_in_flight(s) for s in range(p)] == [
        min(p - s, m) for s in range(p)
    ]


@pytest.mark.parametrize(("p", "m", "v"), CHUNKED)
def test_interleaved_in_flight_equals_megatron(p: int, m: int, v: int) -> None:
    """Stage 0 has p (v - 1) + 2 (p - 1) + 1 chunks in flight, or all of them."""
    most = min(m * v, p * (v - 1) + 2 * (p - 1) + 1)
    assert one_f_one_b(p, m, v).max_in_flight(0) == most
    assert gpipe(p, m, v).max_in_flight(0) == m * v


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
        assert schedule.bubble_fraction == pytest.approx(1 - groups / p, abs=0.02)


def test_schedule_prints_one_line_per_stage() -> None:
    assert str(one_f_one_b(3, 4)).splitlines() == [
        "stage 0  0  1  2  .  . [0] 3 [1] . [2] . [3]",
        "stage 1  .  0  1  . [0] 2 [1] 3 [2] . [3] .",
        "stage 2  .  .  0 [0] 1 [1] 2 [2] 3 [3] .  .",
    ]


def test_schedule_refuses_too_early_or_repeated_jobs() -> None:
    good = one_f_one_b(2, 2)
    first = good.ticks[0]
    with pytest.raises(ConfigError, match=r"stage 0 repeats Job"):
        dataclasses.replace(good, ticks=(first, first))
    with pytest.raises(ConfigError, match=r"stage 1 does .* before stage 0 has done"):
        Schedule(2, 1, 1, ((Job(True, 0), Job(True, 0)),))
    with pytest.raises(ConfigError, match=r"stage 0 does .*forward=False.* before stage 0"):
        Schedule(1, 1, 1, ((Job(False, 0),),))


def test_schedule_refuses_invalid_sizes() -> None:
    with pytest.raises(ConfigError, match=r"multiple of 4 stages .*, got 6"):
        one_f_one_b(4, 6, 2)
    for sizes in ((0, 1), (1, 0), (2, 2.5), (2, 2, 0)):
        with pytest.raises(ConfigError):
            gpipe(*sizes)  # type: ignore[arg-type]
