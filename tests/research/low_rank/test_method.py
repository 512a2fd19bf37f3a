"""Low-rank factors: exact errors, the gain of whitening, and ranks for a budget."""

import itertools

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.research.low_rank import method
from jaxllm.research.low_rank.method import (
    SVDResult,
    as_factored,
    decompose_asvd,
    decompose_svd,
    decompose_svd_llm,
    split_factors,
)
from jaxllm.research.low_rank.weight import LowRankWeight

ROWS, COLUMNS, TOKENS = 24, 17, 90


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, (ROWS, COLUMNS))


@pytest.fixture(scope="module")
def inputs() -> np.ndarray:
    """Correlated inputs of very different scales."""
    rng = np.random.default_rng(1)
    mixed = rng.normal(0, 1, (TOKENS, COLUMNS)) @ rng.normal(0, 1, (COLUMNS, COLUMNS))
    return mixed * np.geomspace(0.05, 20, COLUMNS)


def truncation_error(spectrum: SVDResult, rank: int) -> float:
    """Return the error of the best approximation of a rank (Eckart and Young)."""
    return float(np.linalg.norm(spectrum.sigma_R[rank:]))


def truncated(spectrum: SVDResult, rank: int) -> np.ndarray:
    left, right = split_factors(spectrum, rank)
    return left @ right


@pytest.mark.parametrize("transposed", [False, True])
def test_low_rank_equals_papers_formula(
    weight: np.ndarray, inputs: np.ndarray, transposed: bool
) -> None:
    """The factors of any rank equal those of svd(W S) inv(S), for tall and for wide matrices."""
    w_OI = weight[:, :9].T if transposed else weight
    x_TI = np.random.default_rng(5).normal(0, 1, (TOKENS, ROWS)) if transposed else inputs
    x_TI = x_TI @ np.triu(np.ones((x_TI.shape[1],) * 2))
    size_I = np.abs(x_TI).mean(axis=0)
    chosen = [
        (decompose_svd(w_OI), np.eye(w_OI.shape[1])),
        (decompose_asvd(w_OI, size_I, alpha=0.3), np.diag(size_I**0.3)),
        (decompose_svd_llm(w_OI, x_TI.T @ x_TI), np.linalg.cholesky(x_TI.T @ x_TI)),
    ]
    for spectrum, s_II in chosen:
        u, sigma, v = np.linalg.svd(w_OI @ s_II, full_matrices=False)
        np.testing.assert_allclose(spectrum.sigma_R, sigma, rtol=1e-6)
        for rank in (1, 5, len(sigma)):
            wanted = (u[:, :rank] * sigma[:rank]) @ v[:rank] @ np.linalg.inv(s_II)
            np.testing.assert_allclose(truncated(spectrum, rank), wanted, atol=1e-8)
            left, right = split_factors(spectrum, rank)
            lengths = np.linalg.norm(left, axis=0)
            np.testing.assert_allclose(lengths, np.linalg.norm(right, axis=1))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_svd_llm_handles_rank_deficient_inputs(
    weight: np.ndarray, inputs: np.ndarray, dtype: type
) -> None:
    """Five tokens span five directions, where Cholesky fails: rank 5 suffices for all outputs."""
    few = inputs[:5] / np.abs(inputs[:5]).max()
    spectrum = decompose_svd_llm(weight, (few.T @ few).astype(dtype))
    missed = np.linalg.norm((weight - truncated(spectrum, 5)) @ few.T)
    plain = np.linalg.norm((weight - truncated(decompose_svd(weight), 5)) @ few.T)
    assert missed < 1e-3 * plain
    np.testing.assert_allclose(truncated(spectrum, COLUMNS), weight, atol=1e-12)
    missed = np.linalg.norm((weight - truncated(spectrum, 3)) @ few.T)
    np.testing.assert_allclose(missed, truncation_error(spectrum, 3), rtol=1e-5)


def test_zero_input_channel_gives_finite_factors(weight: np.ndarray, inputs: np.ndarray) -> None:
    dead = inputs.copy()
    dead[:, 4] = 0
    for spectrum in (
        decompose_svd_llm(weight, dead.T @ dead),
        decompose_asvd(weight, np.abs(dead).mean(axis=0), alpha=0.5),
    ):
        assert np.isfinite(truncated(spectrum, 9)).all()
        np.testing.assert_allclose(truncated(spectrum, COLUMNS), weight, atol=1e-12)


