"""Continuous batching: each request gets the same tokens as in a separate run."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxllm
from jaxllm.errors import CapacityError, SamplingError, TokenError
from jaxllm.generation.batching.prompt_pace import PromptPace
from jaxllm.generation.batching.requests import Event, Request
from jaxllm.generation.batching.scheduler import serve
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.generation.sampling.sampler import Processor, Sampler
from jaxllm.generation.sampling.stacked import rare_sampler
from tests.tiny_models import BOTH, in_both, random_model, tokens


class RisingTemperature(Processor):
    """Flattens the scores more with every token: a stateful processor."""

    drawn: Any

    def __call__(self, scores_BV: Any, context: Any = None) -> Any:
        return scores_BV / (1.0 + self.drawn)

    def observe(self, scores_BV: Any, token_B: Any) -> "RisingTemperature":
        return self.replace(drawn=self.drawn + 0.25)


# All options, in samplers that have several and leave the others out.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.7, "repetition_penalty": 1.3, "min_p": 0.05, "logit_bias": {5: 4, 7: -3}},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "top_k": 30, "typical_p": 0.8,
     "suppress_tokens": [1, 2, 3]},
    {"dry_multiplier": 0.9, "dry_sequence_breakers": [4], "xtc_probability": 0.5,
     "xtc_threshold": 0.02, "top_n_sigma": 1.5, "no_repeat_ngram_size": 2},
    {"mirostat_tau": 2.0, "sequence_bias": {(3, 9): 2.0}, "bad_words_ids": [[8], [6, 2]],
     "begin_suppress_tokens": [11], "min_new_tokens": 4, "forced_eos_token_id": 17},
    {"epsilon_cutoff": 0.004, "eta_cutoff": 0.003, "top_p": 0.9, "forced_bos_token_id": 3,
     "min_length": 9},
]  # fmt: skip
SHAPE: Any = {"rows": 3, "capacity": 48, "chunk": 8}
SAMPLERS = [
    jaxllm.GREEDY,
    make_sampler(temperature=0.9, top_k=40),
    Sampler((RisingTemperature(jnp.zeros(())),)),
]


@pytest.fixture(scope="module", params=BOTH)
def lm(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


def make_request(i: int, **changes: Any) -> Request:
    """Return the i-th of many requests with different lengths, samplers, seeds and limits."""
    fields = {
        "id": i,
        "prompt": tokens(1, 1 + 7 * i % 23, seed=i)[0],
        "max_new_tokens": 3 + 5 * i % 14,
        "sampler": SAMPLERS[i % len(SAMPLERS)],
        "seed": 2**40 + i,
    }
    return Request(**{**fields, **changes})


def run_generate(lm: Any, request: Request) -> tuple[list[int], list[float], Finish]:
    """Return the tokens, log-probabilities and finish reason of `generate` for a request."""
    result = jaxllm.generate(
        *lm,
        np.asarray(request.prompt)[None],
        max_new_tokens=request.max_new_tokens,
        sampler=request.sampler,
        seed=request.seed,
        eos_token_ids=request.eos_token_ids,
    )
    n = int(result.length_B[0])
    return (
        result.token_BT[0, :n].tolist(),
        result.logprob_BT[0, :n].tolist(),
        Finish(int(result.finish_B[0])),
    )


def events_by_id(events: Any) -> dict[Any, list[Event]]:
    found: dict[Any, list[Event]] = {}
    for event in events:
        found.setdefault(event.id, []).append(event)
    return found


def tokens_by_id(found: dict[Any, list[Event]]) -> dict[Any, list[int]]:
    return {i: [e.token for e in each if e.token is not None] for i, each in found.items()}


def check_equals_generate(lm: Any, request: Request, events: list[Event]) -> None:
    ids, logprobs, finish = run_generate(lm, request)
    assert [e.token for e in events] == ids
    np.testing.assert_allclose([e.logprob for e in events], logprobs, atol=1e-4)
    assert [e.finish for e in events] == [None] * (len(ids) - 1) + [finish]


@in_both("lm")
def test_served_requests_equal_generate(lm: Any) -> None:
    """Twelve requests on three rows get the tokens, scores and finish reasons of generate."""
    requests = [make_request(i) for i in range(12)]
    eos = run_generate(lm, requests[4])[0][3]
    requests[4] = make_request(4, eos_token_ids=[999, eos])
    found = events_by_id(serve(*lm, requests, **SHAPE))
    assert sorted(found) == list(range(12))
    for request in requests:
        check_equals_generate(lm, request, found[request.id])
    assert found[4][-1].finish == Finish.EOS


@cache
def serve_eight() -> tuple[Any, dict[Any, list[int]]]:
    """Return a model and its tokens for eight requests served in order."""
    lm = random_model("llama")
    return lm, tokens_by_id(events_by_id(serve(*lm, [make_request(i) for i in range(8)], **SHAPE)))


@settings(max_examples=5)
@given(
    order=st.permutations(range(8)), chunk=st.sampled_from([1, 8]), burst=st.sampled_from([1, 16])
)
def test_results_are_independent_of_scheduling(order: list[int], chunk: int, burst: int) -> None:
    """A request's tokens do not depend on order, concurrent requests, chunk size or burst size."""
    lm, expected = serve_eight()
    requests = [make_request(i) for i in order[:5]]
    found = serve(*lm, requests, rows=3, capacity=48, chunk=chunk, burst=burst)
    assert tokens_by_id(events_by_id(found)) == {i: expected[i] for i in order[:5]}


