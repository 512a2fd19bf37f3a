"""Rows that share cache slots: pages, requests that wait or pause, and their unchanged results."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxllm
from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.errors import CapacityError
from jaxllm.generation.batching import pages as paging
from jaxllm.generation.batching.compile_ahead import LoopQuery, compile_planned, plan_usual
from jaxllm.generation.batching.pages import PageTable
from jaxllm.generation.batching.requests import Event, Request
from jaxllm.generation.batching.scheduler import serve
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.inside import Scale
from jaxllm.models.invariance import has_invariant_rows, make_invariant
from jaxllm.ops import native
from tests.generation.test_serve import check_equals_generate, events_by_id, make_request
from tests.tiny_models import random_model, tokens

SHAPE: Any = {"rows": 4, "capacity": 48, "chunk": 8, "burst": 4}


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "PAGE", 8)


def serve_all(lm: Any, requests: list[Any], slots: int | None, **options: Any) -> list[Event]:
    return list(serve(*lm, requests, **{**SHAPE, **options}, slots=slots))


def long_request(i: int, **changes: Any) -> Request:
    """Return a request whose text grows over several pages."""
    fields = {"prompt": tokens(1, 4 + 2 * i, seed=i)[0], "max_new_tokens": 20 + i}
    return make_request(i, **{**fields, **changes})


def find_results(events: list[Event]) -> dict[Any, tuple[list[Any], list[Any], Any]]:
    """Return the tokens, the bits of their log-probabilities and the finish of each request."""
    return {
        i: (
            [e.token for e in each],
            [None if e.logprob is None else float(e.logprob).hex() for e in each],
            each[-1].finish,
        )
        for i, each in events_by_id(events).items()
    }


def count_pauses(events: list[Event]) -> int:
    return sum(e.step.paused_rows for e in events)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.more)])
def test_texts_that_pause_equal_generate(name: str) -> None:
    """Four rows that would need 100 to 160 slots get 48: some pause, and no result changes."""
    lm = random_model(name)
    requests = [long_request(i) for i in range(8)]
    events = serve_all(lm, requests, 48)
    assert count_pauses(events) > 0
    for request in requests:
        check_equals_generate(lm, request, events_by_id(events)[request.id])


def one_layer(name: str = "llama", **changes: Any) -> Any:
    model, params = random_model(name, num_hidden_layers=1, **changes)
    return make_invariant(model), params


CASES: dict[str, Any] = {
    "plain": {},
    "draft": {"draft": jaxllm.PromptLookup(), "draft_tokens": 2},
    "prefix cache": {"prefix_cache": lambda: PrefixCache(1 << 24, 8)},
    "shared prefix": {"shared_prefixes": [tokens(1, 9, seed=3)[0]]},
    "wide bursts": {"burst": 16},
    "no bursts": {"burst": 1, "chunk": 3},
}
DAILY = ("plain", "draft", "shared prefix")


@pytest.mark.skipif(not native.is_enabled(), reason="shapes change bits without the kernels")
@pytest.mark.parametrize(
    "case",
    [case if case in DAILY else pytest.param(case, marks=pytest.mark.more) for case in CASES],
)
def test_pauses_change_no_bits(case: str) -> None:
    """Tokens and log-probabilities have the bits of a cache with room for all."""
    lm = one_layer()
    assert has_invariant_rows(*lm)
    start = tokens(1, 9, seed=3)[0]
    requests = [
        long_request(i, prompt=np.concatenate([start, tokens(1, 1 + 2 * i, seed=i)[0]]))
        for i in range(6)
    ]
    requests[2] = long_request(2, sampler=make_sampler(mirostat_tau=2.0, temperature=0.9))
    requests[3] = long_request(3, edits={"layers.0.mlp": Scale(0.5)})
    found = []
    for slots in (None, 56):
        options = {key: x() if callable(x) else x for key, x in CASES[case].items()}
        events = serve_all(lm, requests, slots, **options)
        assert (count_pauses(events) > 0) == (slots is not None)
        found.append(find_results(events))
    assert found[0] == found[1]


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "changes"), [("qwen3_5_text", {}), ("mistral", {"sliding_window": 12})]
)
def test_pauses_of_other_layers(name: str, changes: Any) -> None:
    """Recurrent states are computed again, and windows see what they would."""
    lm = random_model(name, **changes)
    requests = [long_request(i, sampler=jaxllm.GREEDY) for i in range(5)]
    events = serve_all(lm, requests, 48)
    assert count_pauses(events) > 0
    for request in requests:
        check_equals_generate(lm, request, events_by_id(events)[request.id])


def test_requests_wait_for_slots_in_their_order() -> None:
    """A request begins once its prompt has room; a later, shorter one does not overtake it."""
    lm = one_layer()
    requests = [
        long_request(i, prompt=tokens(1, size, seed=i)[0], max_new_tokens=8)
        for i, size in enumerate([30, 30, 3])
    ]
    events = serve_all(lm, requests, 48)
    first = {e.id: n for n, e in reversed(list(enumerate(events)))}
    assert first[0] < first[1] < first[2]
    assert all(e.step.busy_rows == 1 for e in events if e.id == 0)


def test_a_prompt_may_fill_all_slots() -> None:
    """A row's last token needs no slot, so a prompt of all of them has room; so has a long text."""
    lm = one_layer()
    full = long_request(0, prompt=tokens(1, 48, seed=1)[0], max_new_tokens=1)
    long = long_request(1, prompt=tokens(1, 9, seed=2)[0], max_new_tokens=40)
    for requests in ([full], [full, long], [long, full]):
        events = events_by_id(serve_all(lm, requests, 48))
        for request in requests:
            check_equals_generate(lm, request, events[request.id])


