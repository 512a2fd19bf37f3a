"""Pooled slots against brute force in NumPy: undo RoPE, average, rotate to one position."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.cache import close_gaps, compact, keep
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError
from jaxllm.generation.loops.overflow import OverflowState
from jaxllm.generation.sampling.sampler import Context
from jaxllm.ops import dequantize
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.research.token_merging.policies import PoolByAttention, PoolOlder
from jaxllm.research.token_merging.pool import pool, pool_mass
from tests.cache.caches import close, entries, filled, keys, lm_of, peek, rotated
from tests.tiny_models import random_model, tokens

IDS = tokens(2, 17)
RATIO, SINKS, RECENT = 3, 2, 4
# 11 of 17 tokens are old: three groups of three, and two left over.
GROUPS = [[0], [1], [2, 3, 4], [5, 6, 7], [8, 9, 10], [11], [12], [13], [14], [15], [16]]


def brute_force_pool(
    cache: Any, groups: list[list[int]], weights: Any = None
) -> tuple[np.ndarray, ...]:
    """Return keys and values of row 0, `[layers, groups, K, H]`.

    The cache is compact and starts at position 0.
    """
    theta = cache.config.rope.rope_theta
    ks, vs = [], []
    for layer in range(len(cache.tail.k)):
        k = np.asarray(dequantize(cache.tail.k[layer]), np.float64)[0]
        v = np.asarray(dequantize(cache.tail.v[layer]), np.float64)[0]
        for group in groups:
            w = np.ones(len(group)) if weights is None else np.asarray(weights)[group]
            w = w / w.sum()
            unrotated = [rotated(k[p], -p, theta) for p in group]
            ks.append(
                rotated(sum(x * y for x, y in zip(unrotated, w, strict=True)), group[-1], theta)
            )
            vs.append(sum(v[p] * y for p, y in zip(group, w, strict=True)))
    shape = (len(cache.tail.k), len(groups), *ks[0].shape)
    return np.reshape(ks, shape), np.reshape(vs, shape)


def values(cache: Any, count: int) -> np.ndarray:
    return np.stack([np.asarray(dequantize(v))[0, :count] for v in cache.tail.v])


@pytest.fixture(scope="module")
def filled_lm() -> Any:
    lm = lm_of(("llama", "float32"), num_hidden_layers=2)
    return lm, filled(lm, IDS)


@pytest.mark.parametrize("weighted", [False, True])
def test_pool_averages_keys_without_rotation(filled_lm: Any, weighted: bool) -> None:
    """Neighbors are averaged after undoing RoPE and rotated to the last position of their group;
    masses weight and sum.
    """
    _, cache = filled_lm
    mass = np.random.default_rng(0).random((2, cache.slots)).astype(np.float32)
    found = pool(cache, ratio=RATIO, sinks=SINKS, recent=RECENT, mass_BS=mass if weighted else None)
    k, v = brute_force_pool(cache, GROUPS, mass[0] if weighted else None)
    close(keys(found), k)
    close(values(found, len(GROUPS)), v)
    last = [g[-1] for g in GROUPS]
    n = len(last)
    assert np.asarray(found.position_BS)[:, :n].tolist() == [last, last]
    assert (np.asarray(found.position_BS)[:, n:] < 0).all()
    assert found.tokens(0) == IDS[0, last].tolist()
    assert np.asarray(found.patched_BS)[0, :n].tolist() == [len(g) > 1 for g in GROUPS]
    assert int(found.cursor) == n and found.next_position_B.tolist() == [17, 17]
    summed = pool_mass(cache, mass, ratio=RATIO, sinks=SINKS, recent=RECENT)
    np.testing.assert_allclose(summed[1, :n], [mass[1, g].sum() for g in GROUPS], rtol=1e-6)


def test_pool_keeps_single_slots_and_never_merges_twice(filled_lm: Any) -> None:
    """Slots outside a group keep every bit, and a pooled slot is not pooled again."""
    lm, cache = filled_lm
    before = entries(cache)
    found = pool(cache, ratio=RATIO, sinks=SINKS, recent=RECENT)
    after = entries(found)
    singles = [g[0] for g in GROUPS if len(g) == 1]
    assert all(after[row, p] == before[row, p] for row in (0, 1) for p in singles)
    assert entries(pool(cache, ratio=1, sinks=0, recent=0)) == before
    # With one recent token less, the two left over and one more form the next group.
    again = pool(found, ratio=RATIO, sinks=SINKS, recent=RECENT - 1)
    now = entries(again)
    assert [p for row, p in sorted(now) if row == 0] == [0, 1, 4, 7, 10, 13, 14, 15, 16]
    assert all(now[0, p] == after[0, p] for p in (0, 1, 4, 7, 10, 14, 15, 16))
    close(peek(lm, found), peek(lm, compact(found, capacity=32)))


def test_pool_groups_stop_at_patched_and_culled_slots(filled_lm: Any) -> None:
    """A group ends where a slot is patched or culled; arrays of NumPy give the same cache."""
    _, cache = filled_lm
    first = pool(cache, ratio=3, sinks=7, recent=7)  # 7, 8, 9 as one slot, at position 9
    assert pool(jax.device_get(cache), ratio=3, sinks=7, recent=7) == first
    found = pool(first, ratio=3, sinks=0, recent=4)
    positions = np.asarray(found.position_BS)[0]
    assert positions[positions >= 0].tolist() == [2, 5, 6, 9, 12, 13, 14, 15, 16]
    mask = np.ones((1, cache.slots), bool)
    mask[:, 3] = False
    left = pool(keep(cache, mask), ratio=2, sinks=0, recent=11)
    positions = np.asarray(left.position_BS)[0]
    assert positions[positions >= 0].tolist() == [1, 4, *range(5, 17)]  # 5 is left over


def test_pooled_int8_entries_round_once_more() -> None:
    """Pooled int8 entries are within half a step of the exact average."""
    lm = lm_of(("llama", "int8"), num_hidden_layers=1)
    cache = filled(lm, IDS)
    found = pool(cache, ratio=RATIO, sinks=SINKS, recent=RECENT)
    k, v = brute_force_pool(cache, GROUPS)
    for ours, exact in ((keys(found), k), (values(found, len(GROUPS)), v)):
        step = np.abs(exact).max(axis=-1, keepdims=True) / 127
        assert (np.abs(ours - exact) <= step * 0.51).all()
    assert found.dtype == "int8"


def test_overflow_policy_keeps_sinks_pooled_and_recent(filled_lm: Any) -> None:
    """The policy keeps the sinks, the newest pooled slots and the recent tokens, closes gaps, and
    carries the summed mass.
    """
    (model, params), cache = filled_lm
    policy = PoolOlder(ratio=3, sinks=2, pooled_slots=2, recent=4)
    assert policy.max_kept(24) == 10
    context = Context.empty(np.zeros(2, np.uint32), 2)
    mass = np.random.default_rng(0).random((2, cache.slots)).astype(np.float32)
    found, none = policy(OverflowState(model, params, cache, context, None))
    assert none is None
    left = [[0], [1], *GROUPS[3:]]  # the oldest pooled slot is dropped
    k, v = brute_force_pool(cache, left)
    theta = cache.config.rope.rope_theta
    for layer in range(2):
        for i, group in enumerate(left):
            k[layer, i] = rotated(k[layer, i], i - group[-1], theta)
    close(keys(found), k)
    close(values(found, len(left)), v)
    assert found.next_position_B.tolist() == [len(left)] * 2
    # The mass is carried along: a slot has the sum of its tokens.
    weighted = PoolByAttention(ratio=3, sinks=2, pooled_slots=2, recent=4)
    _, total = weighted(OverflowState(model, params, cache, context, mass))
    assert total is not None
    expected = [mass[1, g].sum() for g in left]
    np.testing.assert_allclose(total[1, : len(left)], expected, rtol=1e-6)


def test_generation_continues_beyond_cache_capacity(filled_lm: Any) -> None:
    """With a pooling policy, generation exceeds the cache's capacity and equals its stream."""
    model, params = filled_lm[0]
    for policy in (PoolOlder(), PoolByAttention()):
        cache = jaxllm.init_cache(model.config, 2, 24)
        given = {"max_new_tokens": 40, "overflow": policy, "cache": cache}
        result = jaxllm.generate(model, params, IDS, **given)
        assert result.length_B.tolist() == [40, 40] and int(result.cache.cursor) <= 24
        steps = jaxllm.stream(model, params, IDS, **given)
        assert [s.token_BT[0, 0] for s in steps] == result.token_BT[0].tolist()


