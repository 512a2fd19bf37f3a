"""Prefix cache across requests: what it holds, and that results keep every bit with it."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxllm
from jaxllm.adapters import LoraConfig, with_adapters
from jaxllm.cache.kv import Segment
from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.errors import CapacityError, ConfigError, SamplingError, TokenError
from jaxllm.generation.batching.requests import Request
from jaxllm.generation.batching.scheduler import serve
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.inside import Scale
from jaxllm.models.invariance import has_invariant_rows, make_invariant
from jaxllm.ops import native
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.research.self_extend import SelfExtend
from jaxllm.weights.precision import Precision, cast
from jaxllm.weights.quantize import quantize
from tests.adapters.random_adapters import random_adapter
from tests.tiny_models import random_model, save_random, tokens

C = 8  # tokens per chunk
SHAPE: Any = {"rows": 3, "capacity": 48, "chunk": 16}
TEXT = tokens(1, 40, seed=7)[0]
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 24, 25, 33)
SAMPLED = make_sampler(temperature=0.9, top_k=40)


one_layer = partial(random_model, "llama", num_hidden_layers=1)


def quantized(format: str, **changes: Any) -> Any:
    model, params = one_layer(**changes)
    return model, quantize(params, format)


def in_bfloat16() -> Any:
    precision = Precision.uniform("bfloat16")
    model, params = one_layer(precision=precision)
    return model, cast(params, precision)


def self_extended() -> Any:
    model, params = one_layer()
    kind = SelfExtend(group_size=2, neighbor_window=8)
    return model.clone(config=model.config.with_attention(kind)), params


# The first case runs in `make test`; `window`: 5 tokens, less than a chunk.
MODELS: dict[str, Callable[[], Any]] = {
    "llama": one_layer,
    "bfloat16": in_bfloat16,
    "int8": partial(quantized, "int8"),
    "int4": partial(quantized, "int4", hidden_size=64, intermediate_size=64),
    "int8 cache": partial(one_layer, precision=Precision(cache="int8")),
    "window": partial(random_model, "gemma2"),
    "experts": partial(random_model, "mixtral", num_hidden_layers=1),
    "learned positions": partial(random_model, "gpt2", n_layer=1),
    "self-extend": self_extended,
}


@cache
def load(name: str) -> Any:
    return MODELS[name]()


def make_request(i: int, length: int, **changes: Any) -> Request:
    """Return a request whose prompt is `length` tokens of TEXT, greedy or sampled."""
    sampler = SAMPLED if i % 2 else jaxllm.GREEDY
    return Request(
        **{
            "id": i,
            "prompt": TEXT[:length],
            "max_new_tokens": 3 + i % 5,
            "sampler": sampler,
            "seed": i,
            **changes,
        }
    )


def answers(events: Any) -> dict[Any, list[tuple[int | None, float | None]]]:
    """Return each request's tokens and log-probabilities; those are compared bit by bit."""
    found: dict[Any, list[Any]] = {}
    for event in events:
        assert event.error is None, event.error
        found.setdefault(event.id, []).append((event.token, event.logprob))
    return found


def cached_tokens(events: Any) -> dict[Any, int]:
    return {event.id: event.cached_tokens for event in events}


