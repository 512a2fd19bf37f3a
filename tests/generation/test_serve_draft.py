"""Speculation in `serve`: whatever the draft proposes, each request keeps every bit."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.errors import ConfigError, SamplingError
from jaxllm.generation.batching import scheduler
from jaxllm.generation.batching.requests import Event, Request
from jaxllm.generation.batching.scheduler import serve
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.sampling.grammar_mask import grammar_mask
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.generation.sampling.sampler import Sampler
from jaxllm.grammar.grammar import Grammar
from jaxllm.grammar.vocabulary import make_vocabulary
from jaxllm.models.invariance import make_invariant
from jaxllm.ops import native
from tests.generation.test_serve import RisingTemperature, events_by_id
from tests.grammar.vocabularies import vocabulary
from tests.tiny_models import VOCAB, random_model, tokens

pytestmark = pytest.mark.skipif(not native.is_enabled(), reason="no native kernels")

CAPACITY = 72


class Pace:
    """Drafts in every round, or in `drafting` rounds after as many without."""

    clock = staticmethod(float)
    drafting = 0

    def __init__(self) -> None:
        self.drafts, self.left = not self.drafting, self.drafting

    def record(self, rounds: int, tokens: float, seconds: float) -> None:
        self.left -= rounds
        if self.drafting and self.left <= 0:
            self.drafts, self.left = not self.drafts, self.drafting


@pytest.fixture(autouse=True)
def _pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no time: what is drafted follows from the requests."""
    monkeypatch.setattr(Pace, "drafting", 0)
    monkeypatch.setattr(scheduler, "DraftPace", Pace)


TEXT = tokens(1, 40, seed=7)[0]
REGEX, SCHEMA = r"([a-c]{1,3}-)*x", {"type": "array", "items": {"enum": [1, "b", None]}}


@cache
def target() -> Any:
    model, params = random_model("llama")
    return make_invariant(model), params


@cache
def draft_of(name: str) -> Any:
    """Return a draft: none, the target, another model with fewer layers, or the text itself."""
    if name == "another":
        return random_model("llama", num_hidden_layers=1)
    return {"none": None, "itself": target(), "lookup": jaxllm.PromptLookup()}[name]


@cache
def samplers() -> Sequence[Sampler]:
    """Greedy; penalties and truncations; a stateful processor; an automaton; a JSON grammar."""
    words = make_vocabulary(vocabulary("demo:llama").tokenizer, VOCAB, [2])
    penalties = make_sampler(
        temperature=0.4, top_k=40, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.2
    )
    regex = grammar_mask(Grammar.regex(REGEX), words)
    schema = grammar_mask(Grammar.json_schema(SCHEMA), words, by_text=True)
    flatter = RisingTemperature(jnp.zeros(()))
    sampled = make_sampler(temperature=0.7)
    return (
        jaxllm.GREEDY,
        penalties,
        Sampler((flatter,)),
        sampled.replace(processors=(regex, *sampled.processors)),
        sampled.replace(processors=(schema, *sampled.processors)),
    )


def make_request(i: int, **changes: Any) -> Request:
    """Return the i-th of many requests; some prompts repeat themselves, some begin alike."""
    size = 1 + 7 * i % 30
    fields = {
        "id": i,
        "prompt": np.tile(TEXT[i % 3 : i % 3 + 5], 8)[:size] if i % 2 else TEXT[:size],
        "max_new_tokens": 1 + 11 * i % 29,
        "sampler": samplers()[i % 5],
        "seed": 2**40 + i,
        "eos_token_ids": [2, 3 + i, 50] if i % 3 else [],
        "top_logprobs": (0, 3, 12)[i % 3],
    }
    return Request(**{**fields, **changes})


def results(events: Any) -> dict[Any, list[Any]]:
    """Return what must be equal, to the last bit."""
    found = events_by_id(events)
    assert all(e.error is None for each in found.values() for e in each)
    return {
        i: [(e.token, e.logprob, e.finish, e.top_logprobs) for e in each]
        for i, each in found.items()
    }


def run(requests: Any, draft: str, **changes: Any) -> list[Event]:
    sizes: Any = {"rows": 4, "capacity": CAPACITY, "chunk": 16, **changes}
    return list(serve(*target(), requests, **sizes, draft=draft_of(draft)))