def test_source_is_read_only_when_row_is_free(lm: Any) -> None:
    """Requests stay in the source until a row is free; every event has its step's statistics."""
    pulled: list[int] = []

    def source() -> Iterator[Request]:
        for i in range(5):
            pulled.append(i)
            yield make_request(i, max_new_tokens=4, prompt=[5, 6])

    events = serve(*lm, source(), **SHAPE)
    first = next(events)
    assert pulled == [0, 1, 2]  # three rows
    assert first.step.busy_rows == first.step.rows == 3
    rest = list(events)
    assert pulled == [0, 1, 2, 3, 4]
    assert rest[-1].step.generated_tokens == 20
    assert rest[-1].step.busy_rows == 2
    assert rest[-1].step.tokens_per_second > 0
    assert [e.step.index for e in [first, *rest]] == sorted(e.step.index for e in [first, *rest])


def test_source_may_yield_none(lm: Any) -> None:
    """None means that no request is ready, and the source is polled again."""
    late = [None, make_request(0), None, None, make_request(1), None]
    found = events_by_id(serve(*lm, late, **SHAPE))
    for i in range(2):
        check_equals_generate(lm, make_request(i), found[i])


def test_long_prefill_does_not_block_decoding(lm: Any) -> None:
    """While a long prompt is prefilled in chunks, the other request gets a token per step.

    Two steps run without the prompt, to measure them.
    """
    short = make_request(0, prompt=[3], max_new_tokens=8, sampler=jaxllm.GREEDY)
    long = make_request(1, prompt=tokens(1, 41)[0], max_new_tokens=4)
    events = list(serve(*lm, [short, long], **SHAPE))
    before = events.index(next(e for e in events if e.id == 1))
    assert sum(e.id == 0 for e in events[:before]) >= 5  # six chunks of 8
    assert [e.step.prompt_tokens for e in events[:5]] == [8, 0, 0, 8, 8]
    assert [e.step.decode_tokens for e in events[:5]] == [0, 1, 1, 1, 1]
    for request in (short, long):
        check_equals_generate(lm, request, events_by_id(events)[request.id])


