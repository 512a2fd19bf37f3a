"""Simulated serving: waiting times follow queueing theory, and failures lose no request."""

import math

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.plan.simulate import Fleet, Machine, Workload, simulate

LOAD = Workload(rate=1.0, count=400, prompt=100, answer=5, seed=3)
MACHINE = Machine(prompt_time=lambda n: n / 1000, step_time=lambda rows: 0.01 + rows / 1000, rows=4)


def test_single_server_wait_equals_pollaczek_khinchine() -> None:
    """M/D/1 queue: for service time D at load rho, the mean wait is rho D / (2 (1 - rho))."""
    service_time, rate = 0.1, 7.0
    load = Workload(rate=rate, count=60_000, prompt=1, answer=1)
    served = simulate(
        load,
        Machine(prompt_time=lambda n: service_time, step_time=lambda rows: 0.0, rows=1),
        Fleet(replicas=1),
    )
    waits = [r.end_time - r.arrival - service_time for r in served]
    rho = rate * service_time
    assert np.mean(waits) == pytest.approx(rho * service_time / (2 * (1 - rho)), rel=0.03)


def test_single_request_takes_prompt_and_step_times() -> None:
    """Without queueing, the first token takes the prompt time and each later token one
    step time.
    """
    (served,) = simulate(
        Workload(rate=1, count=1, prompt=100, answer=5), MACHINE, Fleet(replicas=2)
    )
    assert served.first_token_time - served.arrival == pytest.approx(0.1)
    assert served.end_time - served.first_token_time == pytest.approx(4 * 0.011)


def test_cached_prefixes_are_computed_once_per_replica() -> None:
    """A replica computes a cached prefix once; routing by prefix computes fewer tokens, a smaller
    prefix cache more.
    """
    load = Workload(rate=5, count=200, prompt=100, answer=5, shared=80, groups=3)
    machine = Machine(prompt_time=lambda n: n / 1000, step_time=lambda r: 0.01, rows=8, prefixes=3)
    single = simulate(load, machine, Fleet(replicas=1))
    assert sum(r.prompt_computed for r in single) == 200 * 20 + 3 * 80
    four = simulate(load, machine, Fleet(replicas=4))
    by_prefix = simulate(load, machine, Fleet(replicas=4, route_by_prefix=True))
    assert sum(r.prompt_computed for r in four) <= 200 * 20 + 4 * 3 * 80
    assert sum(r.prompt_computed for r in by_prefix) < sum(r.prompt_computed for r in four)
    small_cache = simulate(load, Machine(**{**vars(machine), "prefixes": 1}), Fleet(replicas=1))
    assert sum(r.prompt_computed for r in small_cache) > sum(r.prompt_computed for r in single)


def test_separate_prefill_replicas_do_not_delay_decoding() -> None:
    """With long prompts, running requests decode without gaps if other replicas run the prompts."""
    load = Workload(rate=2, count=100, prompt=400, answer=20)
    machine = Machine(
        prompt_time=lambda n: n / 1000, step_time=lambda r: 0.01, rows=8, move_time=0.05
    )
    together, separate = (
        simulate(load, machine, Fleet(replicas=r, prefill_replicas=p)) for r, p in ((2, 0), (1, 1))
    )
    pace = [
        np.mean([(r.end_time - r.first_token_time) / 19 for r in served])
        for served in (together, separate)
    ]
    assert pace[1] == pytest.approx(0.01, rel=0.01)
    assert pace[0] > 1.5 * pace[1]
    first = min(r.first_token_time - r.arrival for r in separate)
    assert first == pytest.approx(0.45)  # prompt time plus transfer time


def test_failed_replica_requests_are_rerun() -> None:
    """Requests of a failed replica finish on others or after it recovers, and few prompts are
    computed again.
    """
    healthy = simulate(LOAD, MACHINE, Fleet(replicas=3))
    failing = simulate(
        LOAD, MACHINE, Fleet(replicas=3, failures=((100.0, 0, 50.0), (120.0, 1, 5.0)))
    )
    assert all(math.isfinite(r.end_time) and r.num_answered == LOAD.answer for r in failing)
    assert sum(r.prompt_computed for r in healthy) == 400 * 100
    recomputed = sum(r.prompt_computed for r in failing) - 400 * 100
    assert 0 <= recomputed <= 100 * 2 * 4
    outage = simulate(LOAD, MACHINE, Fleet(replicas=1, failures=((10.0, 0, 30.0),)))
    assert all(math.isfinite(r.end_time) for r in outage)
    assert not any(10.0 < r.end_time < 40.0 for r in outage)
    assert simulate(LOAD, MACHINE, Fleet(replicas=3)) == healthy


def test_simulate_refuses_invalid_workloads_and_fleets() -> None:
    for changes, message in (
        ({"rate": 0.0}, "rate must be above 0"),
        ({"shared": 100}, "shared must be a whole number from 0 to 99"),
        ({"answer": 0}, "answer must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            Workload(**{**vars(LOAD), **changes})
    with pytest.raises(ConfigError, match="at least one replica"):
        simulate(LOAD, MACHINE, Fleet(replicas=0))