@cache
def expected() -> dict[Any, list[Any]]:
    """Return the results of twenty requests without a draft."""
    return results(run([make_request(i) for i in range(20)], "none"))


@pytest.mark.parametrize(
    "draft",
    [
        "lookup",
        pytest.param("itself", marks=pytest.mark.more),
        pytest.param("another", marks=pytest.mark.full),
    ],
)
def test_draft_keeps_every_bit(draft: str) -> None:
    """Tokens, log-probabilities, likeliest tokens and ends are those without a draft; a draft that
    is the model itself is right, where the text goes on.
    """
    events = run([make_request(i) for i in range(20)], draft)
    assert results(events) == expected()
    proposed, accepted, drafts = events[-1].step.draft_stats
    assert proposed >= drafts > 0
    last = [each[-1].draft_stats for each in events_by_id(events).values()]
    assert events[-1].step.draft_stats == tuple(map(sum, zip(*last, strict=True)))
    if draft == "itself":
        assert accepted == proposed
        assert drafts < 0.4 * events[-1].step.generated_tokens
    elif draft == "lookup":
        assert 0 < accepted < proposed


def test_resting_draft_keeps_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that rests and comes back changes nothing, and has then read what it missed."""
    monkeypatch.setattr(Pace, "drafting", 2)
    events = run([make_request(i, max_new_tokens=20) for i in (0, 2)], "itself", burst=2)
    found = results(events)
    assert found == results(run([make_request(i, max_new_tokens=20) for i in (0, 2)], "none"))
    proposed, accepted, drafts = events[-1].step.draft_stats
    assert 0 < accepted == proposed
    assert drafts < 12


@pytest.mark.more
@pytest.mark.parametrize(
    ("draft", "rows", "burst", "cached"),
    [
        ("another", 2, 1, True),
        pytest.param("lookup", 4, 16, False, marks=pytest.mark.full),
    ],
)
def test_results_are_independent_of_draft_and_company(
    draft: str, rows: int, burst: int, cached: bool
) -> None:
    """In any order, batch and burst, with and without a prefix cache and `until`, while requests
    join late and one is cancelled, the others' results are those without a draft.
    """
    seen: list[int] = []
    # Each set of samplers is a program; other drafts run with all of them.
    used = [i for i in range(20) if not cached or i % 5 in (1, 4)]
    order = np.random.default_rng(rows).permutation(used)[:12].tolist()
    stopped = next(i for i in order if len(expected()[i]) > 5)

    def arrive() -> Iterator[Request | None]:
        for number, i in enumerate(order):
            changes: Any = {"until": lambda _: False} if i % 4 == 1 else {}
            if i == stopped:
                changes = {"until": lambda token: bool(seen.append(token)),
                           "is_cancelled": lambda: len(seen) > 2}  # fmt: skip
            if number % 3 == 2:
                yield None
            yield make_request(i, **changes)

    store = PrefixCache(1 << 24, 8) if cached else None
    found = results(run(arrive(), draft, rows=rows, burst=burst, prefix_cache=store))
    part = found.pop(stopped)
    whole = expected()[stopped]
    assert part == [*whole[: len(part) - 1], (None, None, Finish.CANCELLED, None)] != whole
    assert found == {i: expected()[i] for i in order if i != stopped}


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_prefix_cache_holds_no_rejected_token(draft: str) -> None:
    """A second round of the same requests finds prompts and answers, and nothing rejected."""
    store = PrefixCache(1 << 24, 8)
    requests = [make_request(i, max_new_tokens=20) for i in range(5, 11)]
    wanted = results(run(requests, "none"))
    for _ in range(2):
        events = run(requests, draft, prefix_cache=store)
        assert results(events) == wanted
    assert sum(each[0].cached_tokens for each in events_by_id(events).values()) > 50
    if draft == "itself":  # which ran the prompts that the model found
        assert events[-1].step.draft_stats.accepted == events[-1].step.draft_stats.proposed


def end_after(calls: list[int], count: int, token: int) -> bool:
    """Return whether this is the token number `count`."""
    calls.append(token)
    return len(calls) == count


def test_until_stops_within_a_pass() -> None:
    """A request that ends by its `until` yields nothing of the pass after that token."""
    request = make_request(10, max_new_tokens=40, eos_token_ids=[])
    [whole] = results(run([request], "itself")).values()
    for count in range(1, 9):
        calls: list[int] = []
        is_last = partial(end_after, calls, count)
        other = make_request(0, max_new_tokens=20)
        stops = make_request(10, max_new_tokens=40, eos_token_ids=[], until=is_last)
        events = run([stops, other], "itself")
        found = results(events)[10]
        assert [x[:2] for x in found] == [x[:2] for x in whole[:count]]
        assert found[-1][2] == Finish.STOP and len(calls) == count
        assert events[-1].step.generated_tokens == count + 20
    assert events[-1].step.draft_stats.accepted > 0


@pytest.mark.more
def test_nan_draft_and_nan_row_are_isolated() -> None:
    """Logits that are not finite after a rejected draft end nothing; a row's own end the row, with
    the same tokens as without a draft.
    """
    model, params = target()
    plain = [make_request(i, sampler=jaxllm.GREEDY, eos_token_ids=[]) for i in (2, 5, 8)]
    used = {token for each in results(run(plain, "none")).values() for token, *_ in each}
    used |= {int(token) for request in plain for token in request.prompt}
    bad = min(set(range(4, VOCAB)) - used)
    weight = params["embed_tokens"]["weight"].at[bad].set(jnp.nan)
    broken = {**params, "embed_tokens": {"weight": weight}}
    # A draft whose greedy choice is always `bad`, and a request that draws `bad` itself.
    head = {"weight": 0 * params["lm_head"]["weight"].at[bad].set(0)}
    constant = {**params, "lm_head": head}
    favors = make_sampler(logit_bias={bad: 100.0})
    requests = [*plain, make_request(11, sampler=favors, max_new_tokens=5, eos_token_ids=[])]
    sizes: Any = {"rows": 4, "capacity": CAPACITY}
    wanted = results(serve(model, broken, requests, **sizes))
    assert [x[2] for x in wanted[11]] == [None, Finish.NON_FINITE]
    for its in (constant, broken, params):
        found = serve(model, broken, requests, **sizes, draft=(model, its))
        assert results(found) == wanted


def test_lm_serve_returns_draft_stats(shallow: Any) -> None:
    """A text of a grammar that repeats itself: fewer passes, with the same completion."""
    lm = jaxllm.load(shallow("llama"), dtype="float32")
    regex = {"regex": "(the cat sat on the mat, ){9}", "temperature": 1.0, "seed": 4}
    request = {"prompt": "Once", "max_new_tokens": 40, "stop_strings": ["zebra"], **regex}
    [(_, plain)] = lm.serve([request], rows=1, capacity=64)
    assert plain.draft_stats is None
    for draft in (lm, jaxllm.PromptLookup(ngram=2)):
        [(_, found)] = lm.serve([request], rows=1, capacity=64, draft=draft, draft_tokens=3)
        assert found == dataclasses.replace(plain, draft_stats=found.draft_stats)
        proposed, accepted, drafts = found.draft_stats
        assert 8 < accepted <= proposed <= 3 * drafts


def test_draft_does_not_recompile_for_new_requests(compiled: list[str]) -> None:
    """Other prompts, budgets and seeds compile nothing."""

    def served(seed: int) -> int:
        each = [
            make_request(0, id=i, prompt=tokens(1, 9 + i)[0], max_new_tokens=8, seed=seed + i)
            for i in range(5)
        ]
        return len(run(each, "another"))

    assert served(0) == 40
    before = len(compiled)
    assert served(3) == 40
    assert compiled[before:] == []


def test_unsupported_drafts_are_refused() -> None:
    model, params = target()

    def refuse(match: str, error: Any, draft: Any, lm: Any = (model, params), **sizes: Any) -> None:
        with pytest.raises(error, match=match):
            next(serve(*lm, [make_request(0)], **{"capacity": 64, **sizes}, draft=draft))

    lookup = jaxllm.PromptLookup()
    rounding = model.clone(precision=dataclasses.replace(model.precision, invariant=False))
    refuse("invariant=True", ConfigError, lookup, (rounding, params))
    refuse("PromptLookup, got str", SamplingError, "lookup")
    refuse("draft_tokens must be", SamplingError, lookup, draft_tokens=0)
    refuse("97 positions, fewer than the 98", ConfigError, random_model("gpt2"), capacity=98)
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic, weights = random_model("llama", rope_parameters=scaling, max_position_embeddings=48)
    refuse("dynamic RoPE", ConfigError, lookup, (make_invariant(dynamic), weights))
