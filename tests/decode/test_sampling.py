"""Samplers against brute force, transformers' warpers, and the laws that they must draw from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import jaxllm
from jaxllm.decode.options import make_sampler
from jaxllm.decode.sampling import GREEDY, Context, Sampler, row_keys, sample
from jaxllm.decode.sampling import process as process_in
from jaxllm.decode.truncation import TopK, TopP
from jaxllm.errors import SamplingError

TOP_K, TOP_P = jax.jit(TopK.__call__), jax.jit(TopP.__call__)


def process(logits_BV: jax.Array, sampler: Sampler) -> jax.Array:
    """The scores without any text before them."""
    return process_in(logits_BV, sampler, Context.empty(jax.random.key(0), logits_BV.shape[0]))


def logits(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * 3).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 131, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_the_chain_equals_transformers_warpers(
    temperature: float, top_k: int, top_p: float
) -> None:
    x = logits(4, 131)
    theirs = TemperatureLogitsWarper(temperature)(None, torch.tensor(x))
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = process(jnp.asarray(x), make_sampler(temperature=temperature, top_k=top_k, top_p=top_p))
    np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), rtol=1e-6)


def test_top_k_keeps_all_ties_and_top_p_zero_keeps_one() -> None:
    x = jnp.array([[1.0, 3.0, 2.0, 2.0, 0.0], [-0.0, 0.0, -1.0, -2.0, -3.0]])
    kept = np.isfinite(np.asarray(TopK(2)(x)))
    assert kept.tolist() == [[False, True, True, True, False], [True, True, False, False, False]]
    assert np.isfinite(np.asarray(TopP(0.0)(x[:1]))).tolist() == [[False, True] + [False] * 3]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-50, 50, width=32, allow_subnormal=False), min_size=6, max_size=6),
    st.integers(1, 8),
    st.floats(0.01, 0.99),
)
def test_top_k_and_top_p_equal_brute_force(values: list[float], k: int, p: float) -> None:
    x = np.array(values, np.float32)
    kept_k = np.isfinite(np.asarray(TOP_K(TopK(k), jnp.asarray(x)[None])))[0]
    assert kept_k.tolist() == [bool((x > v).sum() < k) for v in x]
    mass = np.exp(x.astype(np.float64) - x.max())
    mass /= mass.sum()
    above = np.array([mass[x > v].sum() for v in x])
    kept_p = np.isfinite(np.asarray(TOP_P(TopP(p), jnp.asarray(x)[None])))[0]
    certain = np.abs(above - p) > 1e-5  # where float32 sums cannot decide otherwise
    assert (kept_p == (above < p))[certain].all()


def test_each_row_has_its_own_settings() -> None:
    x = jnp.asarray(logits(3, 131))
    mixed = process(x, make_sampler(temperature=[0.5, 1.0, 0.0], top_k=[3, 0, 9]))
    for row, (temperature, top_k) in enumerate([(0.5, 3), (1.0, 0), (0.0, 9)]):
        alone = process(x[row : row + 1], make_sampler(temperature=temperature, top_k=top_k))
        np.testing.assert_array_equal(np.asarray(mixed[row]), np.asarray(alone[0]))


def test_temperature_zero_is_greedy_and_ties_go_to_the_first() -> None:
    x = jnp.array([[1.0, 5.0, 5.0], [0.0, 0.0, 0.0]])
    cold = make_sampler(temperature=0.0)
    for seed in range(20):
        assert sample(jax.random.key(seed), x, cold).tolist() == [1, 0]
    assert sample(jax.random.key(0), x, GREEDY).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_draws_follow_the_softmax(dtype: jnp.dtype) -> None:
    """Chi-square; bf16 logits too, whose noise would have few levels if drawn in bf16."""
    x = jnp.asarray([0.0, 1.0, -1.0, 2.0, 0.5, -3.0], dtype)
    draws = 20000
    tokens = sample(
        jax.random.key(3), jnp.broadcast_to(x, (draws, 6)), make_sampler(temperature=1.3)
    )
    expected = np.asarray(jax.nn.softmax(x.astype(jnp.float32) / 1.3), np.float64)
    counts = np.bincount(np.asarray(tokens), minlength=6)
    assert stats.chisquare(counts, expected / expected.sum() * draws).pvalue > 1e-3


def test_a_row_draws_the_same_whatever_shares_its_batch() -> None:
    x = jnp.asarray(logits(5, 131))
    keys = row_keys(7, 5)
    together = sample(keys, x, make_sampler(temperature=1.0))
    for row in range(5):
        alone = sample(keys[row : row + 1], x[row : row + 1], make_sampler(temperature=1.0))
        assert int(alone[0]) == int(together[row])


def test_all_64_bits_of_a_seed_count() -> None:
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    data = {jax.random.key_data(row_keys(seed, 1)).tobytes() for seed in seeds}
    assert len(data) == len(seeds)
    expected = jax.random.fold_in(jax.random.key(5), 0)  # within 32 bits: JAX's own key
    assert (jax.random.key_data(row_keys(5, 1)[0]) == jax.random.key_data(expected)).all()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 1.1},
        {"top_p": [0.5, -0.5]},
        {"top_z": 1},
    ],
)
def test_impossible_settings_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(SamplingError, match=next(iter(options))):
        make_sampler(**options)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True])
def test_impossible_seeds_are_refused(seed: object) -> None:
    with pytest.raises(SamplingError, match="seed"):
        row_keys(seed, 1)  # type: ignore[arg-type]


def test_new_values_do_not_recompile() -> None:
    traces = 0

    @jax.jit
    def draw(key: jax.Array, x: jax.Array, sampler: jaxllm.Sampler) -> jax.Array:
        nonlocal traces
        traces += 1
        return sample(key, x, sampler)

    for temperature, top_k, top_p in [(0.0, 0, 1.0), (0.7, 40, 0.9), (1.5, 10**6, 0.0)]:
        sampler = make_sampler(temperature=temperature, top_k=top_k, top_p=top_p)
        draw(jax.random.key(0), jnp.asarray(logits(2, 131)), sampler)
    assert traces == 1
