"""Truncation processors: published vectors, transformers' warpers, brute force, draws."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from transformers.generation import logits_process as theirs

from jaxllm.errors import SamplingError
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.generation.sampling.sampler import (
    Context,
    Processor,
    Sampler,
    row_keys,
    sample_next,
)
from jaxllm.generation.sampling.truncation import (
    XTC,
    EpsilonCutoff,
    EtaCutoff,
    MinP,
    Mirostat,
    TopNSigma,
    TypicalP,
)
from tests.generation.processors import APPLY, apply, logits

# llama.cpp, tests/test-sampling.cpp: the test, options, probabilities before and after, the latter
# normalized.
RAMP = [0.1, 0.2, 0.3, 0.4]
LLAMA_CPP_VECTORS = [
    ("test_temp", {"temperature": 1.0}, RAMP, [0.1, 0.2, 0.3, 0.4]),
    ("test_temp", {"temperature": 0.0}, RAMP, [0.0, 0.0, 0.0, 1.0]),
    ("test_top_k", {"top_k": 1}, RAMP, [0.0, 0.0, 0.0, 1.0]),
    ("test_top_k", {"top_k": 3}, RAMP, [0.0, 0.22222, 0.33333, 0.44444]),
    ("test_top_k", {"top_k": 4}, RAMP, [0.1, 0.2, 0.3, 0.4]),
    ("test_top_k", {"top_k": 0}, RAMP, [0.1, 0.2, 0.3, 0.4]),
    ("test_top_p", {"top_p": 0}, RAMP, [0.0, 0.0, 0.0, 1.0]),
    ("test_top_p", {"top_p": 0.7}, RAMP, [0.0, 0.0, 0.428571, 0.571429]),
    ("test_top_p", {"top_p": 0.8}, RAMP, [0.0, 0.22222, 0.33333, 0.44444]),
    ("test_top_p", {"top_p": 1.0}, RAMP, [0.1, 0.2, 0.3, 0.4]),
    ("test_min_p", {"min_p": 0.0}, RAMP, [0.1, 0.2, 0.3, 0.4]),
    ("test_min_p", {"min_p": 0.24}, RAMP, [0.1, 0.2, 0.3, 0.4]),
    ("test_min_p", {"min_p": 0.26}, RAMP, [0.0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9]),
    ("test_min_p", {"min_p": 0.49}, RAMP, [0.0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9]),
    ("test_min_p", {"min_p": 0.51}, RAMP, [0.0, 0.0, 0.3 / 0.7, 0.4 / 0.7]),
    ("test_min_p", {"min_p": 0.74}, RAMP, [0.0, 0.0, 0.3 / 0.7, 0.4 / 0.7]),
    ("test_min_p", {"min_p": 0.76}, RAMP, [0.0, 0.0, 0.0, 1.0]),
    ("test_min_p", {"min_p": 1.0}, RAMP, [0.0, 0.0, 0.0, 1.0]),
    ("test_typical", {"typical_p": 0.5}, [0.97, 0.01, 0.01, 0.01], [1.0, 0.0, 0.0, 0.0]),
    ("test_typical", {"typical_p": 0.5}, [0.4, 0.2, 0.2, 0.2], [0.0, 1 / 3, 1 / 3, 1 / 3]),
    ("test_top_n_sigma", {"top_n_sigma": 1.0}, RAMP, [0.0, 0.0, 0.428571, 0.571429]),
    ("test_top_n_sigma", {"top_n_sigma": 0.0}, RAMP, [0.1, 0.2, 0.3, 0.4]),
    ("test_top_n_sigma", {"top_n_sigma": 3.0}, RAMP, [0.1, 0.2, 0.3, 0.4]),
]


def log(p: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float32))


def apply_chain(options: dict[str, Any], scores: np.ndarray) -> np.ndarray:
    for processor in make_sampler(**options).processors:
        scores = apply(processor, scores)
    return scores


@pytest.mark.parametrize(
    ("options", "before", "after"), [pytest.param(*c[1:], id=c[0]) for c in LLAMA_CPP_VECTORS]
)
def test_processors_equal_llama_cpp_vectors(
    options: dict[str, float], before: list[float], after: list[float]
) -> None:
    """Normalized probabilities equal the vectors of llama.cpp's tests/test-sampling.cpp."""
    left = np.exp(apply_chain(options, log([before])))
    np.testing.assert_allclose(left[0] / left.sum(), after, atol=1e-5)


@pytest.mark.parametrize("value", [0.02, 0.2, 0.7, 0.95])
@pytest.mark.parametrize(
    ("ours", "warper"),
    [
        (MinP, theirs.MinPLogitsWarper),
        (TypicalP, theirs.TypicalLogitsWarper),
        (EpsilonCutoff, theirs.EpsilonLogitsWarper),
        (EtaCutoff, theirs.EtaLogitsWarper),
    ],
)
def test_truncation_equals_transformers_warpers(ours: Any, warper: Any, value: float) -> None:
    """min-p, typical, epsilon and eta cutoffs equal transformers', also after other masks."""
    x = np.concatenate([logits(4, 131), logits(3, 131, seed=1) / 30])
    x[1, ::3] = -np.inf  # already masked
    expected = warper(value)(None, torch.tensor(x)).numpy()
    np.testing.assert_array_equal(apply(ours(value), x), expected)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.1, 3))