@pytest.mark.parametrize("name", MODELS)
def test_results_keep_every_bit(name: str) -> None:
    """Without entries, with them, in another order and alone, requests around the borders of chunks
    get the same tokens and log-probabilities; and the tokens of generate and of plain serve.
    """
    lm = load(name)
    requests = [make_request(i, length) for i, length in enumerate(LENGTHS)]
    expected = answers(serve(*lm, requests, **SHAPE, prefix_cache=PrefixCache(0, C)))
    store = PrefixCache(1 << 24, C)
    assert answers(serve(*lm, requests, **SHAPE, prefix_cache=store)) == expected
    events = list(serve(*lm, requests[::-1], **SHAPE, prefix_cache=store))
    assert answers(events) == expected
    hits = {i: (length - 1) // C * C for i, length in enumerate(LENGTHS)}
    assert cached_tokens(events) == hits
    for request in requests[1::4]:
        alone = serve(*lm, [request], **SHAPE, burst=1, prefix_cache=PrefixCache(1 << 24, C))
        assert answers(alone)[request.id] == expected[request.id]
    plain = answers(serve(*lm, requests, **SHAPE))
    for i, found in expected.items():
        assert [token for token, _ in found] == [token for token, _ in plain[i]]
        ours, theirs = ([x for _, x in each] for each in (found, plain[i]))
        np.testing.assert_allclose(ours, theirs, atol=0.05 if name == "bfloat16" else 1e-3)


@pytest.mark.skipif(not native.is_enabled(), reason="no native kernels")
@pytest.mark.parametrize("name", ["llama", "int8"])
def test_invariant_models_keep_the_bits_of_plain_serve(name: str) -> None:
    """With `Precision.invariant`, serve packs prompts and rows as they come: with and without a
    prefix cache, and in other company, log-probabilities have the same bits.
    """
    model, params = load(name)
    model = make_invariant(model)
    assert has_invariant_rows(model, params)
    requests = [make_request(i, length) for i, length in enumerate(LENGTHS)]
    expected = answers(serve(model, params, requests, **SHAPE))
    store = PrefixCache(1 << 24, C)
    for some in (requests, requests[::-1], requests[1::4]):
        found = answers(serve(model, params, some, **SHAPE, prefix_cache=store))
        assert found == {request.id: expected[request.id] for request in some}
    assert store.stats().hit_tokens
    few = answers(serve(model, params, requests[:3], rows=8, capacity=96, burst=4))
    assert few == {request.id: expected[request.id] for request in requests[:3]}
    for request in requests[::5]:
        alone = serve(model, params, [request], rows=1, capacity=96, chunk=7, burst=1)
        assert answers(alone)[request.id] == expected[request.id]


@settings(max_examples=6)
@given(
    order=st.permutations(range(10)),
    rows=st.sampled_from([1, 3, 8]),
    chunk=st.sampled_from([8, 12]),
    burst=st.sampled_from([1, 16]),
    chunks=st.sampled_from([0, 2, 5, 100]),
)
@pytest.mark.more
def test_results_are_independent_of_store_and_batch(
    order: list[int], rows: int, chunk: int, burst: int, chunks: int
) -> None:
    """In any order and batch, with any store, also a full one, results are those of single runs."""
    lm = load("llama")
    sizes: Any = {"rows": rows, "capacity": 48, "burst": burst}
    store = PrefixCache(chunks * chunk * 2 * 2 * 6 * 4, chunk)
    requests = [
        make_request(i, LENGTHS[i], prompt=np.roll(TEXT, i % 3)[: LENGTHS[i]]) for i in order
    ]
    for _ in range(2):
        found = answers(serve(*lm, requests, **sizes, chunk=16, prefix_cache=store))
        for request in requests[:4]:
            alone = serve(*lm, [request], **sizes, prefix_cache=PrefixCache(0, chunk))
            assert answers(alone)[request.id] == found[request.id]


def test_full_store_evicts_while_in_use() -> None:
    """With room for four chunks and three texts at once, results stay the same."""
    lm = load("llama")
    requests = [make_request(i, 25, prompt=np.roll(TEXT, i % 3)[:25]) for i in range(7)]
    expected = answers(serve(*lm, requests, **SHAPE, prefix_cache=PrefixCache(0, C)))
    one = PrefixCache(1 << 24, C)
    list(serve(*lm, requests[:1], **SHAPE, prefix_cache=one))
    room = one.stats().nbytes // 3 * 4
    store = PrefixCache(room, C)
    for _ in range(2):
        assert answers(serve(*lm, requests, **SHAPE, prefix_cache=store)) == expected
    stats = store.stats()
    assert stats.evictions > 0 and stats.nbytes <= room and stats.entries <= 4
    assert stats.queried_tokens == 2 * 7 * 25 and stats.hit_tokens % C == 0


def test_namespaces_share_nothing() -> None:
    """Requests of another namespace find nothing."""
    lm, store = load("llama"), PrefixCache(1 << 24, C)

    def hits(namespace: str) -> int:
        request = make_request(0, 33, namespace=namespace)
        return cached_tokens(serve(*lm, [request], **SHAPE, prefix_cache=store))[0]

    assert [hits("a"), hits("a"), hits("b"), hits("")] == [0, 32, 0, 0]


@pytest.mark.parametrize("name", ["llama", "bfloat16", "window", "self-extend"])
def test_next_turn_finds_answers(name: str) -> None:
    """A prompt that continues an answer runs only what is new, with the same bits; the last token
    of an answer has not run. Without kernels an answer runs again.
    """
    model, params = load(name)
    lm, store = (make_invariant(model), params), PrefixCache(1 << 24, C)
    for new in (12, 13, 1):  # 20 + 12 tokens are four chunks, of which the last token has not run
        request = make_request(new, 20, max_new_tokens=new, namespace=str(new))
        (turn,) = answers(serve(*lm, [request], **SHAPE, prefix_cache=store)).values()
        text = [*TEXT[:20], *(token for token, _ in turn), *TEXT[:3]]
        again = make_request(0, 0, prompt=text, namespace=str(new))
        events = list(serve(*lm, [again], **SHAPE, prefix_cache=store))
        ran = 20 + new - 1 if has_invariant_rows(*lm) else 20
        assert set(cached_tokens(events).values()) == {ran // C * C}
        expected = answers(serve(*lm, [again], **SHAPE, prefix_cache=PrefixCache(0, C)))
        assert answers(events) == expected


# Each model once; with a prefix cache and without in several.
@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("llama", C),
        *(
            pytest.param(*case, marks=pytest.mark.more)
            for case in (("window", None), ("int8 cache", None), ("self-extend", None))
        ),
        *(pytest.param(name, C, marks=pytest.mark.full) for name in ("bfloat16", "experts")),
    ],
)
def test_shared_prefixes_change_no_answer(name: str, chunk: int | None) -> None:
    """Rows read a shared text in place: prompts that have all of it, a part, nothing, or another
    one get the bits of a loop without it, alone and among others, with a prefix cache and without.
    """
    model, params = load(name)
    lm = make_invariant(model), params
    other = TEXT[::-1].copy()
    prompts = [
        TEXT[:33],
        TEXT[:21],
        np.concatenate([TEXT[:13], other[:9]]),
        other[:12],
        TEXT[5:20],
        TEXT[:2],
        TEXT[:33],
    ]
    requests = [
        make_request(i, 0, prompt=prompt, namespace="ab"[i % 2]) for i, prompt in enumerate(prompts)
    ]
    shared = [TEXT[:20], other[:10].tolist()]
    multiple = 1 if has_invariant_rows(*lm) or chunk is None else chunk
    usable = [
        min(n, p.size - 1) // multiple * multiple
        for n, p in zip((20, 20, 13, 10, 0, 2, 20), prompts, strict=True)
    ]

    def run(requests: Any, shared: Any) -> list[Any]:
        store = None if chunk is None else PrefixCache(1 << 24, chunk)
        return list(serve(*lm, requests, **SHAPE, prefix_cache=store, shared_prefixes=shared))

    expected, events = answers(run(requests, [])), run(requests, shared)
    found, cached = answers(events), cached_tokens(events)
    if has_invariant_rows(*lm):
        assert found == expected
    else:
        assert {i: [e[0] for e in x] for i, x in found.items()} == {
            i: [e[0] for e in x] for i, x in expected.items()
        }
    assert all(cached[i] >= usable[i] for i in cached)
    assert [cached[i] for i in (2, 3, 4, 5)] == usable[2:6]
    for i in (1, 2, 6) if has_invariant_rows(*lm) else ():
        assert answers(run(requests[i : i + 1], shared))[i] == found[i]