def test_the_earliest_request_never_pauses() -> None:
    """It has a token in each step after its first, and so has each once it is the earliest."""
    lm = one_layer()
    events = serve_all(lm, [long_request(i) for i in range(6)], 48, burst=1)
    assert count_pauses(events) > 0
    ended = 0
    for each in events_by_id(events).values():
        steps = [e.step.index for e in each if e.step.index > ended]
        assert steps == list(range(steps[0], steps[-1] + 1))
        ended = max(ended, steps[-1])


def test_paused_requests_can_be_cancelled() -> None:
    """A paused request ends when it is cancelled, and its pages stay with the others."""
    lm, seen = one_layer(), list[Event]()

    def cancels() -> bool:
        return count_pauses(seen) > 0

    requests = [long_request(i, is_cancelled=cancels if i == 3 else None) for i in range(4)]
    for event in serve(*lm, requests, **SHAPE, slots=48):
        seen.append(event)
    assert events_by_id(seen)[3][-1].finish == Finish.CANCELLED
    for request in requests[:3]:
        assert len(events_by_id(seen)[request.id]) == request.max_new_tokens


def test_slots_are_at_least_a_row() -> None:
    lm = one_layer()
    with pytest.raises(CapacityError, match="slots=40 is less than the capacity"):
        serve_all(lm, [], 40)
    with pytest.raises(CapacityError):
        serve_all(lm, [], 0)
    assert serve_all(lm, [make_request(0)], 10**6)  # room for all: no pages


def test_programs_are_compiled_ahead(compiled: list[str]) -> None:
    """A loop that shares slots runs what was compiled before."""
    lm, found = one_layer(), list[Any]()
    request = long_request(1, sampler=jaxllm.GREEDY, until=lambda token: False)

    def requests() -> Iterator[Any]:
        yield LoopQuery([jaxllm.GREEDY], lambda loop: found.append(plan_usual(loop, False)))
        for _ in compile_planned(found[0]):
            pass
        before.append(len(compiled))
        yield request

    before: list[int] = []
    jax.clear_caches()
    events = list(serve(*lm, requests(), **{**SHAPE, "capacity": 64}, slots=64))
    assert len(events) == request.max_new_tokens
    steps = [name for name in compiled[before[0] :] if name in ("_run", "run_rounds", "draw_rows")]
    assert steps == []


@settings(max_examples=50)
@given(moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.booleans()), max_size=30))
def test_pages_belong_to_one_row(moves: list[tuple[int, int, bool]]) -> None:
    """Whatever rows reserve and free, each page is free or of one row, and rows keep theirs."""
    table = PageTable(8, 10, 5, tuple(range(10)), {})
    for row, slots, frees in moves:
        if frees:
            held = dict(table.held)
            table = table._replace(free=(*table.free, *held.pop(row, ())), held=held)
            continue
        after = table.reserve(row, slots)
        if after is None:
            assert -(-slots // 8) - len(table.held.get(row, ())) > len(table.free)
            continue
        assert len(after.held.get(row, ())) * 8 >= slots
        for r, held_pages in table.held.items():
            assert after.held[r][: len(held_pages)] == held_pages
        table = after
        together = [*table.free, *(page for each in table.held.values() for page in each)]
        assert sorted(together) == list(range(10))
    page_RP = table.list_pages({0: 1}, 3)
    assert page_RP[0].tolist() == [10] * 5
    assert page_RP[1, : len(table.held.get(0, ()))].tolist() == list(table.held.get(0, ()))


def test_slots_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a server's rows share half the memory, and each has room for a whole text."""
    model, _ = one_layer()
    each = jaxllm.init_cache(model, 1, 1000).nbytes / 1000
    for memory, slots in ((None, 160), (10**9, 160), (int(200 * each), 100), (1, 40)):
        monkeypatch.setattr(paging, "machine_memory", lambda memory=memory: memory)
        assert abs(paging.fit_slots(model, 4, 40) - slots) <= 1
