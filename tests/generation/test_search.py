"""Searches over branches against brute force, a closed form, and `generate`."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.cache.kv import count_bytes
from jaxllm.config.model import ScoreHead
from jaxllm.errors import CapacityError, ConfigError, NonFiniteError, SamplingError, TokenError
from jaxllm.generation.search import (
    Branch,
    _descend,
    _Visits,
    best_first,
    best_of,
    mcts,
    mean_logprob,
)
from tests.tiny_models import random_model, tokens

PROMPT = tokens(1, 7, seed=6)[0].tolist()
WIDTH, LENGTH = 3, 3


@pytest.fixture(scope="module")
def lm() -> Any:
    return random_model("llama", spread=0.2)


def sum_logprobs(branch: Branch) -> float:
    return sum(branch.logprobs)


def odd_tokens(branch: Branch) -> float:
    """A score that has nothing to do with probabilities."""
    return sum(token % 7 for token in branch.tokens) / 7 - len(branch.tokens)


def brute_force(lm: Any, score: Callable[[Branch], float], eos: int = -1) -> list[Branch]:
    """Return all branches of the WIDTH likeliest tokens, by whole passes, best first."""
    finished, open_ = list[Branch](), [Branch()]
    while open_:
        branch = open_.pop()
        logits_V = jaxllm.forward(*lm, None, [[*PROMPT, *branch.tokens]]).logits[0, -1]
        logprob_V = np.asarray(logits_V, np.float64)
        logprob_V -= np.logaddexp.reduce(logprob_V)
        for token in np.argsort(-logprob_V)[:WIDTH].tolist():
            text = (*branch.tokens, token)
            child = Branch(text, (*branch.logprobs, float(logprob_V[token])))
            if len(text) == LENGTH or token == eos:
                finished.append(child._replace(score=score(child)))
            else:
                open_.append(child)
    return sorted(finished, key=lambda branch: -branch.score)


def likeliest_first_token(lm: Any) -> int:
    return brute_force(lm, sum_logprobs)[0].tokens[0]


@pytest.mark.parametrize("ends", [False, True])
def test_best_first_equals_brute_force(lm: Any, ends: bool) -> None:
    """By sums of log-probabilities, with fewer nodes than all; with and without an early end."""
    eos = likeliest_first_token(lm) if ends else -1
    expected = brute_force(lm, sum_logprobs, eos)
    found = best_first(
        *lm, PROMPT, max_new_tokens=LENGTH, budget=100, width=WIDTH, batch=1, score=sum_logprobs,
        eos_token_ids=[eos] if ends else [],
    )  # fmt: skip
    assert found.best.tokens == expected[0].tokens
    np.testing.assert_allclose(found.best.logprobs, expected[0].logprobs, atol=1e-4)
    assert found.tree is not None and found.tree.size < 1 + WIDTH + WIDTH**2


@pytest.mark.parametrize("search", [best_first, mcts])
def test_exhaustive_search_finds_best_of_any_score(lm: Any, search: Any) -> None:
    """With enough nodes, every branch is found with its score, in one order."""
    expected = brute_force(lm, odd_tokens)
    options: Any = {"budget": 4000, "c": 50.0} if search is mcts else {"budget": WIDTH + WIDTH**2}

    def score(branch: Branch) -> float:  # best first would stop at its first end
        ends = search is best_first and len(branch.tokens) == LENGTH
        return odd_tokens(branch) - 100 * ends

    found = search(*lm, PROMPT, max_new_tokens=LENGTH, width=WIDTH, batch=4, score=score, **options)
    assert {x.tokens for x in found.finished} == {x.tokens for x in expected}
    assert odd_tokens(found.best) == expected[0].score
    scores = [x.score for x in found.finished]
    assert scores == sorted(scores, reverse=True)


def test_search_continues_from_its_tree(lm: Any) -> None:
    """A branch's node gives the cache of all but its last token; the prompt's cache is shared."""
    cache = jaxllm.prefill(*lm, jaxllm.init_cache(lm[0], 1, 24), [PROMPT[:4]]).cache
    found = best_first(*lm, PROMPT[4:], max_new_tokens=4, budget=12, cache=cache)
    best = found.best
    assert found.cache.tokens() == PROMPT
    committed = jaxllm.commit(found.cache, found.tree, best.node)
    assert committed.tokens() == [*PROMPT, *best.tokens[:-1]]
    logits = jaxllm.forward(*lm, None, [[*PROMPT, *best.tokens]]).logits[0]
    logprob_TV = np.asarray(logits) - np.logaddexp.reduce(np.asarray(logits), axis=1)[:, None]
    at = np.arange(len(PROMPT) - 1, len(logits) - 1)
    np.testing.assert_allclose(best.logprobs, logprob_TV[at, best.tokens], atol=1e-4)
    assert best.score == pytest.approx(np.mean(best.logprobs))
    assert best_first(*lm, PROMPT, max_new_tokens=4, budget=12).best.tokens == best.tokens


def test_budget_bounds_nodes(lm: Any) -> None:
    for search, budget in itertools.product((best_first, mcts), (1, 5)):
        found = search(*lm, PROMPT, max_new_tokens=9, budget=budget, batch=4)
        assert found.tree.size == budget
        assert not found.finished and len(found.best.tokens) > 0


def test_mcts_equals_reference(lm: Any) -> None:
    """The visits are those of a plain search over a table of the same branches and priors."""
    table: dict[tuple[int, ...], dict[int, float]] = {}
    for branch in brute_force(lm, sum_logprobs):
        for i, token in enumerate(branch.tokens):
            table.setdefault(branch.tokens[:i], {})[token] = branch.logprobs[i]
    visited = list[tuple[int, ...]]()
    n: dict[Any, int] = {}
    q: dict[Any, float] = {}
    expanded = {()}
    for _ in range(40):
        text: tuple[int, ...] = ()
        while text in expanded and len(text) < LENGTH:
            children = sorted(table[text].items(), key=lambda item: -item[1])
            total = sum(math.exp(x) for _, x in children)
            mean = q[text] / n[text] if n.get(text) else 0.0
            ranks = [
                (q[(*text, t)] / n[(*text, t)] if n.get((*text, t)) else mean)
                + 0.7 * math.exp(x) / total * math.sqrt(n.get(text, 0)) / (1 + n.get((*text, t), 0))
                for t, x in children
            ]
            text = (*text, children[int(np.argmax(ranks))][0])
        expanded.add(text)
        visited.append(text)
        value = odd_tokens(Branch(text))
        for i in range(len(text) + 1):
            n[text[:i]], q[text[:i]] = n.get(text[:i], 0) + 1, q.get(text[:i], 0.0) + value
    found = mcts(
        *lm,
        PROMPT,
        max_new_tokens=LENGTH,
        budget=40,
        width=WIDTH,
        batch=1,
        c=0.7,
        score=odd_tokens,
    )
    ends = {text for text in visited if len(text) == LENGTH}
    assert {x.tokens for x in found.finished} == ends and len(ends) > 3
    ran = np.asarray(found.tree.token_BS)[0, : found.tree.size]
    order = dict.fromkeys(text for text in visited if len(text) < LENGTH)
    assert ran.tolist() == [text[-1] for text in order]


def test_descent_takes_largest_bound() -> None:
    """Q / N + c P sqrt(N_parent) / (1 + N), by hand; visits in progress count in N alone."""
    root = _Visits(Branch(), 1.0)
    root.begun, root.ended, root.total = 9, 8, 4.0
    root.children = [_Visits(Branch((i,)), p) for i, p in enumerate((0.5, 0.3, 0.2))]
    for child, begun, ended, total in zip(root.children, (5, 3, 0), (5, 2, 0), (2.5, 1.4, 0.0),
                                          strict=True):  # fmt: skip
        child.begun, child.ended, child.total = begun, ended, total
    # c = 1: 0.5 + 0.25, 0.7 + 0.225, 0.5 (the parent's mean) + 0.6; c = 0: 0.5, 0.7, 0.5
    assert [way.branch.tokens for way in _descend(root, 1.0)] == [(), (2,)]
    assert [way.branch.tokens for way in _descend(root, 0.0)] == [(), (1,)]


def test_best_of_equals_generate_and_copies_nothing(lm: Any) -> None:
    """The continuations are those of n rows of `generate`; the prompt's cache is not copied."""
    sampler = jaxllm.make_sampler(temperature=1.0)
    cache = jaxllm.prefill(*lm, jaxllm.init_cache(lm[0], 1, 16), [PROMPT[:-1]]).cache
    options: Any = {"max_new_tokens": 5, "sampler": sampler, "seed": 3, "eos_token_ids": [2]}
    found = best_of(*lm, PROMPT[-1:], 6, cache=cache, **options)
    plain = jaxllm.generate(*lm, [PROMPT] * 6, **options)
    rows = sorted(found.finished, key=lambda branch: branch.node)
    expected = [[t for t in row if t >= 0] for row in np.asarray(plain.token_BT).tolist()]
    assert [list(branch.tokens) for branch in rows] == expected
    assert len({branch.tokens for branch in rows}) > 1
    assert found.best.score == max(mean_logprob(branch) for branch in rows)
    own = found.cache.replace(frozen=())
    assert count_bytes(cache, found.cache) == cache.nbytes + own.nbytes
    row = jaxllm.cache.branch(found.cache, found.best.node)
    assert row.tokens()[: len(PROMPT)] == PROMPT
    again = best_of(*lm, PROMPT, 6, **options)
    assert again.best.tokens == found.best.tokens
    short = best_of(*lm, PROMPT[:1], 2, **options)
    texts = jaxllm.generate(*lm, [PROMPT[:1]] * 2, **options).token_BT.tolist()
    assert short.best.tokens in [tuple(t for t in text if t >= 0) for text in texts]