def test_shared_prefix_is_for_rows_of_the_bare_model() -> None:
    """Rows with an adapter or edits, and texts with other rotary angles, run all their tokens."""
    model, base = load("llama")
    lora = LoraConfig(r=2, target_modules=("q_proj", "down_proj"))
    pair = {name: random_adapter(model.config, base, lora, i) for i, name in enumerate("xy")}
    lm = make_invariant(model), with_adapters(model.config, base, pair)
    edits = {"blocks.0.resid_post": Scale(0.5)}
    requests = [make_request(i, 20, adapter=i % 3 - 1, max_new_tokens=4) for i in range(3)]
    requests.append(make_request(3, 20, adapter=-1, edits=edits, max_new_tokens=4))
    expected = answers(serve(*lm, requests, **SHAPE))
    events = list(serve(*lm, requests, **SHAPE, shared_prefixes=[TEXT[:17]]))
    if has_invariant_rows(*lm):
        assert answers(events) == expected
    assert cached_tokens(events) == {0: 17, 1: 0, 2: 0, 3: 0}
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    scaled = one_layer(rope_parameters=rope, max_position_embeddings=20)
    requests = [make_request(i, 18 + 3 * i, max_new_tokens=1) for i in range(2)]
    events = list(serve(*scaled, requests, **SHAPE, shared_prefixes=[TEXT[:17]]))
    assert cached_tokens(events) == {0: 17, 1: 0}


