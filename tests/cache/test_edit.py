"""Rewinding, dropping, shifting and patching, each against a fresh run of the resulting text."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.cache import (
    KVCache,
    branch,
    close_gaps,
    compact,
    drop_range,
    find_slots,
    fork,
    keep,
    merge_rows,
    patch,
    rewind,
    select,
    shift,
)
from jaxllm.cache.kv import EMPTY, cull_mark
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from tests.cache.caches import KINDS, buffers, close, entries, filled, fresh, keys, lm_of, peek
from tests.tiny_models import ROPES, random_model, tokens


@pytest.fixture(scope="module", params=KINDS)
def lm(request: pytest.FixtureRequest) -> Any:
    return lm_of(request.param)


@pytest.fixture(scope="module", params=["float32", "int8"])
def llama(request: pytest.FixtureRequest) -> Any:
    return lm_of(("llama", request.param))


def forked(lm: Any) -> KVCache:
    """Return two rows that share positions 0 to 8 and differ at 9 and 10."""
    forks = fork(filled(lm, tokens(1, 9)), 2, capacity=8)
    return jaxllm.prefill(*lm, forks, tokens(2, 2, seed=3)).cache


@pytest.mark.parametrize("n", [0, 1, 4, [2, 5]])
def test_rewound_cache_equals_never_committed(lm: Any, n: Any) -> None:
    """Logits are those of a cache that never ran the tokens; the later cache still works."""
    ids = tokens(2, 9)
    cache = filled(lm, ids)
    back = rewind(cache, n)
    assert buffers(back.tail) == buffers(cache.tail)
    lengths = (9 - np.broadcast_to(n, 2)).tolist()
    assert back.length_B.tolist() == back.next_position_B.tolist() == lengths
    assert rewind(cache, to=np.array(lengths)).length_B.tolist() == lengths
    logits, again = jaxllm.decode_step(*lm, back, np.array([50, 60]))
    for row, token in enumerate((50, 60)):
        text = ids[row, : lengths[row]]
        close(logits[row], fresh(lm, text, token=token))
        close(peek(lm, again)[row], fresh(lm, [*text, token]))
    close(peek(lm, cache)[0], fresh(lm, ids[0]))  # and the later cache still works


def test_rewind_frees_slots(llama: Any) -> None:
    """Slots freed by a rewind can be filled with another text."""
    full = filled(llama, tokens(2, 9))
    full = compact(full, capacity=9)
    back = rewind(full, 4)
    assert int(back.cursor) == 5
    ids = np.concatenate([tokens(2, 9)[:, :5], tokens(2, 4, seed=7)], axis=1)
    logits, again = jaxllm.prefill(*llama, back, ids[:, 5:])
    for row in range(2):
        close(logits[row], fresh(llama, ids[row, :-1], token=ids[row, -1]))
    assert int(rewind(again, 9).cursor) == 0


def test_rewind_forgets_later_culls(llama: Any) -> None:
    """Rewinding to before culled tokens empties their slots; to after them keeps their marks."""
    cut = drop_range(filled(llama, tokens(2, 9)), 6, 8)
    back = rewind(cut, to=5)
    assert int(back.cursor) == 5
    assert (np.asarray(back.position_BS)[:, 5:] == EMPTY).all()
    assert (np.asarray(rewind(cut, to=8).position_BS)[:, 6:8] == cull_mark(np.array([6, 7]))).all()


def test_drop_range_excludes_its_stop(llama: Any) -> None:
    cut = drop_range(filled(llama, tokens(2, 9)), [2, 0], [4, 1])
    left = [sorted(p for p in row if p >= 0) for row in np.asarray(cut.position_BS).tolist()]
    assert left == [[0, 1, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]]


def test_cull_mark_is_reversible_and_distinct() -> None:
    """Marks of culled slots are no positions, not the empty mark, and decode to their positions."""
    positions = np.arange(300)
    assert (cull_mark(positions) < EMPTY).all()
    assert (cull_mark(cull_mark(positions)) == positions).all()


def test_rewind_reaches_into_shared_prefix(lm: Any) -> None:
    forks = fork(filled(lm, tokens(1, 9)), 2, capacity=4)
    back = rewind(forks, [0, 3])
    assert buffers(back.frozen[0]) == buffers(forks.frozen[0])
    close(peek(lm, back)[0], fresh(lm, tokens(1, 9)[0]))
    close(peek(lm, back)[1], fresh(lm, tokens(1, 9)[0, :6]))


def test_failed_step_leaves_cache_usable(lm: Any) -> None:
    """A donated step that raises an error leaves its cache unchanged."""
    cache = filled(lm, tokens(1, 9), capacity=10)
    before = peek(lm, cache)
    for bad in ([[999]], [[1, 2]]):
        with pytest.raises(jaxllm.errors.JaxllmError):
            jaxllm.prefill(*lm, cache, bad, donate=True)
    np.testing.assert_array_equal(peek(lm, cache), before)


def test_culled_cache_equals_compacted_cache(lm: Any) -> None:
    """Masking has the logits of a cache without the tokens; compact keeps positions and tokens."""
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
    assert np.asarray(dense.tail.position_BS)[0, :6].tolist() == [0, 2, 3, 6, 7, 8]
    assert dense.tokens(0) == tokens(2, 9)[0, [0, 2, 3, 6, 7, 8]].tolist()


def test_culled_attention_equals_brute_force() -> None:
    """In one layer, keys and values depend only on their own tokens, so a text with those tokens at
    those positions is an independent computation.
    """
    lm = random_model("llama", num_hidden_layers=1)
    ids = tokens(1, 9)
    left = [0, 1, 4, 5, 6, 8]
    mask = np.isin(np.arange(24), left)[None]
    expected = fresh(lm, ids[0, left], positions=[*left, 9])
    close(peek(lm, keep(filled(lm, ids), mask))[0], expected)
    dropped = drop_range(drop_range(filled(lm, ids), 2, 4), 7, 8)
    close(peek(lm, dropped)[0], expected)


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_shift_equals_run_at_shifted_positions(rope: str) -> None:
    """Shifted keys and logits equal a run at the shifted positions, for every RoPE scaling."""
    scaling = {**ROPES[rope], "rope_theta": 100.0}
    model, params = lm = random_model("llama", rope_parameters=scaling)
    ids, m = tokens(1, 9), 30
    moved = shift(filled(lm, ids), m)
    there = jaxllm.init_cache(model.config, 1, 24)
    positions = m + np.arange(9)[None]
    _, there = jaxllm.prefill(model, params, there, ids, positions_BT=positions)
    assert moved.tokens() == there.tokens()
    assert moved.next_position_B.tolist() == there.next_position_B.tolist() == [39]
    close(keys(moved), keys(there))
    close(peek(lm, moved), peek(lm, there))


def test_shift_and_inverse_restore_keys_within_rounding(llama: Any) -> None:
    """Shifting there and back restores positions and values exactly, and keys within rounding."""
    cache = filled(llama, tokens(1, 9))
    again = shift(shift(cache, 40), -40)
    np.testing.assert_array_equal(again.position_BS, cache.position_BS)
    # float32: a few roundings of a rotation; int8: two half steps of 1/127 of the largest entry,
    # which a rotation of a pair can spread over both.
    atol = {"float32": 2e-6, "int8": 2.5 / 127}[cache.dtype]
    assert np.abs(keys(again) - keys(cache)).max() <= atol * np.abs(keys(cache)).max()
    for ours, theirs in zip(again.tail.v, cache.tail.v, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_partial_shift_equals_brute_force(llama: Any) -> None:
    """With one layer, rows that move by different amounts, also in a shared prefix, equal fresh
    runs at the new positions.
    """
    one = lm_of(("llama", llama[0].precision.cache), num_hidden_layers=1)
    cache = forked(one)
    by, start = np.array([10, 3]), np.array([6, 10])
    moved = shift(drop_range(cache, 2, 3), by, start=start)
    assert moved.next_position_B.tolist() == [21, 14]
    for row in range(2):
        text = np.append(tokens(1, 9)[0], tokens(2, 2, seed=3)[row])
        old = np.array([p for p in range(11) if p != 2])
        new = np.where(old >= start[row], old + by[row], old)
        expected = fresh(one, text[old], positions=[*new, int(moved.next_position_B[row])])
        close(peek(one, moved)[row], expected, atol=1e-5 if cache.dtype == "float32" else 0.03)


def test_uniform_shift_keeps_prefix_shared(llama: Any) -> None:
    moved = shift(rewind(forked(llama), to=[5, 11]), 7, start=2)
    assert jax.tree.leaves(moved.frozen[0].k)[0].shape[0] == 1
    single = shift(branch(forked(llama), 1), 7, start=2)
    close(peek(llama, moved)[1], peek(llama, single)[0])


def test_close_gaps_renumbers_to_contiguous_text() -> None:
    """With one layer, a cache with closed gaps equals a fresh run of the remaining tokens."""
    lm = random_model("llama", num_hidden_layers=1)
    closed = close_gaps(drop_range(forked(lm), [2, 4], [5, 10]))
    assert closed.next_position_B.tolist() == closed.length_B.tolist() == [8, 5]
    for row in range(2):
        close(peek(lm, closed)[row], fresh(lm, closed.tokens(row)))


def test_patch_restores_corrupted_entries(lm: Any) -> None:
    """Recomputed entries over corrupted ones restore the logits, and their slots are marked."""
    cache = filled(lm, tokens(2, 9))
    k, v = jax.tree.map(lambda x: x.at[:, 3:5].set(1), (cache.tail.k, cache.tail.v))
    broken = cache.replace(tail=cache.tail.replace(k=k, v=v))
    at = find_slots(cache, [[3, 4], [3, 4]])
    out = jaxllm.forward(
        *lm, rewind(cache, to=3), tokens(2, 9)[:, 3:5], positions_BT=[[3, 4], [3, 4]]
    )
    repaired = patch(broken, at, out.delta)
    assert not np.allclose(peek(lm, broken), peek(lm, cache), atol=1e-3)
    close(peek(lm, repaired), peek(lm, cache))
    assert repaired.tokens(1) == cache.tokens(1)
    assert np.asarray(repaired.patched_BS).nonzero()[1].tolist() == [3, 4, 3, 4]


def test_patch_of_shared_slot_affects_one_row(lm: Any) -> None:
    cache = forked(lm)
    ids, at = np.array([[5], [6]]), np.array([[2], [2]])
    out = jaxllm.forward(*lm, rewind(cache, to=2), ids, positions_BT=at)
    patched = patch(cache, np.array([[-1], [2]]), out.delta)
    assert patched.tokens(0) == cache.tokens(0)
    assert patched.tokens(1)[2] == 6
    close(peek(lm, patched)[0], peek(lm, cache)[0])
    assert not np.allclose(peek(lm, patched)[1], peek(lm, cache)[1], atol=1e-3)


def patched_at_3(lm: Any, cache: KVCache) -> KVCache:
    out = jaxllm.forward(*lm, cache, np.full((2, 1), 77), positions_BT=np.full((2, 1), 3))
    return patch(cache, find_slots(cache, np.full((2, 1), 3)), out.delta)


# Maps a (row, position) before an operation to that after it, or to None if the entry is removed or
# changed. Every mapped entry must keep every bit.
Place = Callable[[int, int], tuple[int, int] | None]
OPERATIONS: dict[str, tuple[Callable[[Any, KVCache], KVCache], Place]] = {
    "rewind": (
        lambda lm, c: rewind(c, to=[5, 10]),
        lambda r, p: (r, p) if p < [5, 10][r] else None,
    ),
    "keep": (
        lambda lm, c: keep(c, np.arange(c.slots)[None] % 3 != 1),
        lambda r, p: (r, p) if p < 9 and p % 3 != 1 else None,
    ),
    "drop_range": (
        lambda lm, c: drop_range(c, [2, 0], 7),
        lambda r, p: (r, p) if p >= 7 or p < [2, 0][r] else None,
    ),
    "compact": (lambda lm, c: compact(c, capacity=12), lambda r, p: (r, p)),
    "shift": (lambda lm, c: shift(c, 5, start=4), lambda r, p: (r, p) if p < 4 else None),
    "close_gaps": (
        lambda lm, c: close_gaps(drop_range(c, 4, 6)),
        lambda r, p: (r, p) if p < 4 else None,
    ),
    "patch": (patched_at_3, lambda r, p: (r, p) if p != 3 else None),
    "recompute": (
        lambda lm, c: jaxllm.recompute(*lm, drop_range(c, 2, 3), 4, 6),
        lambda r, p: (r, p) if p not in (2, 4, 5) else None,
    ),
    "insert": (
        lambda lm, c: jaxllm.insert(*lm, c, 8, [[1], [2]]),
        lambda r, p: (r, p) if p < 8 else None,
    ),
    "select": (lambda lm, c: select(c, [1, 0]), lambda r, p: (1 - r, p)),
    "merge_rows": (lambda lm, c: merge_rows([branch(c, 1), c]), lambda r, p: (r + 1, p)),
    "fork": (lambda lm, c: fork(branch(c, 1), 2, capacity=3), lambda r, p: (0, p) if r else None),
}
ROTATING = {"shift", "close_gaps", "insert"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_untouched_entries_keep_every_bit(lm: Any, name: str) -> None:
    """Operations keep every bit of the entries that they do not change, and their argument."""
    cache = forked(lm)
    before = entries(cache)
    operate, place = OPERATIONS[name]
    if name in ROTATING and lm[0].config.model_type == "gpt2":
        with pytest.raises(ConfigError, match="cannot move"):
            operate(lm, cache)
        return
    after = entries(operate(lm, cache))
    stayed = {key: to for key in before if (to := place(*key)) is not None}
    assert len(stayed) >= 4
    for key, to in stayed.items():
        assert after[to] == before[key], f"{key} -> {to}"
    assert entries(cache) == before  # and the argument is unchanged


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"merge_rows"}))
def test_every_operation_runs_under_jit(name: str) -> None:
    operate, _ = OPERATIONS[name]
    model, params = lm = lm_of(("llama", "int8"))
    cache = forked(lm)
    plain = operate(lm, cache)
    traced = jax.jit(lambda params, c: operate((model, params), c))(params, cache)
    assert traced.batch == plain.batch
    for row in range(plain.batch):
        assert traced.tokens(row) == plain.tokens(row)
    for ours, theirs in zip(jax.tree.leaves(traced), jax.tree.leaves(plain), strict=True):
        close(ours, theirs)  # int8 rounding may differ at ties


def test_cache_operations_vmap_over_stacked_caches(lm: Any) -> None:
    cache = filled(lm, tokens(2, 9))
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    assert "a stack of (2,)" in repr(stack)
    two = jax.vmap(rewind)(stack, jnp.array([1, 3]))
    assert two.next_position_B.tolist() == [[8, 8], [6, 6]]
    culled = jax.vmap(lambda c, start: compact(drop_range(c, start, 7)))(stack, jnp.array([2, 5]))
    second = jax.tree.map(lambda x: x[1], culled)
    assert second.tokens(0) == tokens(2, 9)[0, [0, 1, 2, 3, 4, 7, 8]].tolist()
    close(peek(lm, second), peek(lm, drop_range(cache, 5, 7)))


def test_invalid_cache_edits_are_refused(llama: Any) -> None:
    """Impossible rewinds, masks, capacities, shifts and patches raise errors that name them."""
    cache = filled(llama, tokens(2, 9))
    with pytest.raises(CapacityError, match="cannot rewind"):
        rewind(cache, 10)
    with pytest.raises(CapacityError, match="cannot rewind"):
        rewind(cache, -1)
    with pytest.raises(CapacityError, match="either n"):
        rewind(cache)
    with pytest.raises(CacheMismatchError, match="mask has shape"):
        keep(cache, np.ones((2, 9), bool))
    with pytest.raises(CapacityError, match="9 tokens do not fit into 8"):
        compact(cache, capacity=8)
    with pytest.raises(TokenError, match="two tokens at position 4"):
        shift(cache, -2, start=6)
    with pytest.raises(TokenError, match="a token would move to -1"):
        shift(cache, -1)
    delta = jaxllm.forward(*llama, cache, [[1], [2]]).delta
    with pytest.raises(CacheMismatchError, match="slot 9 of row 0 is empty"):
        patch(cache, [[9], [-1]], delta)
    with pytest.raises(CacheMismatchError, match="slot 24 out of range: the cache has 24"):
        patch(cache, [[1], [24]], delta)
    with pytest.raises(CacheMismatchError, match="slots"):
        patch(cache, [[1, 2]], delta)
    short = jaxllm.forward(*llama, cache, [[1], [2]], positions_BT=[[5], [5]]).delta
    with pytest.raises(TokenError, match="two tokens at position 5"):
        patch(cache, [[3], [3]], short)


def test_shift_refuses_dynamic_rope() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    lm = random_model("llama", rope_parameters=rope)
    with pytest.raises(ConfigError, match="dynamic"):
        shift(filled(lm, tokens(1, 9)), 1)
