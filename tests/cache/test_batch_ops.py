"""Branches, selected and merged rows, each against a separate run of its text."""

from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.cache import branch, fork, keep, merge_rows, rewind, select
from jaxllm.errors import CacheMismatchError, CapacityError
from tests.cache.caches import KINDS, buffers, close, filled, fresh, lm_of, peek
from tests.tiny_models import tokens


@pytest.fixture(scope="module", params=KINDS)
def lm(request: pytest.FixtureRequest) -> Any:
    return lm_of(request.param)


def test_interleaved_branches_equal_independent_runs(lm: Any) -> None:
    prefix = tokens(1, 9)
    forks = fork(filled(lm, prefix), 3, capacity=8)
    texts = [list(prefix[0]) for _ in range(3)]
    for step in range(5):
        token_B = np.array([3 * step, 50 + step, 100])
        _, forks = jaxllm.decode_step(*lm, forks, token_B)
        for text, token in zip(texts, token_B.tolist(), strict=True):
            text.append(token)
    for row, text in enumerate(texts):
        close(peek(lm, forks)[row], fresh(lm, text))
        close(peek(lm, branch(forks, row))[0], fresh(lm, text))
        assert forks.tokens(row) == text


def test_alternating_branches_equal_independent_runs(lm: Any) -> None:
    """Branches in separate caches, stepped in turn, equal single runs and share the prefix."""
    prefix = tokens(1, 9)
    forks = fork(filled(lm, prefix), 3, capacity=8)
    branches = [branch(forks, row) for row in range(3)]
    texts = [list(prefix[0]) for _ in range(3)]
    for step in range(9):
        row, token = step % 3, 11 * step
        _, branches[row] = jaxllm.decode_step(*lm, branches[row], np.array([token]))
        texts[row].append(token)
    for cache, text in zip(branches, texts, strict=True):
        assert buffers(cache.frozen[0]) == buffers(forks.frozen[0])
        close(peek(lm, cache)[0], fresh(lm, text))


def test_nested_fork_shares_entire_prefix(lm: Any) -> None:
    prefix = filled(lm, tokens(1, 9))
    _, forks = jaxllm.decode_step(*lm, fork(prefix, 2, capacity=4), np.array([1, 2]))
    again = fork(branch(forks, 1), 3, capacity=4)
    _, again = jaxllm.decode_step(*lm, again, np.array([10, 20, 30]))
    assert buffers(again.frozen[0]) == buffers(prefix.tail)
    for row, token in enumerate((10, 20, 30)):
        close(peek(lm, again)[row], fresh(lm, [*tokens(1, 9)[0], 2, token]))


def test_fork_allocates_only_branch_tails(lm: Any) -> None:
    """64 branches of a long prefix take the memory of the prefix and of their short tails."""
    prefix = filled(lm, tokens(1, 9), capacity=4096)
    forks = fork(prefix, 64, capacity=2)
    tails = 64 * 2 * (prefix.nbytes / 4096)
    assert forks.nbytes < prefix.nbytes + 1.1 * tails
    assert forks.nbytes < 0.05 * 64 * prefix.nbytes


def test_branches_of_different_lengths_decode_in_batch(lm: Any) -> None:
    forks = fork(filled(lm, tokens(1, 9)), 2, capacity=8)
    ids, lengths = np.array([[1, 2, 3, 4], [5, 0, 0, 0]]), np.array([4, 1])
    _, forks = jaxllm.prefill(*lm, forks, ids, lengths_B=lengths)
    assert forks.length_B.tolist() == [13, 10]
    close(peek(lm, forks)[0], fresh(lm, [*tokens(1, 9)[0], 1, 2, 3, 4]))
    close(peek(lm, forks)[1], fresh(lm, [*tokens(1, 9)[0], 5]))


def test_generation_continues_from_fork(lm: Any) -> None:
    prefix = tokens(1, 9)
    forks = fork(filled(lm, prefix), 2, capacity=16)
    result = jaxllm.generate(*lm, [[1], [2]], max_new_tokens=8, cache=forks)
    for row, token in enumerate((1, 2)):
        text = np.append(prefix, [[token]], axis=1)
        separate = jaxllm.generate(*lm, text, max_new_tokens=8)
        assert result.token_BT[row].tolist() == separate.token_BT[0].tolist()