def test_adapters_share_nothing() -> None:
    """Requests with different adapters find only entries of their own, and get its tokens."""
    model, base = load("llama")
    lora = LoraConfig(r=2, target_modules=("q_proj", "down_proj"))
    pair = {name: random_adapter(model.config, base, lora, i) for i, name in enumerate("xy")}
    lm, store = (model, with_adapters(model.config, base, pair)), PrefixCache(1 << 24, C)
    requests = [make_request(i, 20, adapter=i % 3 - 1, max_new_tokens=4) for i in range(3)]
    expected = answers(serve(*lm, requests, **SHAPE, prefix_cache=PrefixCache(0, C)))
    assert len({str(found) for found in expected.values()}) == 3
    for hit in (0, 16):
        events = list(serve(*lm, requests, **SHAPE, prefix_cache=store))
        assert answers(events) == expected
        assert set(cached_tokens(events).values()) == {hit}


def test_models_and_lengths_share_only_equal_angles() -> None:
    """Other weights find nothing in a shared store; nor do texts whose length changes the angles of
    all tokens (dynamic NTK).
    """
    store, request = PrefixCache(1 << 24, C), make_request(0, 17)
    for seed, hit in ((0, 0), (1, 0), (0, 0)):
        lm = one_layer(seed=seed)  # equal arrays, but not the same
        assert cached_tokens(serve(*lm, [request], **SHAPE, prefix_cache=store)) == {0: hit}
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    lm = one_layer(rope_parameters=rope, max_position_embeddings=20)
    hits = [
        cached_tokens(
            serve(*lm, [make_request(0, n, max_new_tokens=1)], **SHAPE, prefix_cache=store)
        )[0]
        for n in (17, 19, 30, 30, 31)
    ]
    assert hits == [0, 16, 0, 24, 0]


def test_second_request_compiles_nothing(compiled: list[str]) -> None:
    """Other texts, hits and evictions run the programs of the first ones."""
    lm, store = load("llama"), PrefixCache(1 << 24, C)

    def run(seed: int) -> None:
        text = tokens(1, 40, seed=seed)[0]
        requests = [make_request(i, 0, prompt=text[: 20 + 9 * (i % 2)]) for i in range(4)]
        list(serve(*lm, requests, **SHAPE, prefix_cache=store))
        list(serve(*lm, requests, **SHAPE, prefix_cache=store))

    run(0)
    before = len(compiled)
    run(1)
    assert compiled[before:] == []


def test_prompt_is_cancelled_between_chunks() -> None:
    """A request is cancelled between the chunks of its prompt; its row is free in the next step,
    and the chunks that have run stay in the store.
    """
    lm, store, asked = load("llama"), PrefixCache(1 << 24, C), itertools.count()
    long = make_request(0, 40, is_cancelled=lambda: next(asked) >= 3)
    sizes: Any = {"rows": 1, "capacity": 48, "chunk": C, "prefix_cache": store}
    first, second, *_ = serve(*lm, [long, make_request(1, 5)], **sizes)
    assert (first.id, first.finish, first.token) == (0, Finish.CANCELLED, None)
    assert first.step.index == 2  # two of five chunks
    assert (second.id, second.step.index) == (1, 3)
    again = next(serve(*lm, [make_request(0, 40)], **sizes))
    assert again.cached_tokens == 2 * C


def test_unsupported_arguments_are_refused() -> None:
    """A model with a memory, wrong sizes, and requests with wrong fields raise errors."""
    model, params = load("llama")
    infini = dataclasses.replace(
        model.config, attention=LongAttention(kind="infini", segment_length=8)
    )
    with pytest.raises(ConfigError, match="prefix_cache does not support this model: its layers"):
        next(serve(model.clone(config=infini), params, [], **SHAPE, prefix_cache=PrefixCache(0)))
    with pytest.raises(ConfigError, match="shared_prefixes does not support this model"):
        next(serve(model.clone(config=infini), params, [], **SHAPE, shared_prefixes=[[1]]))
    for bad, message in (([[5000]], "5000"), ([[]], "token"), (["x"], "array of integers")):
        with pytest.raises(TokenError, match=message):
            next(serve(model, params, [], **SHAPE, shared_prefixes=bad))
    with pytest.raises(ConfigError, match=r"must be a jaxllm\.PrefixCache, got 5"):
        wrong: Any = 5
        next(serve(model, params, [], **SHAPE, prefix_cache=wrong))
    for sizes in ((-1, 8), (1.5, 8), (0, 7), (0, "x")):
        with pytest.raises(CapacityError, match="must be a whole number from"):
            PrefixCache(*sizes)  # type: ignore[arg-type]
    (event,) = serve(model, params, [make_request(0, 5, namespace=None)], **SHAPE)
    assert isinstance(event.error, SamplingError)


