"""recompute and insert, compared with fresh runs of the resulting text."""

from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.cache import close_gaps, drop_range, fork
from jaxllm.errors import CapacityError, ConfigError, TokenError
from tests.cache.caches import KINDS, close, filled, fresh, keys, lm_of, peek
from tests.tiny_models import random_model, tokens


@pytest.fixture(scope="module", params=KINDS)
def lm(request: pytest.FixtureRequest) -> Any:
    return lm_of(request.param)


@pytest.mark.parametrize("chunk", [3, 256])
def test_recompute_after_drop_equals_text_without_range(lm: Any, chunk: int) -> None:
    """Recomputing after drop_range gives the logits of a fresh run without the dropped tokens."""
    model, params = lm
    cut = drop_range(filled(lm, tokens(2, 12)), [2, 5], [5, 6])
    again = jaxllm.recompute(model, params, cut, 2, 12, chunk=chunk)
    for row, dropped in enumerate(([2, 3, 4], [5])):
        left = [p for p in range(12) if p not in dropped]
        expected = fresh(lm, tokens(2, 12)[row, left], positions=[*left, 12])
        close(peek(lm, again)[row], expected)
        assert not np.allclose(peek(lm, cut)[row], expected, atol=1e-3)
    assert np.asarray(again.patched_BS).sum() == 7 + 9
    assert again.next_position_B.tolist() == [12, 12]


def test_recompute_of_consistent_cache_changes_nothing(lm: Any) -> None:
    model, params = lm
    forks = fork(filled(lm, tokens(1, 9)), 2, capacity=4)
    _, forks = jaxllm.decode_step(model, params, forks, np.array([1, 2]))
    again = jaxllm.recompute(model, params, forks, 4, 10)
    for row in range(2):
        assert again.tokens(row) == forks.tokens(row)
        close(keys(again, row), keys(forks, row))
    close(peek(lm, again), peek(lm, forks))


def test_insert_then_recompute_equals_longer_text() -> None:
    """After insert and recompute, the cache equals that of the longer text; without recompute, only
    a one-layer model's does.
    """
    model, params = lm = random_model("llama")
    ids, new = tokens(2, 9), np.array([[100, 101], [102, 103]])
    cache = filled(lm, ids)
    inserted = jaxllm.insert(model, params, cache, 4, new)
    repaired = jaxllm.recompute(model, params, inserted, 6, 11)
    for row in range(2):
        text = [*ids[row, :4], *new[row], *ids[row, 4:]]
        assert inserted.tokens(row) == repaired.tokens(row) == text
        close(peek(lm, repaired)[row], fresh(lm, text))
        assert not np.allclose(peek(lm, inserted)[row], fresh(lm, text), atol=1e-3)
    # The cache entries of a single layer depend only on their own token.
    one = random_model("llama", num_hidden_layers=1)
    inserted = jaxllm.insert(*one, filled(one, ids), 4, new)
    close(peek(one, inserted)[1], fresh(one, [*ids[1, :4], *new[1], *ids[1, 4:]]))


def test_recompute_after_close_gaps_equals_shorter_text() -> None:
    model, params = lm = random_model("llama")
    cut = close_gaps(drop_range(filled(lm, tokens(1, 9)), 2, 5))
    again = jaxllm.recompute(model, params, cut, 2, 6)
    close(peek(lm, again)[0], fresh(lm, again.tokens()))


def test_learned_positions_allow_only_insertions_without_shifts() -> None:
    """With learned positions, insert works at the end and commit fills a gap; inserting in the
    middle is refused.
    """
    model, params = lm = random_model("gpt2")
    cache = filled(lm, tokens(1, 9))
    with pytest.raises(ConfigError, match="gpt2 has learned position"):
        jaxllm.insert(model, params, cache, 4, [[1]])
    longer = jaxllm.insert(model, params, cache, 9, [[1, 2]])
    close(peek(lm, longer)[0], fresh(lm, [*tokens(1, 9)[0], 1, 2]))
    gap = drop_range(cache, 3, 5)
    out = jaxllm.forward(model, params, gap, [[7, 8]], positions_BT=[[3, 4]])
    filled_in = jaxllm.commit(gap, out.delta)
    assert filled_in.tokens() == [*tokens(1, 9)[0, :3], 7, 8, *tokens(1, 9)[0, 5:]]


def test_recompute_and_insert_refuse_invalid_arguments() -> None:
    model, params = lm = random_model("llama")
    cache = filled(lm, tokens(1, 9), capacity=10)
    with pytest.raises(TokenError, match="requires start < stop"):
        jaxllm.recompute(model, params, cache, 5, 5)
    with pytest.raises(TokenError, match=r"tokens must be \[1, T\]"):
        jaxllm.insert(model, params, cache, 2, [1, 2])
    with pytest.raises(TokenError, match="position must be a whole number from 0 to"):
        jaxllm.insert(model, params, cache, -1, [[1]])
    with pytest.raises(CapacityError, match="2 more tokens do not fit"):
        jaxllm.insert(model, params, cache, 2, [[1, 2]])