def test_select_gathers_rows_for_beam_search(lm: Any) -> None:
    """Selecting rows, also repeatedly, gives their logits' bits and shares the prefix buffers."""
    forks = fork(filled(lm, tokens(1, 9)), 3, capacity=6)
    _, forks = jaxllm.decode_step(*lm, forks, np.array([1, 2, 3]))
    chosen = select(forks, [2, 2, 0, 1])
    assert buffers(chosen.frozen[0]) == buffers(forks.frozen[0])
    np.testing.assert_array_equal(peek(lm, chosen), peek(lm, forks)[[2, 2, 0, 1]])
    single = select(filled(lm, tokens(1, 9)), [0, 0])
    assert single.batch == 2


def test_select_keeps_each_rows_length(lm: Any) -> None:
    cache = rewind(filled(lm, tokens(3, 9)), [1, 4, 2])
    taken = select(cache, [2, 0, 1, 2])
    assert taken.next_position_B.tolist() == taken.length_B.tolist() == [7, 8, 5, 7]


def test_merged_rows_keep_texts_and_free_slots(lm: Any) -> None:
    """Merged rows keep their texts; the merged cache has the free slots of the roomiest input."""
    short, long = filled(lm, tokens(1, 4)), filled(lm, tokens(2, 9, seed=1), capacity=12)
    both = merge_rows([short, long])
    assert both.length_B.tolist() == [4, 9, 9]
    assert both.capacity - int(both.cursor) == 20  # as many free slots as `short` has
    _, both = jaxllm.decode_step(*lm, both, np.array([1, 2, 3]))
    close(peek(lm, both)[0], fresh(lm, [*tokens(1, 4)[0], 1]))
    close(peek(lm, both)[2], fresh(lm, [*tokens(2, 9, seed=1)[1], 3]))


def test_merged_branches_keep_sharing_prefix(lm: Any) -> None:
    forks = fork(filled(lm, tokens(1, 9)), 2, capacity=8)
    _, forks = jaxllm.decode_step(*lm, forks, np.array([1, 2]))
    one, two = branch(forks, 0), rewind(branch(forks, 1), 4)  # two has less of the prefix
    culled = keep(one, np.arange(one.slots)[None] != 3)
    merged = merge_rows([one, two, culled, fork(branch(forks, 1), 2, capacity=3)])
    assert buffers(merged.frozen[0]) == buffers(forks.frozen[0])
    assert merged.length_B.tolist() == [10, 6, 9, 10, 10]
    close(peek(lm, merged)[0], fresh(lm, [*tokens(1, 9)[0], 1]))
    close(peek(lm, merged)[1], fresh(lm, tokens(1, 9)[0, :6]))
    close(peek(lm, merged)[2], peek(lm, culled)[0])
    close(peek(lm, merged)[4], fresh(lm, [*tokens(1, 9)[0], 2]))


def test_invalid_row_operations_are_refused(lm: Any) -> None:
    """Impossible forks, selections and merges raise errors that name the problem."""
    cache = filled(lm, tokens(2, 9))
    with pytest.raises(CacheMismatchError, match="Select one with branch"):
        fork(cache, 2)
    with pytest.raises(CapacityError, match="n must be a whole number"):
        fork(branch(cache, 0), 0)
    for rows in ([2], [-1]):
        with pytest.raises(CacheMismatchError, match=r"the cache has 2 rows"):
            select(cache, rows)
    with pytest.raises(CacheMismatchError, match="non-empty"):
        select(cache, [])
    with pytest.raises(CacheMismatchError, match="none"):
        merge_rows([])
    with pytest.raises(CapacityError, match="9 slots are used, more than capacity 8"):
        merge_rows([cache, cache], capacity=8)
    other = jaxllm.init_cache(lm[0].config, 1, 4, dtype="bfloat16")
    with pytest.raises(CacheMismatchError, match="one model and one dtype"):
        merge_rows([cache, other])