def test_prompts_take_as_long_as_the_rows_that_decode() -> None:
    """The room for prompt tokens follows from measured times, and grows with the rows that wait."""
    pace = PromptPace(256, 1)
    assert [pace.room(0, 1), pace.room(2, 1)] == [256, 0]  # measures first
    for seconds in (5.0, 0.1, 0.1):  # the first one compiled
        pace.record(4, 0, seconds)
    assert pace.room(4, 1) == 8  # the first part is small
    for prompt_tokens in (32, 16):
        pace.record(4, prompt_tokens, 0.1 + prompt_tokens * 0.002)
    pace.record(0, 256, 9.0)
    assert [pace.room(4, 1), pace.room(3, 1), pace.room(2, 4)] == [32, 32, 64]
    for seconds in (0.4, 0.4):
        pace.record(16, 0, seconds)
    assert [pace.room(9, 1), pace.room(4, 1)] == [128, 32]  # by the rows of the program
    for _ in range(32):
        pace.record(4, 16, 0.132)
    assert [pace.room(4, 1), pace.room(16, 1)] == [0, 128]  # that step is measured again
    slow = PromptPace(256, 32)
    for prompt_tokens, seconds in ((0, 0.1), (0, 0.1), (32, 3.3)):
        slow.record(1, prompt_tokens, seconds)
    assert slow.room(1, 1) == 32  # a multiple of 32


def test_invalid_requests_fail_individually(lm: Any) -> None:
    """Each invalid request gives one error event, and valid requests get the tokens of generate."""
    wrong = {
        "empty": (make_request(0, id="empty", prompt=[]), TokenError),
        "text": (make_request(0, id="text", prompt="text"), TokenError),
        "unknown": (make_request(0, id="unknown", prompt=[1, 131]), TokenError),
        "negative": (make_request(0, id="negative", prompt=[-1]), TokenError),
        "long": (make_request(0, id="long", prompt=[1] * 40, max_new_tokens=10), CapacityError),
        "none": (make_request(0, id="none", max_new_tokens=0), SamplingError),
        "seed": (make_request(0, id="seed", seed=-1), SamplingError),
        "budget": (make_request(0, id="budget", max_new_tokens=None), SamplingError),
        "ragged": (make_request(0, id="ragged", prompt=[[1], [2, 3]]), TokenError),
        "eos": (make_request(0, id="eos", eos_token_ids=2), SamplingError),
        "sampler": (make_request(0, id="sampler", sampler="top_k"), SamplingError),
        "top": (make_request(0, id="top", top_logprobs=21), SamplingError),
        "rows": (make_request(0, id="rows", sampler=make_sampler(top_k=[1, 2])), SamplingError),
    }
    good = [make_request(i) for i in range(4)]
    mixed = [good[0], *(r for r, _ in wrong.values()), *good[1:]]
    found = events_by_id(serve(*lm, mixed, **SHAPE))
    for name, (_, kind) in wrong.items():
        (event,) = found[name]
        assert isinstance(event.error, kind)
        assert event.token is None and event.finish is None
    for request in good:
        check_equals_generate(lm, request, found[request.id])


def test_nan_request_does_not_affect_batch() -> None:
    """A request with NaN logits ends as NON_FINITE; the other requests' tokens are unchanged."""
    model, params = random_model("llama")
    good = [make_request(i, prompt=[1, 2, 3 + i]) for i in range(4)]
    expected = tokens_by_id(events_by_id(serve(model, params, good, **SHAPE)))
    unused = min(set(range(10, 131)) - {token for text in expected.values() for token in text})
    weight = params["embed_tokens"]["weight"].at[unused].set(jnp.nan)
    broken = {**params, "embed_tokens": {"weight": weight}}
    bad = make_request(9, prompt=[1, unused, 3])
    found = events_by_id(serve(model, broken, [good[0], bad, *good[1:]], **SHAPE))
    assert [(e.token, e.finish) for e in found[9]] == [(None, Finish.NON_FINITE)]
    assert {i: text for i, text in tokens_by_id(found).items() if i != 9} == expected


