"""Tucker and CP: exact errors, sweeps that never make it worse, and recovery."""

import itertools

import numpy as np
import pytest

from jaxllm.compress.matrices import tensors
from jaxllm.errors import ConfigError

SHAPE = (5, 9, 7)


@pytest.fixture(scope="module")
def tensor() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, SHAPE)


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 5, 3), (5, 4, 7)])
def test_what_tucker_misses_is_told_by_the_norm_of_its_core(
    tensor: np.ndarray, ranks: tuple[int, ...]
) -> None:
    before = np.inf
    for sweeps in range(4):
        found = tensors.hooi(tensor, ranks, sweeps=sweeps)
        missed = np.linalg.norm(tensor - found.dense())
        np.testing.assert_allclose(tensors.tucker_error(tensor, found), missed, rtol=1e-10)
        assert missed <= before * (1 + 1e-12)
        before = missed
        assert found.core.shape == ranks
        assert found.size == np.prod(ranks) + sum(n * r for n, r in zip(SHAPE, ranks, strict=True))
        for basis in found.bases:
            np.testing.assert_allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-12)
    first = tensors.hosvd(tensor, ranks)
    tails = [  # De Lathauwer, De Moor and Vandewalle 2000, property 10
        (
            np.linalg.svd(np.moveaxis(tensor, mode, 0).reshape(n, -1), compute_uv=False)[r:] ** 2
        ).sum()
        for mode, (n, r) in enumerate(zip(SHAPE, ranks, strict=True))
    ]
    squared = np.linalg.norm(tensor - first.dense()) ** 2
    assert max(tails) <= squared * (1 + 1e-12) <= sum(tails) * (1 + 1e-9)


def test_full_ranks_and_a_tensor_of_low_ranks_are_exact(tensor: np.ndarray) -> None:
    np.testing.assert_allclose(tensors.hosvd(tensor, SHAPE).dense(), tensor, atol=1e-12)
    low = tensors.hosvd(tensor, (2, 3, 4)).dense()
    assert tensors.tucker_error(low, tensors.hosvd(low, (2, 3, 4))) < 1e-6
    matrix = tensor[0]  # of two modes: the singular value decomposition
    sigma = np.linalg.svd(matrix, compute_uv=False)
    error = tensors.tucker_error(matrix, tensors.hooi(matrix, (3, 3), sweeps=1))
    np.testing.assert_allclose(error, np.sqrt((sigma[3:] ** 2).sum()))


def test_unfolding_and_products_are_the_definition(tensor: np.ndarray) -> None:
    matrix = np.random.default_rng(1).normal(0, 1, (4, 9))
    np.testing.assert_allclose(
        tensors.times(tensor, matrix, 1), np.einsum("abc,nb->anc", tensor, matrix)
    )
    np.testing.assert_array_equal(tensors.unfold(tensor, 1)[:, 8], tensor[1, :, 1])


def test_cp_finds_the_factors_of_a_sum_of_outer_products() -> None:
    """Up to their order and signs: there are no others (Kruskal 1977)."""
    rng = np.random.default_rng(2)
    factors = [rng.normal(0, 1, (n, 3)) for n in SHAPE]
    exact = np.einsum("ar,br,cr->abc", *factors)
    found = tensors.cp(exact, 3, sweeps=200, rng=rng)
    np.testing.assert_allclose(found.dense(), exact, atol=1e-6)
    assert found.size == 3 * sum(SHAPE)

    def turned(columns: list[np.ndarray]) -> np.ndarray:
        return np.vstack([f / np.linalg.norm(f, axis=0) for f in columns])

    ours, theirs = turned(list(found.factors)), turned(factors)
    ends = np.cumsum([0, *SHAPE])
    alike = [
        np.abs(ours[a:b].T @ theirs[a:b]) for a, b in itertools.pairwise(ends)
    ]  # cosines of each mode
    order = alike[0].argmax(axis=1)
    assert sorted(order) == [0, 1, 2]
    for cosines in alike:
        np.testing.assert_allclose(cosines[range(3), order], 1, atol=1e-9)


def test_cp_never_gets_worse_and_says_what_it_misses(tensor: np.ndarray) -> None:
    found = tensors.cp(tensor, 6, sweeps=30, rng=np.random.default_rng(3))  # more than one mode has
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(found.errors))
    missed = np.linalg.norm(tensor - found.dense()) / np.linalg.norm(tensor)
    np.testing.assert_allclose(found.errors[-1], missed, rtol=1e-9)
    matrix = tensor[1]  # of two modes: no better than the singular value decomposition, and as good
    sigma = np.linalg.svd(matrix, compute_uv=False)
    best = np.sqrt((sigma[2:] ** 2).sum() / (sigma**2).sum())
    two = tensors.cp(matrix, 2, sweeps=100, rng=np.random.default_rng(4))
    np.testing.assert_allclose(two.errors[-1], best, rtol=1e-6)


def test_ranks_that_there_are_not_are_refused(tensor: np.ndarray) -> None:
    for ranks in ((1, 2), (6, 1, 1), (1, 0, 1)):
        with pytest.raises(ConfigError, match="the size of each mode"):
            tensors.hooi(tensor, ranks, sweeps=1)
    with pytest.raises(ConfigError, match="at least 1"):
        tensors.cp(tensor, 0, sweeps=1, rng=np.random.default_rng(0))
