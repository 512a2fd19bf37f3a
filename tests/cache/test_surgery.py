"""Branches, time travel and cuts: each against a fresh run of the text that it stands for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.cache import branch, compact, fork, keep, rewind, select
from jaxllm.errors import CacheMismatchError, CapacityError
from tests.twins import random_model, tokens


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def lm(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


def filled(lm: Any, ids: np.ndarray, capacity: int = 24) -> jaxllm.KVCache:
    model, params = lm
    cache = jaxllm.init_cache(model.config, ids.shape[0], capacity)
    return jaxllm.prefill(model, params, cache, ids)[1]


def peek(lm: Any, cache: jaxllm.KVCache, token: int = 7) -> np.ndarray:
    """Logits of one more token on each row."""
    model, params = lm
    ids = np.full((cache.batch, 1), token)
    return np.asarray(jaxllm.forward(model, params, cache, ids).logits[:, 0])


def fresh(lm: Any, ids: Any, positions: Any = None, token: int = 7) -> np.ndarray:
    """The same from the text itself, without a cache."""
    model, params = lm
    row = np.append(ids, token)[None]
    at = None if positions is None else np.asarray(positions)[None]
    return np.asarray(jaxllm.forward(model, params, None, row, positions_BT=at).logits[0, -1])


def close(a: Any, b: Any) -> None:
    scale = max(1.0, float(np.abs(b).max()))
    np.testing.assert_allclose(a, b, atol=1e-5 * scale)


def buffers(segment: jaxllm.Segment) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in (*segment.k, *segment.v)]


def test_interleaved_branches_equal_independent_runs(lm: Any) -> None:
    model, params = lm
    prefix = tokens(1, 9)
    forks = fork(filled(lm, prefix), 3, capacity=8)
    texts = [list(prefix[0]) for _ in range(3)]
    for step in range(5):
        token_B = np.array([3 * step, 50 + step, 100])
        _, forks = jaxllm.decode_step(model, params, forks, token_B)
        for text, token in zip(texts, token_B.tolist(), strict=True):
            text.append(token)
    for row, text in enumerate(texts):
        close(peek(lm, forks)[row], fresh(lm, text))
        close(peek(lm, branch(forks, row))[0], fresh(lm, text))


def test_a_fork_of_a_fork_shares_all_that_came_before(lm: Any) -> None:
    model, params = lm
    prefix = filled(lm, tokens(1, 9))
    _, forks = jaxllm.decode_step(model, params, fork(prefix, 2, capacity=4), np.array([1, 2]))
    again = fork(branch(forks, 1), 3, capacity=4)
    _, again = jaxllm.decode_step(model, params, again, np.array([10, 20, 30]))
    assert buffers(again.frozen[0]) == buffers(prefix.tail)
    for row, token in enumerate((10, 20, 30)):
        close(peek(lm, again)[row], fresh(lm, [*tokens(1, 9)[0], 2, token]))


def test_sixty_four_branches_cost_their_tails_alone(lm: Any) -> None:
    prefix = filled(lm, tokens(1, 9), capacity=4096)
    forks = fork(prefix, 64, capacity=2)
    tails = 64 * 2 * (prefix.nbytes / 4096)
    assert forks.nbytes < prefix.nbytes + 1.1 * tails
    assert forks.nbytes < 0.05 * 64 * prefix.nbytes


def test_branches_of_different_lengths_decode_in_one_batch(lm: Any) -> None:
    model, params = lm
    forks = fork(filled(lm, tokens(1, 9)), 2, capacity=8)
    ids, lengths = np.array([[1, 2, 3, 4], [5, 0, 0, 0]]), np.array([4, 1])
    _, forks = jaxllm.prefill(model, params, forks, ids, lengths_B=lengths)
    assert forks.length_B.tolist() == [13, 10]
    close(peek(lm, forks)[0], fresh(lm, [*tokens(1, 9)[0], 1, 2, 3, 4]))
    close(peek(lm, forks)[1], fresh(lm, [*tokens(1, 9)[0], 5]))


def test_generation_goes_on_from_a_fork(lm: Any) -> None:
    model, params = lm
    prefix = tokens(1, 9)
    forks = fork(filled(lm, prefix), 2, capacity=16)
    result = jaxllm.generate(model, params, [[1], [2]], max_new_tokens=8, cache=forks)
    for row, token in enumerate((1, 2)):
        text = np.append(prefix, [[token]], axis=1)
        alone = jaxllm.generate(model, params, text, max_new_tokens=8)
        assert result.token_BT[row].tolist() == alone.token_BT[0].tolist()


@pytest.mark.parametrize("n", [0, 1, 4, [2, 5]])
def test_rewound_equals_never_committed(lm: Any, n: Any) -> None:
    model, params = lm
    ids = tokens(2, 9)
    cache = filled(lm, ids)
    back = rewind(cache, n)
    assert buffers(back.tail) == buffers(cache.tail)
    lengths = (9 - np.broadcast_to(n, 2)).tolist()
    assert back.length_B.tolist() == back.next_position_B.tolist() == lengths
    logits, again = jaxllm.decode_step(model, params, back, np.array([50, 60]))
    for row, token in enumerate((50, 60)):
        text = ids[row, : lengths[row]]
        close(logits[row], fresh(lm, text, token=token))
        close(peek(lm, again)[row], fresh(lm, [*text, token]))
    close(peek(lm, cache)[0], fresh(lm, ids[0]))  # and the later cache still works


def test_a_rewind_reaches_into_what_is_shared(lm: Any) -> None:
    forks = fork(filled(lm, tokens(1, 9)), 2, capacity=4)
    back = rewind(forks, [0, 3])
    assert buffers(back.frozen[0]) == buffers(forks.frozen[0])
    close(peek(lm, back)[0], fresh(lm, tokens(1, 9)[0]))
    close(peek(lm, back)[1], fresh(lm, tokens(1, 9)[0, :6]))


def test_what_is_masked_is_as_if_it_had_been_gathered_away(lm: Any) -> None:
    model, _ = lm
    cache = filled(lm, tokens(2, 9))
    mask = np.ones((2, 24), bool)
    mask[0, [1, 4, 5]] = False
    mask[1, [0, 8]] = False
    culled = keep(cache, mask)
    assert buffers(culled.tail) == buffers(cache.tail)
    assert culled.length_B.tolist() == [6, 7]
    dense = compact(culled, capacity=10)
    assert dense.capacity == 10
    assert dense.length_B.tolist() == [6, 7]
    assert dense.next_position_B.tolist() == [9, 9]
    close(peek(lm, dense), peek(lm, culled))
    assert not np.allclose(peek(lm, culled), peek(lm, cache), atol=1e-3)
    kept = np.asarray(dense.tail.position_BS)[0, :6]
    assert kept.tolist() == [0, 2, 3, 6, 7, 8]
    for layer in range(model.config.num_hidden_layers):  # untouched entries, bit for bit
        np.testing.assert_array_equal(
            np.asarray(dense.tail.k[layer])[0, :6], np.asarray(cache.tail.k[layer])[0, kept]
        )


def test_culled_attention_equals_brute_force_over_what_is_left() -> None:
    """One layer: its keys and values depend on their own tokens alone, so a text with those tokens
    at those positions is an independent computation of the same."""
    lm = random_model("llama", num_hidden_layers=1)
    ids = tokens(1, 9)
    mask = np.ones((1, 24), bool)
    mask[0, [2, 3, 7]] = False
    left = [0, 1, 4, 5, 6, 8]
    close(
        peek(lm, keep(filled(lm, ids), mask))[0],
        fresh(lm, ids[0, left], positions=[*left, 9]),
    )


def test_rows_are_selected_as_beams_need_it(lm: Any) -> None:
    model, params = lm
    forks = fork(filled(lm, tokens(1, 9)), 3, capacity=6)
    _, forks = jaxllm.decode_step(model, params, forks, np.array([1, 2, 3]))
    chosen = select(forks, [2, 2, 0, 1])
    assert buffers(chosen.frozen[0]) == buffers(forks.frozen[0])
    np.testing.assert_array_equal(peek(lm, chosen), peek(lm, forks)[[2, 2, 0, 1]])
    single = select(filled(lm, tokens(1, 9)), [0, 0])
    assert single.batch == 2


def test_the_operations_run_under_jit_and_vmap(lm: Any) -> None:
    cache = filled(lm, tokens(2, 9))
    plain = peek(lm, rewind(cache, 2))
    np.testing.assert_allclose(peek(lm, jax.jit(rewind)(cache, 2)), plain, atol=1e-5)
    mask = jnp.arange(24)[None] % 3 != 0
    np.testing.assert_allclose(
        peek(lm, jax.jit(lambda c, m: compact(keep(c, m)))(cache, mask)),
        peek(lm, keep(cache, mask)),
        atol=1e-4,
    )
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    two = jax.vmap(rewind)(stack, jnp.array([1, 3]))
    assert two.next_position_B.tolist() == [[8, 8], [6, 6]]


def test_what_makes_no_sense_is_refused_by_name(lm: Any) -> None:
    cache = filled(lm, tokens(2, 9))
    with pytest.raises(CacheMismatchError, match="take one with branch"):
        fork(cache, 2)
    with pytest.raises(CapacityError, match="needs rows and slots"):
        fork(branch(cache, 0), 0)
    with pytest.raises(CacheMismatchError, match=r"rows \[2\] of a cache of 2"):
        branch(cache, 2)
    with pytest.raises(CapacityError, match="cannot rewind"):
        rewind(cache, 10)
    with pytest.raises(CapacityError, match="cannot rewind"):
        rewind(cache, -1)
    with pytest.raises(CacheMismatchError, match="the mask is"):
        keep(cache, np.ones((2, 9), bool))
    with pytest.raises(CapacityError, match="9 tokens do not fit into 8"):
        compact(cache, capacity=8)
