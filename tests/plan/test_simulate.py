"""Simulated requests wait as long as queueing theory says, and nothing that fails is lost."""

import math

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.plan.simulate import Fleet, Machine, Workload, simulate

LOAD = Workload(rate=1.0, count=400, prompt=100, answer=5, seed=3)
MACHINE = Machine(prompt_time=lambda n: n / 1000, step_time=lambda rows: 0.01 + rows / 1000, rows=4)


def test_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: of requests that take D at load rho the mean wait is rho D / (2 (1 - rho))."""
    lasting, rate = 0.1, 7.0
    load = Workload(rate=rate, count=60_000, prompt=1, answer=1)
    served = simulate(
        load,
        Machine(prompt_time=lambda n: lasting, step_time=lambda rows: 0.0, rows=1),
        Fleet(replicas=1),
    )
    waits = [r.end_time - r.arrival - lasting for r in served]
    rho = rate * lasting
    assert np.mean(waits) == pytest.approx(rho * lasting / (2 * (1 - rho)), rel=0.03)


def test_a_request_alone_takes_its_prompt_and_its_steps() -> None:
    (served,) = simulate(
        Workload(rate=1, count=1, prompt=100, answer=5), MACHINE, Fleet(replicas=2)
    )
    assert served.first_token_time - served.arrival == pytest.approx(0.1)
    assert served.end_time - served.first_token_time == pytest.approx(4 * 0.011)


def test_prefixes_that_are_kept_are_run_once_on_each_replica() -> None:
    load = Workload(rate=5, count=200, prompt=100, answer=5, shared=80, groups=3)
    keeping = Machine(prompt_time=lambda n: n / 1000, step_time=lambda r: 0.01, rows=8, prefixes=3)
    alone = simulate(load, keeping, Fleet(replicas=1))
    assert sum(r.prompt_computed for r in alone) == 200 * 20 + 3 * 80
    several = simulate(load, keeping, Fleet(replicas=4))
    near = simulate(load, keeping, Fleet(replicas=4, route_by_prefix=True))
    assert sum(r.prompt_computed for r in several) <= 200 * 20 + 4 * 3 * 80
    assert sum(r.prompt_computed for r in near) < sum(r.prompt_computed for r in several)
    few = simulate(load, Machine(**{**vars(keeping), "prefixes": 1}), Fleet(replicas=1))
    assert sum(r.prompt_computed for r in few) > sum(r.prompt_computed for r in alone)


def test_prompts_that_run_elsewhere_hold_no_text_up() -> None:
    """With long prompts, tokens of running texts come without gaps once prompts have moved away."""
    load = Workload(rate=2, count=100, prompt=400, answer=20)
    moving = Machine(
        prompt_time=lambda n: n / 1000, step_time=lambda r: 0.01, rows=8, move_time=0.05
    )
    together, apart = (
        simulate(load, moving, Fleet(replicas=r, prefill_replicas=p)) for r, p in ((2, 0), (1, 1))
    )
    pace = [
        np.mean([(r.end_time - r.first_token_time) / 19 for r in served])
        for served in (together, apart)
    ]
    assert pace[1] == pytest.approx(0.01, rel=0.01)
    assert pace[0] > 1.5 * pace[1]
    first = min(r.first_token_time - r.arrival for r in apart)
    assert first == pytest.approx(0.45)  # of the prompt, and of moving it


def test_what_a_replica_had_is_run_by_others() -> None:
    calm = simulate(LOAD, MACHINE, Fleet(replicas=3))
    hurt = simulate(LOAD, MACHINE, Fleet(replicas=3, failures=((100.0, 0, 50.0), (120.0, 1, 5.0))))
    assert all(math.isfinite(r.end_time) and r.num_answered == LOAD.answer for r in hurt)
    assert sum(r.prompt_computed for r in calm) == 400 * 100
    again = sum(r.prompt_computed for r in hurt) - 400 * 100
    assert 0 <= again <= 100 * 2 * 4
    down = simulate(LOAD, MACHINE, Fleet(replicas=1, failures=((10.0, 0, 30.0),)))
    assert all(math.isfinite(r.end_time) for r in down)
    assert not any(10.0 < r.end_time < 40.0 for r in down)
    assert simulate(LOAD, MACHINE, Fleet(replicas=3)) == calm


def test_what_cannot_be_is_refused() -> None:
    for changes, said in (
        ({"rate": 0.0}, "rate must be above 0"),
        ({"shared": 100}, "shared must be a whole number from 0 to 99"),
        ({"answer": 0}, "answer must be"),
    ):
        with pytest.raises(ConfigError, match=said):
            Workload(**{**vars(LOAD), **changes})
    with pytest.raises(ConfigError, match="at least one replica"):
        simulate(LOAD, MACHINE, Fleet(replicas=0))