def test_bad_searches_are_refused(lm: Any) -> None:
    for search in (best_first, mcts):
        options: dict[str, Any] = {"max_new_tokens": 3, "budget": 4}
        for changes in ({"budget": 0}, {"width": 132}, {"batch": 0}, {"max_new_tokens": 0}):
            with pytest.raises(SamplingError, match=f"{next(iter(changes))} must be a whole"):
                search(*lm, PROMPT, **{**options, **changes})
        with pytest.raises(SamplingError, match="score must return a number, got 'good'"):
            search(*lm, PROMPT, **options, score=lambda branch: "good")
        with pytest.raises(CapacityError, match="97"):
            search(*random_model("gpt2", n_layer=1), PROMPT, budget=1, max_new_tokens=92)
        with pytest.raises(TokenError, match="one list of token ids"):
            search(*lm, [PROMPT], **options)
        bad = {**lm[1], "norm": {"weight": np.full(40, np.nan, np.float32)}}
        with pytest.raises(NonFiniteError, match="not finite"):
            search(lm[0], bad, PROMPT, **options)
    with pytest.raises(SamplingError, match="c must be a number of at least 0, got -1"):
        mcts(*lm, PROMPT, max_new_tokens=3, budget=4, c=-1)


def test_searches_need_probabilities_of_tokens(lm: Any) -> None:
    """A model with a score head is refused; its prefill gives what its `forward` gives."""
    config = dataclasses.replace(lm[0].config, score=ScoreHead(labels=("a", "b")))
    weight = np.linspace(-1, 1, 2 * config.hidden_size, dtype=np.float32).reshape(2, -1)
    judge: Any = lm[0].clone(config=config), {**lm[1], "score": {"weight": weight}}
    options: Any = {"max_new_tokens": 2, "budget": 4}
    for search in (best_first, mcts):
        with pytest.raises(ConfigError, match="score head"):
            search(*judge, PROMPT, **options)
    with pytest.raises(ConfigError, match="score head"):
        best_of(*judge, PROMPT, 2, max_new_tokens=2, sampler=jaxllm.Sampler())
    found = jaxllm.prefill(*judge, jaxllm.init_cache(judge[0], 1, 16), [PROMPT]).logits
    expected = jaxllm.forward(*judge, None, [PROMPT]).logits[:, -1]
    assert found.shape == (1, 2)
    np.testing.assert_allclose(found, expected, atol=1e-5)