def test_invalid_statistics_are_refused(weight: np.ndarray, inputs: np.ndarray) -> None:
    """NaN, infinite, misshapen or all-zero statistics raise errors."""
    bad = weight.copy()
    bad[2, 3] = np.nan
    with pytest.raises(ConfigError, match="the weight holds NaN"):
        decompose_svd(bad)
    with pytest.raises(ConfigError, match=r"X\^T X holds NaN"):
        decompose_svd_llm(weight, np.full((COLUMNS, COLUMNS), np.inf))
    with pytest.raises(ConfigError, match=r"statistics have shape \(24,\)"):
        decompose_svd_llm(weight, weight @ weight.T)
    with pytest.raises(ConfigError, match="all inputs are zero"):
        decompose_svd_llm(weight, np.zeros((COLUMNS, COLUMNS)))
    with pytest.raises(ConfigError, match="all inputs are zero"):
        decompose_asvd(weight, np.zeros(COLUMNS), alpha=0.5)


def test_ranks_from_energy_and_share() -> None:
    """Ranks follow from an energy or a share of the numbers; invalid shares and energies raise
    errors.
    """
    sigma_R = np.array([4.0, 2.0, 2.0, 1.0])  # squares 16, 4, 4, 1 of 25
    wanted = {0.1: 1, 0.64: 1, 0.65: 2, 0.8: 2, 0.81: 3, 0.96: 3, 0.97: 4, 1.0: 4}
    assert {e: method.rank_of_energy(sigma_R, e) for e in wanted} == wanted
    assert method.rank_of_energy(np.random.default_rng(3).random(300), 1.0) <= 300
    assert method.rank_of_share((4096, 11008), 0.8) == int(4096 * 11008 * 0.8 / 15104) == 2388
    saves = method.saves_numbers  # two factors have 50 numbers for each rank, the matrix 600
    assert saves((30, 20), 11) and not saves((30, 20), 12)
    for wrong in (0.0, 1.0, -1, 1e-9):
        with pytest.raises(ConfigError, match=r"share|numbers"):
            method.rank_of_share((64, 256), wrong)
    with pytest.raises(ConfigError, match="energy"):
        method.rank_of_energy(sigma_R, 1.1)


def test_factors_have_requested_rank_and_format(weight: np.ndarray) -> None:
    made = as_factored(decompose_svd(weight), 5, "int8")
    assert isinstance(made, LowRankWeight) and made.format == "rank5/int8"


def test_rank_allocation_minimizes_relative_errors() -> None:
    """Ranks for a budget equal brute force over all ranks of three equally shaped matrices whose
    sizes differ 10,000-fold, and never exceed it.
    """
    rng = np.random.default_rng(4)
    spectra = {}
    for name, (size, fall) in {"a": (1000.0, 0.5), "b": (1.0, 2.0), "c": (0.1, 1.0)}.items():
        u, _ = np.linalg.qr(rng.normal(0, 1, (40, 8)))
        v, _ = np.linalg.qr(rng.normal(0, 1, (8, 8)))
        spectra[name] = decompose_svd(size * u * np.arange(1, 9.0) ** -fall @ v)

    sigmas = {name: spectrum.sigma_R for name, spectrum in spectra.items()}
    shapes = {name: spectrum.shape for name, spectrum in spectra.items()}

    def relative(name: str, rank: int) -> float:
        spectrum = spectra[name]
        return (truncation_error(spectrum, rank) / np.linalg.norm(spectrum.sigma_R)) ** 2

    for total in (3, 5, 7, 8):  # ranks, of 48 numbers each, at most 6 for a matrix
        found = method.allocate_ranks(sigmas, shapes, 48 * total + 7)
        chosen = [rank for rank in found.values() if rank is not None]
        assert len(chosen) == 3 and sum(chosen) <= total
        best = min(
            sum(map(relative, spectra, each))
            for each in itertools.product(range(1, 7), repeat=3)
            if sum(each) <= total
        )
        np.testing.assert_allclose(sum(map(relative, found, chosen)), best, rtol=1e-12)
    assert method.allocate_ranks(sigmas, shapes, 3 * 320) == {"a": None, "b": None, "c": None}
    some = method.allocate_ranks(sigmas, shapes, 48 * 6 + 320)
    assert list(some.values()).count(None) == 1
    with pytest.raises(ConfigError, match="1 short of rank 1"):
        method.allocate_ranks(sigmas, shapes, 143)
