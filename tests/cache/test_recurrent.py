"""The state of recurrent layers as a value: forks, rewinds, drafts and batches change no bits."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.cache import (
    branch,
    compact,
    drop_range,
    fork,
    keep,
    mark,
    merge_rows,
    patch,
    rewind,
    select,
)
from jaxllm.cache.files import load_cache, save_cache
from jaxllm.cache.state_rewind import rewind_limit
from jaxllm.cache.tree import init_tree
from jaxllm.errors import CacheMismatchError, CapacityError, TokenError
from jaxllm.generation.batching.requests import Request
from jaxllm.generation.batching.scheduler import serve
from jaxllm.generation.loops.draft import PromptLookup
from jaxllm.generation.loops.draft_pace import DraftPace
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.models.inputs import next_positions
from jaxllm.ops.recurrent import CHUNK
from tests.tiny_models import VOCAB, assert_close, random_model, tokens

FAMILIES = [
    "qwen3_5_text",
    "lfm2",
    pytest.param("granitemoehybrid", marks=pytest.mark.more),
    pytest.param("lfm2_moe", marks=pytest.mark.full),
]
LENGTH = 2 * CHUNK + 9


@pytest.fixture(scope="module", params=FAMILIES)
def lm(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


def step(lm: Any, cache: Any, token_B: Any) -> tuple[np.ndarray, Any]:
    logits, cache = jaxllm.decode_step(*lm, cache, token_B)
    return np.asarray(logits), cache


@functools.cache
def walk(family: str) -> list[tuple[np.ndarray, Any]]:
    """Return the logits and the cache after each token of a text."""
    lm = random_model(family)
    steps = [(np.zeros(0), jaxllm.init_cache(lm[0], 1, LENGTH + 4))]
    for token in tokens(1, LENGTH)[0]:
        steps.append(step(lm, steps[-1][1], [token]))
    return steps


def assert_same_state(one: Any, two: Any) -> None:
    """Check that states, and positions, are equal bit by bit."""
    np.testing.assert_array_equal(one.next_position_B, two.next_position_B)
    for x, y in zip(jax.tree.leaves(one.state), jax.tree.leaves(two.state), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_leave_the_bits_of_a_plain_run(
    lm: Any, seed: int, tmp_path: Path
) -> None:
    """After forks, rewinds, selections, merges, files and compaction, the state and the logits are
    those of a run that never did them.
    """
    rng, plain = np.random.default_rng(seed), walk(lm[0].config.model_type)
    text = tokens(1, LENGTH)[0]
    at = int(rng.integers(CHUNK - 3, LENGTH - 2))
    cache = plain[at][1]

    def rewound(cache: Any) -> Any:
        first = int(rewind_limit(cache)[0])
        back = int(rng.integers(first, at + 1))
        cache = rewind(cache, to=back)
        assert_same_state(cache, rewind(plain[back][1], 0))
        for token in text[back:at]:
            cache = step(lm, cache, [token])[1]
        return cache

    def merged(cache: Any) -> Any:
        other = plain[int(rng.integers(1, LENGTH))][1]
        return branch(merge_rows([other, cache]), 1)

    def filed(cache: Any) -> Any:
        save_cache(tmp_path / "cache", cache, *lm)
        return load_cache(tmp_path / "cache", *lm)

    def forked(cache: Any) -> Any:
        twins = fork(cache, 2, capacity=LENGTH + 4)
        logits, _ = step(lm, twins, [int(text[at]), 3])
        assert_close(logits[:1], plain[at + 1][0])
        return branch(twins, int(rng.integers(2)))

    operations = [
        rewound,
        merged,
        filed,
        forked,
        lambda cache: compact(cache, capacity=LENGTH + 4),
        lambda cache: branch(select(cache, [0, 0]), 1),
    ]
    for number in rng.permutation(len(operations)):
        cache = operations[number](cache)
        assert_same_state(cache, plain[at][1])
    logits, cache = step(lm, cache, [text[at]])
    assert_same_state(cache, plain[at + 1][1])
    assert_close(logits, plain[at + 1][0])


def test_part_of_a_delta_is_what_rewinding_leaves(lm: Any) -> None:
    """After the first tokens of a delta, a text goes on as after a rewind, bit for bit, also where
    they begin a chunk; and as a text that never had the rest.
    """
    text, plain = tokens(1, LENGTH), walk(lm[0].config.model_type)
    for start in (3, CHUNK - 4, CHUNK - 1, CHUNK):
        cache = plain[start][1]
        delta = jaxllm.forward(*lm, cache, text[:, start : start + 8]).delta
        whole = jaxllm.commit(cache, delta)
        for kept in (1, 3, 4, 8):
            position_BT = np.where(np.arange(8)[None] < kept, delta.position_BS, -1)
            part = jaxllm.commit(cache, delta.replace(position_BS=position_BT))
            logits, after = step(lm, part, [text[0, start + kept]])
            expected = plain[start + kept + 1][0]  # some processors add chunks up less exactly
            np.testing.assert_allclose(
                logits, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max()
            )
            if int(rewind_limit(whole)[0]) <= start + kept:
                again, rewound = step(lm, rewind(whole, 8 - kept), [text[0, start + kept]])
                np.testing.assert_array_equal(again, logits)
                assert_same_state(rewound, after)


@pytest.mark.parametrize("start", [0, 2, CHUNK - 3])
def test_nodes_of_a_tree_equal_their_chains(lm: Any, start: int) -> None:
    """Run at once and in two pieces, after a cache and none, within a chunk and beyond it."""
    cache = fork(walk(lm[0].config.model_type)[start][1], 2, capacity=CHUNK + 8)
    parents, words = [-1, 0, 0, -1, 2, 4, 1, 5], tokens(2, 8, seed=3)
    once = jaxllm.forward(*lm, cache if start else None, words, parents=[parents] * 2)
    tree = init_tree(cache, 8)
    for at in (slice(0, 5), slice(5, 8)):
        grown = jaxllm.forward(*lm, cache, words[:, at], parents=[parents[at]] * 2, tree=tree)
        assert_close(grown.logits, once.logits[:, at])
        tree = grown.delta
    for node in (3, 6, 7):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = cache
        for token_B in words[:, path].T:
            logits, chain = step(lm, chain, token_B)
        assert_close(once.logits[:, node], logits)
        for delta in (once.delta, tree):
            after = jaxllm.commit(cache, delta, node)
            np.testing.assert_array_equal(after.state[0].start_B, chain.state[0].start_B)
            for x, y in zip(*(map(jax.tree.leaves, (after.state, chain.state))), strict=True):
                assert_close(x, y)
            assert_close(step(lm, after, [1, 2])[0], step(lm, chain, [1, 2])[0])


def test_rewinding_beyond_the_chunk_is_refused_except_to_the_beginning(lm: Any) -> None:
    plain = walk(lm[0].config.model_type)
    cache = plain[CHUNK + 5][1]
    with pytest.raises(CacheMismatchError, match=rf"rewound to {CHUNK}, the start of the current"):
        rewind(cache, to=CHUNK - 1)
    assert_same_state(rewind(cache, to=0), plain[0][1])
    with pytest.raises(CacheMismatchError, match="Go back to a `mark`"):
        rewind(cache, 10)
    full = plain[CHUNK][1]  # the chunk ends when the next token comes
    assert_same_state(rewind(full, to=1), rewind(plain[1][1], 0))


def test_marks_return_to_any_place_of_the_text(lm: Any) -> None:
    """From later chunks, of copies and after steps that donate; a mark stays, and another text's
    is refused.
    """
    plain, text = walk(lm[0].config.model_type), tokens(1, LENGTH)[0]
    place = mark(plain[5][1])
    cache = compact(fork(plain[CHUNK + 5][1], 1), capacity=LENGTH + 4)
    for _ in range(2):
        cache = rewind(cache, to=place)
        assert_same_state(cache, plain[5][1])
        np.testing.assert_array_equal(cache.position_BS >= 0, plain[5][1].position_BS >= 0)
        cache = jaxllm.prefill(*lm, cache, text[None, 5:6], donate=True).cache
        for at in range(6, 9):
            logits, cache = step(lm, cache, [text[at]])
            assert_close(logits, plain[at + 1][0])
        assert_same_state(rewind(cache, to=7), rewind(plain[7][1], 0))
    other = step(lm, plain[4][1], [int(text[4]) ^ 1])[1]
    with pytest.raises(CacheMismatchError, match="row 0 does not continue that of the mark"):
        rewind(other, to=place)
    with pytest.raises(CacheMismatchError, match="does not continue"):
        rewind(plain[4][1], to=place)
    with pytest.raises(CacheMismatchError, match="the mark has 1 rows, the cache 2"):
        rewind(fork(other, 2), to=place)


def test_padded_rows_equal_single_rows(lm: Any) -> None:
    """Rows of unequal lengths, padded on either side, have the logits of single rows."""
    text = tokens(2, CHUNK + 20)
    for width in (20, CHUNK + 20):
        lengths = np.array([width - 7, width])
        right = next_positions(None, (2, width), lengths)
        left = np.stack([np.roll(row, width - n) for row, n in zip(right, lengths, strict=True)])
        moved = np.stack(
            [np.roll(row, width - n) for row, n in zip(text[:, :width], lengths, strict=True)]
        )
        caches = []
        for ids, position_BT in ((text[:, :width], right), (moved, left)):
            out = jaxllm.forward(*lm, None, ids, positions_BT=position_BT)
            caches.append(jaxllm.commit(jaxllm.init_cache(lm[0], 2, width + 2), out.delta))
        for cache in caches:
            logits, _ = step(lm, cache, [5, 6])
            for row, (n, token) in enumerate(zip(lengths, (5, 6), strict=True)):
                alone = np.append(text[row, :n], token)[None]
                assert_close(
                    logits[row], np.asarray(jaxllm.forward(*lm, None, alone).logits)[0, -1]
                )


def test_generation_serving_and_drafts_agree(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate`, `serve` among other requests, and n-gram drafts write the same texts."""
    prompt = np.random.default_rng(0).permutation(VOCAB)[None, : 2 * CHUNK - 2]
    options: Any = {"max_new_tokens": 24, "chunk": 16}
    monkeypatch.setattr(DraftPace, "_choices", lambda self: iter([(True, 1 << 20)]))
    want = jaxllm.generate(*lm, prompt, **options)
    drafted = jaxllm.speculative_generate(*lm, prompt, draft=PromptLookup(), **options)
    np.testing.assert_array_equal(drafted.token_BT, want.token_BT)
    assert 0 < int(drafted.proposed_B[0]) > int(drafted.accepted_B[0])
    np.testing.assert_allclose(drafted.logprob_BT, want.logprob_BT, atol=1e-4)
    sampler = make_sampler(temperature=0.8)
    requests = [
        Request(id=i, prompt=prompt[0, i:], max_new_tokens=24, sampler=sampler, seed=i)
        for i in range(5)
    ]
    texts: dict[Any, list[int]] = {i: [] for i in range(5)}
    for event in serve(*lm, requests, rows=2, capacity=2 * CHUNK + 24, chunk=16, burst=4):
        assert event.error is None
        texts[event.id].append(event.token)
    for i in range(5):
        alone = jaxllm.generate(*lm, prompt[:, i:], sampler=sampler, seed=i, **options)
        assert texts[i] == np.asarray(alone.token_BT)[0].tolist()