def test_lm_serve_reports_cached_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Requests of LM.serve name their namespace; completions report the tokens found."""
    folder = tmp_path_factory.mktemp("model")
    save_random(folder, "llama", eos_token_id=None, num_hidden_layers=1)
    lm, store, prompt = jaxllm.load(folder), PrefixCache(1 << 24, C), TEXT[:20].tolist()
    request = {"prompt": prompt, "max_new_tokens": 4}
    requests = [request, request, {**request, "namespace": "b"}]
    found = dict(lm.serve(requests, rows=1, capacity=48, prefix_cache=store))
    assert [found[i].cached_tokens for i in range(3)] == [0, 16, 0]
    assert found[0] == found[1] == found[2]
    assert found[0].tokens == lm.generate(prompt, max_new_tokens=4).tokens
    found = dict(lm.serve(requests, rows=1, capacity=48, shared_prefixes=[prompt[:13]]))
    assert [found[i].cached_tokens for i in range(3)] == [13, 13, 13]


def entry(nbytes: int = 8) -> Segment:
    """Return an entry of some bytes."""
    return Segment((), (), jnp.zeros(nbytes // 4, jnp.int32), *[jnp.zeros(0, jnp.int32)] * 2)


def keys_of(store: PrefixCache, text: Sequence[int], namespace: str = "") -> list[bytes]:
    return store.chunk_keys(("root", namespace), np.array(text))


def test_least_recently_used_leaf_is_evicted() -> None:
    """Entries with children stay; of the others the one that was found longest ago goes first."""
    store = PrefixCache(32, C)
    a, b = keys_of(store, range(24)), keys_of(store, range(100, 116))
    for keys in (a[:2], b):
        for i in range(len(keys)):
            store.add(keys, i, entry)
    assert store.stats().entries == 4
    assert len(store.find(a)) == 2
    store.add(a, 2, entry)  # b's second is older than a's
    assert [len(store.find(keys)) for keys in (a, b)] == [3, 1]
    assert (store.stats().evictions, store.stats().nbytes) == (1, 32)
    store.add(b, 0, lambda: pytest.fail("held already"))
    store.add(keys_of(store, range(50, 66)), 1, lambda: pytest.fail("its parent is not held"))
    store.add(keys_of(store, range(50, 58)), 0, partial(entry, 40))  # more than the limit
    assert store.stats().entries == 4
    store.count(24, 2 * C)
    store.count(8, 0)
    assert (store.stats().queried_tokens, store.stats().hit_tokens) == (32, 2 * C)


def test_chain_longer_than_store_keeps_its_beginning() -> None:
    store = PrefixCache(16, C)
    keys = keys_of(store, range(32))
    for i in range(4):
        store.add(keys, i, entry)
    assert len(store.find(keys)) == 2 and store.stats().nbytes == 16


def test_keys_depend_on_whole_text() -> None:
    """Keys differ for other roots, namespaces and earlier tokens; a partial chunk has none."""
    store = PrefixCache(0, C)
    keys = keys_of(store, range(23))
    assert len(keys) == 2 and keys_of(store, range(16)) == keys
    others = [
        keys_of(store, [9, *range(1, 16)]),
        keys_of(store, range(16), "a"),
        store.chunk_keys(("other", ""), np.arange(16)),
    ]
    assert len({key for each in [keys, *others] for key in each}) == 8


def test_store_is_safe_between_threads() -> None:
    """Threads that add and find at once leave bytes, entries and children consistent."""
    store, errors = PrefixCache(400, C), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(200):
                keys = keys_of(store, [rng.integers(3)] * 8 + [rng.integers(9)] * 8 + [seed] * 8)
                store.find(keys)
                for i in range(3):
                    store.add(keys, i, lambda: small)
        except Exception as error:
            errors.append(error)

    small = entry()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = store.stats()
    assert errors == [] and stats.nbytes == 8 * stats.entries <= 400
    children = [e.parent for e in store._entries.values() if e.parent is not None]
    assert {k: children.count(k) for k in store._entries} == {
        k: e.children for k, e in store._entries.items()
    }