def test_invalid_pooling_is_refused(filled_lm: Any) -> None:
    """Invalid ratios and masses, learned or length-dependent positions and dilation are refused."""
    _, cache = filled_lm
    with pytest.raises(CapacityError, match="ratio must be a whole number from 1"):
        pool(cache, ratio=0, sinks=0, recent=0)
    with pytest.raises(CacheMismatchError, match="attention mass has"):
        pool(cache, ratio=2, sinks=0, recent=0, mass_BS=np.zeros((1, 3), np.float32))
    lm = random_model("gpt2")
    with pytest.raises(ConfigError, match=r"gpt2 has learned position embeddings.* slide"):
        pool(jaxllm.init_cache(lm[0].config, 1, 8), ratio=2, sinks=0, recent=0)
    with pytest.raises(CapacityError, match="cannot keep 4 sinks"):
        PoolOlder(pooled_slots=9, recent=9).max_kept(24)
    config = random_model("phi3")[0].config
    with pytest.raises(ConfigError, match="follow the text's length"):
        pool(jaxllm.init_cache(config, 1, 8), ratio=2, sinks=0, recent=0)
    dilated = LongAttention(kind="dilated", segment_lengths=(4,), dilated_ratios=(1,))
    config = dataclasses.replace(cache.config, attention=dilated)
    with pytest.raises(ConfigError, match="kind 'dilated' selects tokens by position"):
        pool(jaxllm.init_cache(config, 1, 8), ratio=2, sinks=0, recent=0)
    assert close_gaps(pool(cache, ratio=2, sinks=0, recent=0)).next_position_B.tolist() == [9, 9]