def test_prefix_hits_have_the_bits_of_misses(lm: Any) -> None:
    """Prompts that begin as others did are not run again, and their tokens and log-probabilities
    are the same bits.
    """
    text = tokens(1, 3 * CHUNK)[0]
    prompts = [text, np.append(text[: 2 * CHUNK + 5], [7, 8]), text[: CHUNK + 3], text[:CHUNK]]

    def run(prefix_cache: Any, prompt: Any) -> tuple[list[Any], int]:
        request = Request(id=0, prompt=prompt, max_new_tokens=6)
        options: Any = {"rows": 2, "capacity": 4 * CHUNK, "prefix_cache": prefix_cache}
        events = list(serve(*lm, [request], **options))
        assert all(event.error is None for event in events)
        return [(event.token, event.logprob) for event in events], events[-1].cached_tokens

    shared, hits = jaxllm.PrefixCache(1 << 24, chunk=CHUNK // 2), []
    for prompt in [*prompts, *prompts]:
        alone, _ = run(jaxllm.PrefixCache(1 << 24, chunk=CHUNK // 2), prompt)
        found, cached = run(shared, prompt)
        assert found == alone
        hits.append(cached)
    # Of a text, the last chunk keeps its state.
    assert hits == [0, 0, 0, 0, 160, 128, 64, 32]


def test_gradients_flow_through_a_cached_state(lm: Any) -> None:
    """Beyond a boundary, the slope of a logit along the cached state is that of differences."""
    model, params = lm
    cache = walk(model.config.model_type)[CHUNK][1]
    layer = next(i for i, state in enumerate(cache.state) if state is not None)

    def logit(scale: Any) -> Any:
        rows = cache.state[layer].rows
        state = cache.state[layer].replace(rows=jax.tree.map(lambda x: x * scale, rows))
        states = tuple(state if i == layer else x for i, x in enumerate(cache.state))
        return jaxllm.forward(model, params, cache.replace(state=states), [[5]]).logits[0, 0, 7]

    slope = jax.grad(logit)(1.0)
    np.testing.assert_allclose(slope, (logit(1.01) - logit(0.99)) / 0.02, rtol=0.05, atol=1e-3)


def test_operations_that_a_state_cannot_follow_are_refused(lm: Any) -> None:
    cache = walk(lm[0].config.model_type)[9][1]
    out = jaxllm.forward(*lm, cache, tokens(1, 2))
    for name, call in {
        "keep": lambda: keep(cache, np.ones((1, cache.slots), bool)),
        "drop_range": lambda: drop_range(cache, 1, 3),
        "patch": lambda: patch(cache, np.array([[1, 2]]), out.delta),
    }.items():
        with pytest.raises(CacheMismatchError, match=rf"{name}: .* state"):
            call()
    long = jaxllm.init_cache(lm[0], 1, 2 * CHUNK)
    with pytest.raises(CapacityError, match=f"at most {CHUNK} nodes"):
        jaxllm.forward(*lm, long, tokens(1, CHUNK + 1), parents=[list(range(-1, CHUNK))])
    with pytest.raises(TokenError, match="does not follow the text, expected 9"):
        jaxllm.forward(*lm, cache, tokens(1, 2), positions_BT=[[11, 12]])