def test_top_n_sigma_equals_brute_force(seed: int, n: float) -> None:
    x = logits(1, 23, seed)
    x[0, :4] = -np.inf
    kept = [v for v in x[0].astype(np.float64) if v > -np.inf]
    mean = sum(kept) / len(kept)
    sigma = math.sqrt(sum((v - mean) ** 2 for v in kept) / len(kept))
    ours = apply(TopNSigma(n), x)[0]
    for before, after in zip(x[0], ours, strict=True):
        if abs(before - (max(kept) - n * sigma)) > 1e-4:
            assert after == (before if before >= max(kept) - n * sigma else -np.inf)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0, 0.6))
def test_xtc_equals_brute_force(seed: int, threshold: float) -> None:
    x = logits(1, 11, seed) / 2
    p = np.exp(x[0].astype(np.float64)) / np.exp(x[0].astype(np.float64)).sum()
    if np.abs(p - threshold).min() < 1e-6:
        return
    order = sorted(range(11), key=lambda token: -p[token])
    above = [token for token in order if p[token] >= threshold]
    gone = set(above[:-1])
    expected = [-np.inf if token in gone else x[0, token] for token in range(11)]
    assert apply(XTC(1.0, threshold), x)[0].tolist() == expected


def test_xtc_keeps_ties_with_least_probable() -> None:
    """Tokens tied with the least probable one above the threshold stay."""
    left = apply(XTC(1.0, 0.1), [[2.0, 1.0, 1.0, -4.0]])
    assert left.tolist() == [[-np.inf, 1.0, 1.0, -4.0]]


def test_xtc_chance_is_independent_of_draw() -> None:
    """Rows that XTC skips still draw from the whole distribution."""
    draws, p = 20000, np.array([0.4, 0.3, 0.2, 0.1])
    scores = jnp.broadcast_to(jnp.asarray(log(p)), (draws, 4))
    context = Context.empty(jax.random.key(9), draws)
    left = XTC(0.5, 0.15)(scores, context)
    tokens, _ = sample_next(scores, Sampler(), context)
    spared = np.isfinite(np.asarray(left)).all(axis=1)
    assert abs(spared.mean() - 0.5) < 0.02
    counts = np.bincount(np.asarray(tokens)[spared], minlength=4)
    assert stats.chisquare(counts, p * spared.sum()).pvalue > 1e-3


def test_mirostat_equals_brute_force() -> None:
    """Each step equals Algorithm 2 of Basu et al. 2021 in plain Python, on the tokens drawn."""
    tau, eta, steps = [3.0, 0.0, 1.5], [0.1, 0.3, 0.9], 30
    sampler = Sampler((Mirostat(jnp.array(tau), jnp.array(eta), 2 * jnp.array(tau)),)).begin(3)
    step = jax.jit(sample_next)
    mu = [2 * t for t in tau]
    for i in range(steps):
        x = logits(3, 31, seed=i)
        context = Context.empty(row_keys(i, 3), 3)
        left = np.asarray(APPLY(jnp.asarray(x), sampler.processors[0], context))
        token_B, sampler = step(jnp.asarray(x), sampler, context)
        for row in range(3):
            if tau[row] == 0:
                np.testing.assert_array_equal(left[row], x[row])
                continue
            p = np.exp(x[row].astype(np.float64)) / np.exp(x[row].astype(np.float64)).sum()
            bits = -np.log2(p)
            kept = (bits <= mu[row]) | (bits == bits.min())
            np.testing.assert_array_equal(np.isfinite(left[row]), kept)
            surprise = -np.log2(p[token_B[row]] / p[kept].sum())
            mu[row] -= eta[row] * (surprise - tau[row])
        ours = np.asarray(sampler.processors[0].mu)  # type: ignore[attr-defined]
        np.testing.assert_allclose(ours, mu, atol=1e-4)


@pytest.mark.parametrize(
    "processor",
    [
        MinP(1.0),
        MinP(1.05),
        TypicalP(1e-6),
        EpsilonCutoff(0.999),
        EtaCutoff(0.999),
        TopNSigma(1e-6),
        XTC(1.0, 0.0),
        Mirostat(0.1, 0.1, -5.0),
    ],
    ids=lambda processor: type(processor).__name__,
)
def test_truncation_leaves_at_least_one_token(processor: Processor) -> None:
    """At extreme settings at least one token stays, and scores are unchanged or -inf."""
    flat, peaked = np.zeros((1, 17), np.float32), np.eye(17, dtype=np.float32)[:1] * 40
    few = np.where(np.arange(17) == 3, 0.0, -np.inf)[None].astype(np.float32)
    for x in (flat, peaked, few, logits(1, 17)):
        left = apply(processor, x)
        assert np.isfinite(left).any()
        assert ((left == x) | (left == -np.inf)).all()


def test_settings_with_wrong_row_count_are_refused() -> None:
    with pytest.raises(SamplingError, match="3 rows, the batch has 2"):
        apply(MinP(jnp.array([0.1, 0.2, 0.3])), logits(2, 17))
