"""Low rank: the two thin matrices that replace one, and how thin they may be.

Functions of one matrix and of statistics of its inputs X `[tokens, I]`, in float64 on the host. A
method decides in which measure the result is nearest: `plain` in that of the weights, `scaled` in
that of the weights times the size of their inputs, `whitened` in that of the outputs themselves.
Of the models in BENCHMARKS.md the last costs every one the least, the others about as much as each
other; int4 costs less than any of them, for fewer bytes.

Each is a projection, `W_k = U_k U_k^T W`, on the principal directions U of `W M W^T`: M is 1, or
the inputs' squared sizes, or their Gram matrix X^T X, and then U are those of the outputs. This is
the papers' `svd(W S) inv(S)`, `S S^T = M`, with no factor of M to find or to invert: M may be
singular.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.weights.formats import parse
from jaxllm.weights.leaves.factored import Factored, LowRank


class Spectrum(NamedTuple):
    """A decomposed matrix: `weight = left_OR @ right_RI`, R the shorter side.

    left_OR: orthonormal, the most important direction first. sigma_R: what each direction counts in
    the method's measure, the singular values of `W S`; those below the 1e-8th part of the largest
    are noise.
    """

    left_OR: np.ndarray
    sigma_R: np.ndarray
    right_RI: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix, `[O, I]`."""
        return self.left_OR.shape[0], self.right_RI.shape[1]


def plain(weight_OI: np.ndarray) -> Spectrum:
    """The singular value decomposition. Raises ConfigError for numbers that are not finite."""
    return _principal(weight_OI, np.ones(weight_OI.shape[1]))


def scaled(weight_OI: np.ndarray, mean_abs_I: np.ndarray, *, alpha: float) -> Spectrum:
    """ASVD (arXiv 2312.05821): that of `W diag(s)`, s = mean |x|^alpha; the paper's alpha is 0.5.

    mean_abs_I: mean |x_j| of each input. Raises ConfigError where all are zero, or a number is not
    finite.
    """
    size_I = _finite("mean |x|", mean_abs_I)
    _check_inputs(weight_OI, size_I.shape, size_I.max(initial=0))
    return _principal(weight_OI, size_I ** (2 * alpha))


def whitened(weight_OI: np.ndarray, gram_II: np.ndarray) -> Spectrum:
    """SVD-LLM (arXiv 2403.07378): that of `W S`, where S is the Cholesky factor of X^T X.

    Of all matrices of a rank the result has the nearest outputs, and their distance is what the
    spectrum leaves out: `||X (W - W_k)^T|| = error(spectrum, k)`. Raises ConfigError where all
    inputs are zero, or a number is not finite.
    """
    g_II = _finite("X^T X", gram_II)
    for side in (g_II.shape[:1], g_II.shape[1:]):
        _check_inputs(weight_OI, side, np.trace(g_II))
    return _principal(weight_OI, (g_II + g_II.T) / 2)


def _principal(weight_OI: np.ndarray, measure: np.ndarray) -> Spectrum:
    """By the eigenvectors of `W M W^T`. measure: M `[I, I]`, or its diagonal `[I]`."""
    w_OI = _finite("the weight", weight_OI)
    basis_OR = None
    if w_OI.shape[0] > w_OI.shape[1]:  # its columns span no more than these
        basis_OR, w_OI = np.linalg.qr(w_OI)
    by_RI = w_OI * measure if measure.ndim == 1 else w_OI @ measure
    squares_R, left = np.linalg.eigh(by_RI @ w_OI.T)
    left, sigma_R = left[:, ::-1], np.sqrt(np.maximum(squares_R[::-1], 0))
    return Spectrum(left if basis_OR is None else basis_OR @ left, sigma_R, left.T @ w_OI)


def error(spectrum: Spectrum, rank: int) -> float:
    """How far the nearest matrix of a rank is, in the method's measure (Eckart and Young)."""
    return float(np.sqrt((spectrum.sigma_R[rank:] ** 2).sum()))