@pytest.mark.parametrize("burst", [1, 16])
def test_top_logprobs_equal_generate(lm: Any, burst: int) -> None:
    """In a batch, each request gets the number that it asks for: the tokens, log-probabilities and
    order of generate. The log-probability of a token does not depend on what others ask for.
    """
    counts = [0, 3, 5, 12, 0]
    requests = [make_request(i, top_logprobs=n) for i, n in enumerate(counts)]
    found = events_by_id(serve(*lm, requests, **SHAPE, burst=burst))
    plain = events_by_id(serve(*lm, [make_request(i) for i in range(5)], **SHAPE, burst=burst))
    for request, count in zip(requests, counts, strict=True):
        events = found[request.id]
        assert [e.logprob for e in events] == [e.logprob for e in plain[request.id]]
        assert all(e.top_logprobs is None for e in plain[request.id])
        if not count:
            assert all(e.top_logprobs is None for e in events)
            continue
        result = jaxllm.generate(
            *lm,
            np.asarray(request.prompt)[None],
            max_new_tokens=request.max_new_tokens,
            sampler=request.sampler,
            seed=request.seed,
            top_logprobs=count,
        )
        top_TN = [e.top_logprobs or [] for e in events]
        assert [[i for i, _ in top_N] for top_N in top_TN] == result.top_token_BTN[0].tolist()
        logprob_TN = [[x for _, x in top_N] for top_N in top_TN]
        np.testing.assert_allclose(logprob_TN, result.top_logprob_BTN[0], atol=1e-4)
        assert all(e.logprob == dict(e.top_logprobs or []).get(e.token, e.logprob) for e in events)


def test_serve_refuses_invalid_sizes(lm: Any) -> None:
    for wrong in ({"rows": 0}, {"capacity": 0}, {"chunk": 0}, {"burst": 0}):
        with pytest.raises(CapacityError):
            next(serve(*lm, [make_request(0)], **{**SHAPE, **wrong}))


def mixed_request(i: int, **changes: Any) -> Request:
    """Return a request with the i-th of `OPTIONS`; every third one is greedy."""
    options = OPTIONS[i % len(OPTIONS)]
    sampler = make_sampler(**options, eos_token_ids=(13,), max_new_tokens=8)
    sampler = sampler.replace(greedy=i % 3 == 2)
    return make_request(i, max_new_tokens=8, sampler=sampler, eos_token_ids=(13,), **changes)


@pytest.mark.parametrize(
    "numbers", [(2, 3), pytest.param((0, 1, 4, 5), marks=pytest.mark.more)], ids=str
)
def test_rows_with_different_options_equal_generate(lm: Any, numbers: tuple[int, ...]) -> None:
    """A processor acts on the rows that have it, and a greedy row stays one beside them."""
    requests = [mixed_request(i) for i in numbers]
    found = events_by_id(serve(*lm, requests, **SHAPE))
    for request in requests:
        check_equals_generate(lm, request, found[request.id])


@pytest.mark.parametrize("burst", [1, 16])
def test_options_compile_nothing(compiled: list[str], burst: int) -> None:
    """Whatever options and numbers of likeliest tokens the requests have, one program serves; with
    rare ones, one more.
    """
    lm = random_model("llama")

    def served(first: int, count: int) -> int:
        each = [
            mixed_request(i, prompt=tokens(1, 9, seed=i)[0], top_logprobs=i % 4)
            for i in range(first, first + count)
        ]
        return len(list(serve(*lm, each, **SHAPE, burst=burst)))

    rare = make_request(0, sampler=rare_sampler(131))
    plain = [  # budgets that end at other steps, so that every number of rows decodes
        make_request(i, prompt=tokens(1, 9)[0], max_new_tokens=i, sampler=jaxllm.GREEDY)
        for i in range(1, 9)
    ]
    list(serve(*lm, [rare, *plain], **SHAPE, burst=burst))
    before = len(compiled)
    assert served(0, 7) > 20
    assert compiled[before:] == []


def test_serve_does_not_recompile_for_new_requests(compiled: list[str]) -> None:
    """Other prompts, budgets, seeds and sampler values compile nothing."""
    lm = random_model("llama")

    def served(seed: int) -> int:
        each = [
            make_request(
                i,
                prompt=tokens(1, 9, seed=seed + i)[0],
                max_new_tokens=4 + seed,
                seed=seed,
                sampler=make_sampler(temperature=0.5 + seed, top_k=seed + i),
            )
            for i in range(5)
        ]
        return len(list(serve(*lm, each, **SHAPE)))

    assert served(0) == 20
    before = len(compiled)
    assert served(3) == 35
    assert compiled[before:] == []
