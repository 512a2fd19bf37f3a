"""Low-rank factorization of a matrix, and the choice of ranks.

Functions of one matrix and of statistics of its inputs X `[tokens, I]`, in float64 on the host. The
methods minimize different errors: `svd` that of the weights, `asvd` that of the weights times
the size of their inputs, `svd_llm` that of the outputs. On the models in BENCHMARKS.md, `svd_llm`
loses the least quality and the other two are about equal; int4 loses less than any of them, in
fewer bytes.

Each is a projection, `W_k = U_k U_k^T W`, on the principal directions U of `W M W^T`. M is the
identity, the diagonal of the inputs' squared sizes, or their Gram matrix X^T X (then U are the
principal directions of the outputs). This equals the papers' `svd(W S) inv(S)` with `S S^T = M`,
but S is neither computed nor inverted, so M may be singular.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.weights.formats import parse_format
from jaxllm.weights.types.low_rank import LowRankFormat, LowRankWeight


class SVDResult(NamedTuple):
    """A decomposed matrix: `weight = left_OR @ right_RI`, where R is the shorter side.

    left_OR: orthonormal columns, the most important first. sigma_R: singular values of `W S` (see
    the module); values below 1e-8 times the largest are noise.
    """

    left_OR: np.ndarray
    sigma_R: np.ndarray
    right_RI: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, `[O, I]`."""
        return self.left_OR.shape[0], self.right_RI.shape[1]


def svd(weight_OI: np.ndarray) -> SVDResult:
    """Return the singular value decomposition. Raises ConfigError if a weight is not finite."""
    return _decompose(weight_OI, np.ones(weight_OI.shape[1]))


def asvd(weight_OI: np.ndarray, mean_abs_I: np.ndarray, *, alpha: float) -> SVDResult:
    """Decompose as ASVD (arXiv 2312.05821): `W diag(s)`, s = (mean |x|)^alpha, in the paper 0.5.

    mean_abs_I: mean |x_j| of each input. Raises ConfigError if all are zero or one is not finite.
    """
    size_I = _check_finite("mean |x|", mean_abs_I)
    _check_inputs(weight_OI, size_I.shape, size_I.max(initial=0))
    return _decompose(weight_OI, size_I ** (2 * alpha))


def svd_llm(weight_OI: np.ndarray, gram_II: np.ndarray) -> SVDResult:
    """Decompose as SVD-LLM (arXiv 2403.07378): `W S`, where S is the Cholesky factor of X^T X.

    Truncation gives the rank-k matrix with the least output error, which is
    `||X (W - W_k)^T|| = error(spectrum, k)`. Raises ConfigError if all inputs are zero or a number
    is not finite.
    """
    g_II = _check_finite("X^T X", gram_II)
    for side in (g_II.shape[:1], g_II.shape[1:]):
        _check_inputs(weight_OI, side, np.trace(g_II))
    return _decompose(weight_OI, (g_II + g_II.T) / 2)


def _decompose(weight_OI: np.ndarray, measure: np.ndarray) -> SVDResult:
    """Decompose by the eigenvectors of `W M W^T`. measure: M `[I, I]`, or its diagonal `[I]`."""
    w_OI = _check_finite("the weight", weight_OI)
    basis_OR = None
    if w_OI.shape[0] > w_OI.shape[1]:  # an orthonormal basis of its columns
        basis_OR, w_OI = np.linalg.qr(w_OI)
    by_RI = w_OI * measure if measure.ndim == 1 else w_OI @ measure
    squares_R, left = np.linalg.eigh(by_RI @ w_OI.T)
    left, sigma_R = left[:, ::-1], np.sqrt(np.maximum(squares_R[::-1], 0))
    return SVDResult(left if basis_OR is None else basis_OR @ left, sigma_R, left.T @ w_OI)


def truncation_error(spectrum: SVDResult, rank: int) -> float:
    """Return the error of the best rank-`rank` approximation (Eckart and Young)."""
    return float(np.sqrt((spectrum.sigma_R[rank:] ** 2).sum()))


