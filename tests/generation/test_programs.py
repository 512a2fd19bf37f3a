"""Tests of choosing among compiled programs, and of requests that wait for theirs."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxllm
from jaxllm.generation.batching.compile_ahead import LoopQuery, compile_planned, plan_usual
from jaxllm.generation.batching.programs import Family, Job, Programs
from jaxllm.generation.batching.requests import Request
from jaxllm.generation.batching.scheduler import serve
from jaxllm.generation.loops.microbatch import TokenRun
from tests.generation.test_pages import events_by_id, one_layer

FAMILY = Family(0)
FIRST = [Job(FAMILY, "fill"), Job(FAMILY, "step", 1, 32), Job(FAMILY, "step", 8, 1)]
USUAL = [Job(FAMILY, "step", 4, 1), Job(FAMILY, "joined", 4, 8), Job(FAMILY, "joined", 8, 4)]
STEP_PROGRAMS = {"_run", "run_rounds", "draw_rows", "fill_row"}


def run_of(row: int, tokens: int, **changes: Any) -> TokenRun:
    """Return a text's first tokens, of which the last is an output."""
    at_T = np.arange(tokens)
    return TokenRun((row,), at_T, at_T, at_T, at_T, at_T == tokens - 1, tokens)._replace(**changes)


def sizes_of(programs: Programs, *groups: list[TokenRun]) -> list[tuple[int, Any, Any]]:
    """Return the tokens, rows and width of the groups that a step runs."""
    fitted, _ = programs.fit_groups(0, groups, joins=True)
    return [(sum(run.index_T.size for run in one.runs), one.rows, one.width) for one in fitted]


def test_a_step_runs_the_smallest_compiled_program() -> None:
    programs = Programs(8)
    part, single = [run_of(7, 6)], [run_of(row, 1) for row in range(3)]
    assert programs.fit_groups(0, [part, single], joins=True)[1]  # nothing compiles ahead
    assert sizes_of(programs, part, single) == [(6, None, None), (3, None, None)]
    programs.plan(None, FIRST, USUAL, chooses=True)
    programs.hurry([FAMILY])
    with programs.compiling():
        assert programs.find_missing([FAMILY]) == [FAMILY]
        for job in FIRST:
            programs.add(job)
        assert not programs.find_missing([FAMILY])
        assert programs.find_missing([Family(1), Family(0, read=("logits",))]) != []
        assert sizes_of(programs, part, single) == [(6, 1, 32), (3, 8, 1)]
        assert sizes_of(programs, [run_of(0, 70)]) == [(32, 1, 32), (32, 1, 32), (6, 1, 32)]
        two = [run_of(0, 20), run_of(1, 20)]
        assert sizes_of(programs, two) == [(20, 1, 32), (20, 1, 32)]
        programs.add(USUAL[0])
        assert sizes_of(programs, part, single) == [(6, 1, 32), (3, 4, 1)]
        programs.add(Job(FAMILY, "joined", 8, 16))
        assert sizes_of(programs, part, single) == [(6, None, 16), (3, 8, None)]
        programs.add(Job(FAMILY, "joined", 4, 8))
        assert sizes_of(programs, part, single) == [(6, None, 8), (3, 4, None)]
        five = [run_of(row, 1) for row in range(5)]
        assert programs.fit_part(FAMILY, 30, 5) == 16
        assert sizes_of(programs, part, five) == [(6, None, 16), (5, 8, None)]
    assert sizes_of(programs, part, single) == [(6, None, None), (3, None, None)]


def test_sites_are_read_by_programs_for_one_token() -> None:
    programs, family = Programs(8), Family(0, read=("logits",))
    programs.plan(None, [*FIRST, Job(family, "step", 8, 1)], chooses=True)
    reading = run_of(0, 6, read=("logits",))
    with programs.compiling():
        for job in (*FIRST, Job(family, "step", 8, 1)):
            programs.add(job)
        assert sizes_of(programs, [reading]) == [(5, 1, 32), (1, 8, 1)]


def test_programs_compile_in_the_order_of_need() -> None:
    programs = Programs(8)
    programs.plan("loop", FIRST, USUAL, chooses=True)
    programs.hurry([FAMILY])
    with programs.compiling():
        taken = []
        for _ in FIRST:
            assert programs.is_urgent
            found = programs.take(waits=False)
            assert found is not None and found[0] == "loop"
            taken.append(found[1])
            programs.add(found[1])
        assert taken == FIRST and not programs.is_urgent
        sizes_of(programs, [run_of(7, 4)], [run_of(row, 1) for row in range(5)])
        assert programs.take(waits=False) == ("loop", USUAL[2])  # that step missed it
        later = Job(Family(1), "step", 8, 1)
        programs.plan("other", [later], chooses=True)
        programs.hurry([later.family])
        assert programs.take(waits=False) == ("other", later)  # a request waits for it
        programs.add(later)
        assert programs.take(waits=False) == ("loop", USUAL[0])
        programs.add(USUAL[0])
        programs.forget()
        assert programs.find_missing([FAMILY]) and programs.take(waits=False) == ("loop", FIRST[0])
    programs.close()
    assert programs.take(waits=True) is None


def make_requests(count: int) -> list[Request]:
    """Return requests of many lengths, some greedy. The last needs programs that no other needs."""
    rng, requests = np.random.default_rng(0), list[Request]()
    for i in range(count):
        biases = {token: token / 100 for token in range(70)} if i == count - 1 else None
        requests.append(
            Request(
                id=i,
                prompt=rng.integers(3, 90, 1 + 7 * i % 40).tolist(),
                max_new_tokens=8,
                sampler=jaxllm.make_sampler(temperature=i % 2, logit_bias=biases),
                until=lambda token: False,
            )
        )
    return requests


def test_running_rows_wait_for_no_compiler(compiled: list[str]) -> None:
    """Once the first programs are there, no other compiles though steps have all sizes; a request
    of a new form waits while others run; and texts are those of a loop that compiles at need.
    """
    model, requests, sizes = one_layer(), make_requests(9), {"rows": 5, "capacity": 64, "chunk": 32}
    expected = events_by_id(serve(*model, requests, **sizes))
    jax.clear_caches()
    found, seen = list[Programs](), list[Any]()

    def arrive() -> Iterator[Any]:
        samplers = [request.sampler for request in requests[:2]]
        yield LoopQuery(samplers, lambda loop: found.append(plan_usual(loop, adapters=False)))
        compiling = compile_planned(found[0])
        while found[0].is_urgent:
            next(compiling)
        before = len(compiled)
        yield requests[0]
        yield requests[-1]  # no program has its form
        for request in requests[1:-1]:
            yield request
            yield None
        while not any(event.id == 7 for event in seen):
            yield None
        assert not any(event.id == 8 for event in seen)
        assert not STEP_PROGRAMS & {*compiled[before:]}
        while not any(event.id == 8 for event in seen):
            next(compiling)
            yield None

    for event in serve(*model, arrive(), **sizes):
        seen.append(event)
    answers = events_by_id(seen)
    assert {i: [(e.token, e.logprob) for e in answers[i]] for i in answers} == {
        i: [(e.token, e.logprob) for e in expected[i]] for i in expected
    }