def factors(spectrum: Spectrum, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """`[O, K]` and `[K, I]`, float64: a column of the one is as long as its row of the other."""
    right_KI = spectrum.right_RI[:rank]
    root_K = np.sqrt(np.linalg.norm(right_KI, axis=1))
    safe_K = np.where(root_K == 0, 1, root_K)
    return spectrum.left_OR[:, :rank] * safe_K, right_KI / safe_K[:, None]


def as_factored(spectrum: Spectrum, rank: int, inner: str) -> Factored:
    """The leaf of a rank, its factors in the format `inner`. Raises ConfigError for no such."""
    if not 0 < rank <= len(spectrum.sigma_R):
        raise ConfigError(
            f"a rank of {spectrum.shape} is from 1 to {len(spectrum.sigma_R)}: {rank}"
        )
    return _format(rank, inner).of(*factors(spectrum, rank))


def gains(shape: tuple[int, int], rank: int) -> bool:
    """Whether two factors of a rank have fewer numbers than the matrix `[O, I]`."""
    return rank * (shape[0] + shape[1]) < shape[0] * shape[1]


def rank_of_energy(sigma_R: np.ndarray, energy: float) -> int:
    """The least rank that keeps a share of the squared spectrum, of 1 at most.

    It may be one at which nothing is gained (`gains`).
    """
    if not 0 < energy <= 1:
        raise ConfigError(f"an energy to keep is above 0 and at most 1, got {energy}")
    kept_R = np.cumsum(sigma_R**2)
    # Sums round: all of the energy is what is left of it in them.
    return int(np.searchsorted(kept_R, energy * kept_R[-1] * (1 - 1e-15))) + 1


def rank_of_share(shape: tuple[int, int], share: float) -> int:
    """The rank at which the factors have a share of the matrix's numbers, at most.

    Raises ConfigError for a share that is not between 0 and 1, or too small for one rank.
    """
    if not 0 < share < 1:
        raise ConfigError(f"a share of the numbers to keep is between 0 and 1, got {share}")
    if rank := int(shape[0] * shape[1] * share / (shape[0] + shape[1])):
        return rank
    raise ConfigError(f"{share} of the numbers of a matrix {shape} is less than rank 1 takes")


def rank_of_bytes(shape: tuple[int, int], inner: str, most: int) -> int:
    """The largest rank whose factors take so many bytes in the format `inner`, padding counted.

    Raises ConfigError where rank 1 takes more.
    """
    ranks = range(1, min(shape) + 1)
    fitting = sum(1 for rank in ranks if factor_bytes(shape, rank, inner) <= most)
    if not fitting:
        raise ConfigError(f"{most} bytes are fewer than rank 1 of {shape} takes in {inner}")
    return fitting  # bytes never fall as the rank grows


def factor_bytes(shape: tuple[int, int], rank: int, inner: str) -> int:
    """What both factors take in the format `inner`. Raises ConfigError where numbers decide it."""
    total = 0
    for piece, dtype in _format(rank, inner).expected(shape).values():
        if None in piece:
            raise ConfigError(f"how many bytes {inner} takes depends on the numbers")
        total += int(np.prod([n or 0 for n in piece])) * np.dtype(dtype).itemsize
    return total


def share_ranks(
    sigmas: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, int]], budget: int
) -> dict[str, int | None]:
    """A rank for each of a model's matrices, by name, that together have `budget` numbers at most.

    sigmas: each one's singular values, the largest first. Every matrix begins with rank 1. The next
    rank goes where it lowers the squared error most for each number that it costs, as a share of
    that matrix's own spectrum: the relative errors of all outputs count alike, however large they
    are. A matrix for which one rank more would gain nothing is left whole instead (None), which
    costs what it has now.

    Raises ConfigError where the budget does not cover rank 1 of all.
    """
    ranks: dict[str, int | None] = dict.fromkeys(sigmas, 1)
    left = budget - sum(map(sum, shapes.values()))
    if left < 0:
        raise ConfigError(f"a budget of {budget} numbers is {-left} short of rank 1 for all")
    steps = {name: _steps(sigmas[name], shapes[name]) for name in sigmas}
    waiting = [(*step, name) for name in sigmas if (step := next(steps[name], None))]
    heapq.heapify(waiting)
    while waiting:
        _, cost, rank, name = heapq.heappop(waiting)
        if cost > left:
            continue  # and with it all of this matrix's later ones
        left -= cost
        ranks[name] = rank or None
        if step := next(steps[name], None):
            heapq.heappush(waiting, (*step, name))
    return ranks


def _steps(sigma_R: np.ndarray, shape: tuple[int, int]) -> Iterator[tuple[float, int, int]]:
    """From rank 1 up: less what each gains a number, what it costs, the rank (0: left whole)."""
    energy_R = sigma_R**2 / max((sigma_R**2).sum(), np.finfo(np.float64).tiny)
    cost, rank = sum(shape), 1
    while gains(shape, rank + 1):
        yield -energy_R[rank] / cost, cost, rank + 1
        rank += 1
    if (whole := shape[0] * shape[1] - rank * cost) > 0:
        yield -energy_R[rank:].sum() / whole, whole, 0


def _format(rank: int, inner: str) -> LowRank:
    found = parse(f"rank{rank}/{inner}")
    assert isinstance(found, LowRank)
    return found


def _finite(what: str, array: np.ndarray) -> np.ndarray:
    wide = np.asarray(array).astype(np.float64)
    if not np.isfinite(wide).all():
        raise ConfigError(f"{what} holds NaN or infinity")
    return wide


def _check_inputs(w_OI: np.ndarray, shape: tuple[int, ...], size: float) -> None:
    if shape != w_OI.shape[1:]:
        raise ConfigError(f"statistics of {shape} inputs for a matrix of {w_OI.shape[1:]}")
    if not size > 0:
        raise ConfigError("the inputs are all zero: there is nothing to be near to")