def split_factors(spectrum: SVDResult, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return factors `[O, K]` and `[K, I]`, float64, with column and row norms balanced."""
    right_KI = spectrum.right_RI[:rank]
    root_K = np.sqrt(np.linalg.norm(right_KI, axis=1))
    safe_K = np.where(root_K == 0, 1, root_K)
    return spectrum.left_OR[:, :rank] * safe_K, right_KI / safe_K[:, None]


def as_factored(spectrum: SVDResult, rank: int, inner: str) -> LowRankWeight:
    """Return the low-rank weight, its factors in the format `inner`.

    Raises ConfigError for an invalid rank or format.
    """
    if not 0 < rank <= len(spectrum.sigma_R):
        raise ConfigError(
            f"rank of {spectrum.shape} out of range: got {rank}, expected 1 to"
            f" {len(spectrum.sigma_R)}"
        )
    return _parse_low_rank(rank, inner).from_factors(*split_factors(spectrum, rank))


def saves_numbers(shape: tuple[int, int], rank: int) -> bool:
    """Return whether two factors of this rank have fewer elements than the matrix `[O, I]`."""
    return rank * (shape[0] + shape[1]) < shape[0] * shape[1]


def rank_of_energy(sigma_R: np.ndarray, energy: float) -> int:
    """Return the smallest rank that keeps a fraction `energy` of the squared singular values.

    The factors may have more elements than the matrix (see `saves_numbers`).
    """
    if not 0 < energy <= 1:
        raise ConfigError(f"energy out of range: got {energy}, expected above 0 and at most 1")
    kept_R = np.cumsum(sigma_R**2)
    # The sums round, so energy 1 means the last of them.
    return int(np.searchsorted(kept_R, energy * kept_R[-1] * (1 - 1e-15))) + 1


def rank_of_share(shape: tuple[int, int], share: float) -> int:
    """Return the largest rank whose factors have at most this share of the matrix's elements.

    Raises ConfigError if the share is not between 0 and 1, or too small for rank 1.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share to keep out of range: got {share}, expected between 0 and 1")
    if rank := int(shape[0] * shape[1] * share / (shape[0] + shape[1])):
        return rank
    raise ConfigError(f"share {share} is too small: rank 1 of a matrix {shape} needs more")


def allocate_ranks(
    sigmas: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, int]], budget: int
) -> dict[str, int | None]:
    """Allocate ranks to a model's matrices so that together they have at most `budget` elements.

    Greedy: every matrix starts at rank 1. The next rank goes to the matrix whose relative squared
    error it lowers most per element, so all outputs count equally, however large they are. A matrix
    for which one more rank would save nothing is kept dense (None) and costs its own size.

    Args:
        sigmas: Singular values of each matrix, the largest first.
        shapes: `[O, I]` of each matrix.
        budget: Number of elements.

    Raises:
        ConfigError: If the budget does not cover rank 1 of all matrices.
    """
    ranks: dict[str, int | None] = dict.fromkeys(sigmas, 1)
    left = budget - sum(map(sum, shapes.values()))
    if left < 0:
        raise ConfigError(f"budget of {budget} elements is {-left} short of rank 1 for all")
    steps = {name: _rank_steps(sigmas[name], shapes[name]) for name in sigmas}
    waiting = [(*step, name) for name in sigmas if (step := next(steps[name], None))]
    heapq.heapify(waiting)
    while waiting:
        _, cost, rank, name = heapq.heappop(waiting)
        if cost > left:
            continue  # this drops the matrix's later ranks too
        left -= cost
        ranks[name] = rank or None
        if step := next(steps[name], None):
            heapq.heappush(waiting, (*step, name))
    return ranks


def _rank_steps(sigma_R: np.ndarray, shape: tuple[int, int]) -> Iterator[tuple[float, int, int]]:
    """Yield (negative gain per element, cost, rank) from rank 2 up; rank 0 is the dense matrix."""
    energy_R = sigma_R**2 / max((sigma_R**2).sum(), np.finfo(np.float64).tiny)
    cost, rank = sum(shape), 1
    while saves_numbers(shape, rank + 1):
        yield -energy_R[rank] / cost, cost, rank + 1
        rank += 1
    if (whole := shape[0] * shape[1] - rank * cost) > 0:
        yield -energy_R[rank:].sum() / whole, whole, 0


def _parse_low_rank(rank: int, inner: str) -> LowRankFormat:
    found = parse_format(f"rank{rank}/{inner}")
    assert isinstance(found, LowRankFormat)
    return found


def _check_finite(what: str, array: np.ndarray) -> np.ndarray:
    wide = np.asarray(array).astype(np.float64)
    if not np.isfinite(wide).all():
        raise ConfigError(f"{what} holds NaN or infinity")
    return wide


def _check_inputs(w_OI: np.ndarray, shape: tuple[int, ...], size: float) -> None:
    if shape != w_OI.shape[1:]:
        raise ConfigError(
            f"input statistics have shape {shape}, expected {w_OI.shape[1:]} of the matrix"
        )
    if not size > 0:
        raise ConfigError("all inputs are zero: the approximation is undefined")
