"""Divergence between two models against PyTorch logits in float64."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from jaxllm.errors import ConfigError
from jaxllm.evaluate.likelihood.data import Loader, loader
from jaxllm.evaluate.likelihood.divergence import divergence, kl_divergence
from jaxllm.weights.paths import flatten
from jaxllm.weights.quantize import dequantize, quantize
from tests.conftest import Run
from tests.tiny_models import Twin, load_twin, make_twin, random_model, tokens

WINDOW = 40


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return make_twin(tmp_path_factory.mktemp("twin"), "llama", layers=2)


@pytest.fixture(scope="module", params=["bfloat16", "int8", "int4-g32"])
def changed(request: pytest.FixtureRequest, twin: Twin) -> Twin:
    """Return the model in another weight format, and transformers with the same values."""
    other, params = load_twin(twin.directory), quantize(twin.params, request.param)
    state = other.torch_model.state_dict()
    for path, leaf in flatten(dequantize(params)):
        name = path if path.startswith("lm_head") else f"model.{path}"
        state[name].copy_(torch.tensor(np.asarray(leaf, np.float32)))
    return Twin(twin.directory, other.torch_model, other.config, other.model, params)


def distributions(twin: Twin, made: Loader) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 log-probabilities `[N, V]` for all scored tokens, and the tokens."""
    rows, targets = [], []
    for span in made.spans:
        ids = np.asarray(made.documents[span.document][span.start : span.end])
        logits = twin.logits(ids[None])[0].astype(np.float64)
        rows.append(
            scipy.special.log_softmax(logits, axis=-1)[span.score_start - span.start - 1 : -1]
        )
        targets.append(ids[span.score_start - span.start :])
    return np.concatenate(rows), np.concatenate(targets)


def test_divergence_measures_equal_transformers_in_float64(twin: Twin, changed: Twin) -> None:
    """KL statistics, same-top share, perplexity ratio and their errors equal float64 values from
    transformers' logits of both models.
    """
    documents = [tokens(1, length, seed=length)[0].tolist() for length in (90, 17, 41)]
    made = loader(documents, window=WINDOW, stride=25, batch=3)
    found = divergence(twin.model, twin.params, changed.model, changed.params, made)
    (p_NV, target_N), (q_NV, _) = distributions(twin, made), distributions(changed, made)
    N = len(target_N)
    kl_N = (np.exp(p_NV) * (p_NV - q_NV)).sum(axis=1)
    assert kl_N.mean() > 1e-6
    same = (p_NV.argmax(axis=1) == q_NV.argmax(axis=1)).mean()
    p_N, q_N = (x[np.arange(N), target_N] for x in (p_NV, q_NV))
    ratio = np.exp(-q_N.mean()) / np.exp(-p_N.mean())
    # llama-perplexity: the variance of ln(PPL ratio) from both variances and the covariance.
    covariance = np.cov(-q_N, -p_N)
    log_error = np.sqrt((covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]) / N)

    near: Any = {"rel": 2e-3}  # float32 logits of two implementations
    assert found.reference.tokens == N == made.tokens
    assert found.kl.mean == pytest.approx(kl_N.mean(), **near)
    assert found.kl.error == pytest.approx(scipy.stats.sem(kl_N), **near)
    assert found.kl_median == pytest.approx(np.percentile(kl_N, 50), **near)
    assert found.kl_p99 == pytest.approx(np.percentile(kl_N, 99), **near)
    assert found.kl_max == pytest.approx(kl_N.max(), **near)
    assert found.same_top.mean == pytest.approx(same, abs=1e-12)
    binomial = np.sqrt(same * (1 - same) / (N - 1))
    assert found.same_top.error == pytest.approx(binomial, abs=1e-12)
    assert found.perplexity_ratio.mean == pytest.approx(ratio, rel=1e-5)
    assert found.perplexity_ratio.error == pytest.approx(ratio * log_error, **near)
    delta_N = np.exp(q_N) - np.exp(p_N)
    assert found.delta_p.mean == pytest.approx(delta_N.mean(), abs=1e-6)
    assert found.delta_p_rms == pytest.approx(np.sqrt((delta_N**2).mean()), **near)
    assert found.reference.perplexity.mean == pytest.approx(np.exp(-p_N.mean()), rel=1e-5)
    assert found.other.perplexity.mean == pytest.approx(np.exp(-q_N.mean()), rel=1e-5)


@pytest.mark.parametrize("spread", [1e-5, 1e-3, 1e-1, 3.0])
def test_float32_kl_is_accurate_for_close_distributions(spread: float) -> None:
    """KL in float32 is near float64's and never negative, for close and distant distributions."""
    rng = np.random.default_rng(0)
    p = scipy.special.log_softmax(3 * rng.standard_normal((4, 1000)), axis=-1)
    q = scipy.special.log_softmax(p + spread * rng.standard_normal(p.shape), axis=-1)
    p, q = p.astype(np.float32), q.astype(np.float32)
    exact = (np.exp(np.float64(p)) * (np.float64(p) - q)).sum(axis=-1)
    exact += (np.exp(np.float64(q)) - np.exp(np.float64(p))).sum(axis=-1)  # rounding of the inputs
    found = np.asarray(kl_divergence(jnp.asarray(p), jnp.asarray(q)))
    assert (found >= 0).all()
    np.testing.assert_allclose(found, exact, rtol={1e-5: 0.2, 1e-3: 1e-2}.get(spread, 1e-4))


def test_kl_of_near_one_hot_distributions_is_finite() -> None:
    """P has all its mass on one token and Q on another, 1,000 nats away: KL is 1,000."""
    p = jnp.asarray([[0.0, -1000.0, -2000.0]])
    q = jnp.asarray([[-1000.0, 0.0, -2000.0]])
    assert float(kl_divergence(p, q)[0]) == pytest.approx(1000.0)
    assert float(kl_divergence(p, p)[0]) == 0.0


def test_divergence_refuses_different_vocabularies(twin: Twin) -> None:
    other, params = random_model("llama", vocab_size=77)
    made = loader([[1, 2, 3]], window=WINDOW)
    with pytest.raises(ConfigError, match="vocabularies of 131 and 77 tokens"):
        divergence(twin.model, twin.params, other, params, made)


def test_perplexity_command_compares_two_models(run: Run, data: Callable[[str], Path]) -> None:
    """`perplexity --compare` and --other-dtype report KL and ratio; other vocabularies raise."""
    directory = data("stories260K")
    text = f"@{directory / 'greedy_200.txt'}"
    command = ("perplexity", directory, "--text", text, "--window", 64, "--batch", 4)

    def report(*options: str) -> dict[str, Any]:
        status, out, _ = run(*command, "--json", *options)
        assert status == 0
        found: dict[str, Any] = json.loads(out)
        return found

    same = report("--compare", str(directory))
    assert same["divergence"]["kl"] == 0.0
    half = report("--other-dtype", "bfloat16")
    assert half["perplexity"] == pytest.approx(same["perplexity"], rel=1e-6)
    assert 1e-6 < half["divergence"]["kl"] < 1e-2
    ratio = half["other"]["perplexity"] / half["perplexity"]
    assert half["divergence"]["perplexity_ratio"] == pytest.approx(ratio, rel=1e-6)

    status, _, err = run(*command, "--compare", "demo:llama")
    assert status == 1
    assert "vocabularies of 512 and" in err
