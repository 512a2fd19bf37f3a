"""Tucker and CP decompositions of stacked matrices, such as one kind of all layers `[L, O, I]`.

An experiment, and no format of weights: what it finds is multiplied out again before a model runs.
Both share bases between layers, which pays where layers resemble each other. CP's rank may be above
the number of inputs, so that its matrices keep their full rank; but each layer then multiplies with
more numbers than it had: that saves bytes and no time.

Float64 on the host. Kolda and Bader 2009 (SIAM Review 51) is where the names come from.
"""

import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.errors import ConfigError


class Tucker(NamedTuple):
    """`tensor = core x_1 U_1 x_2 U_2 ...`: a core `[r_1, r_2, ...]`, and for each mode a basis
    `[n, r]` whose columns are orthonormal.

    As they are, the square of what it misses is `|tensor|^2 - |core|^2`.
    """

    core: np.ndarray
    bases: tuple[np.ndarray, ...]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return int(self.core.size + sum(basis.size for basis in self.bases))

    def dense(self) -> np.ndarray:
        """The tensor itself."""
        tensor = self.core
        for mode, basis in enumerate(self.bases):
            tensor = times(tensor, basis, mode)
        return tensor


class CP(NamedTuple):
    """A sum of R outer products: for each mode a factor `[n, R]`, and what was missed, as a share
    of the tensor's norm, after each sweep."""

    factors: tuple[np.ndarray, ...]
    errors: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return sum(factor.size for factor in self.factors)

    def dense(self) -> np.ndarray:
        """The tensor itself."""
        modes = string.ascii_lowercase[: len(self.factors)]
        tensor: np.ndarray = np.einsum(
            f"{','.join(f'{mode}R' for mode in modes)}->{modes}", *self.factors, optimize=True
        )
        return tensor


def unfold(tensor: np.ndarray, mode: int) -> np.ndarray:
    """The matrix `[n, everything else]` of one mode."""
    return np.moveaxis(tensor, mode, 0).reshape(tensor.shape[mode], -1)


def times(tensor: np.ndarray, matrix: np.ndarray, mode: int) -> np.ndarray:
    """`tensor x_mode matrix`: the matrix `[m, n]` applied to every fibre of a mode of n."""
    return np.moveaxis(np.tensordot(matrix, tensor, axes=(1, mode)), 0, mode)


def hosvd(tensor: np.ndarray, ranks: Sequence[int]) -> Tucker:
    """Tucker by the leading left singular vectors of each unfolding (De Lathauwer et al. 2000).

    Misses at most sqrt(number of modes) times what the best of these ranks does. Raises ConfigError
    for ranks that are not from 1 to the size of their mode.
    """
    wide = _checked(tensor, ranks)
    bases = tuple(_leading(unfold(wide, mode), rank) for mode, rank in enumerate(ranks))
    return Tucker(_core(wide, bases), bases)


def hooi(tensor: np.ndarray, ranks: Sequence[int], *, sweeps: int) -> Tucker:
    """`hosvd`, made better: each basis in turn is the best for the others.

    What it misses never grows from one sweep to the next. Raises what `hosvd` raises.
    """
    wide = _checked(tensor, ranks)
    bases = list(hosvd(wide, ranks).bases)
    for _ in range(sweeps):
        for mode, rank in enumerate(ranks):
            others = [b if m != mode else np.eye(len(b)) for m, b in enumerate(bases)]
            bases[mode] = _leading(unfold(_core(wide, others), mode), rank)
    return Tucker(_core(wide, bases), tuple(bases))


def tucker_error(tensor: np.ndarray, found: Tucker) -> float:
    """The norm of what it misses, by the norms of the tensor and of the core."""
    squared = (np.asarray(tensor, np.float64) ** 2).sum() - (found.core**2).sum()
    return float(np.sqrt(max(squared, 0.0)))


def cp(tensor: np.ndarray, rank: int, *, sweeps: int, rng: np.random.Generator) -> CP:
    """CP by alternating least squares: each factor in turn is the best for the others.

    It begins with the leading singular vectors of each unfolding, and random columns from `rng`
    where a mode has fewer than `rank`. What it misses never grows, and may be that of a local
    minimum. Raises ConfigError for a rank below 1.
    """
    wide = np.asarray(tensor, np.float64)
    if rank < 1:
        raise ConfigError(f"a CP rank is at least 1, got {rank}")
    factors = [_first(unfold(wide, mode), rank, rng) for mode in range(wide.ndim)]
    squared, errors = float((wide**2).sum()), []
    for _ in range(sweeps):
        for mode in range(wide.ndim):
            others = [f for m, f in enumerate(factors) if m != mode]
            products = _contracted(wide, factors, mode)
            factors[mode] = products @ np.linalg.pinv(_hadamard(others))
        # |T - S|^2 = |T|^2 - 2 <T, S> + |S|^2, with <T, S> from the last product with T.
        missed = squared - 2 * (products * factors[-1]).sum() + _hadamard(factors).sum()
        errors.append(float(np.sqrt(max(missed, 0.0) / max(squared, np.finfo(np.float64).tiny))))
    return CP(tuple(factors), tuple(errors))


def _core(tensor: np.ndarray, bases: Sequence[np.ndarray]) -> np.ndarray:
    for mode, basis in enumerate(bases):
        tensor = times(tensor, basis.T, mode)
    return tensor


def _leading(matrix: np.ndarray, rank: int) -> np.ndarray:
    left, _, _ = np.linalg.svd(matrix, full_matrices=False)
    if rank > left.shape[1]:  # a mode longer than all the others together
        left, _, _ = np.linalg.svd(matrix, full_matrices=True)
    return left[:, :rank]


def _first(matrix: np.ndarray, rank: int, rng: np.random.Generator) -> np.ndarray:
    found = _leading(matrix, min(rank, len(matrix)))
    return np.hstack([found, rng.normal(0, 1, (len(matrix), rank - found.shape[1]))])


def _contracted(tensor: np.ndarray, factors: Sequence[np.ndarray], mode: int) -> np.ndarray:
    """Every mode but one multiplied with its factor, a column of each at a time: `[n, R]`."""
    modes = string.ascii_lowercase[: tensor.ndim]
    others = [f"{m}R" for i, m in enumerate(modes) if i != mode]
    product: np.ndarray = np.einsum(
        f"{','.join([modes, *others])}->{modes[mode]}R",
        tensor,
        *(factor for i, factor in enumerate(factors) if i != mode),
        optimize=True,
    )
    return product


def _hadamard(factors: Sequence[np.ndarray]) -> np.ndarray:
    """The product, number by number, of the factors' Gram matrices `[R, R]`."""
    product: np.ndarray = np.prod([factor.T @ factor for factor in factors], axis=0)
    return product


def _checked(tensor: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
    if len(ranks) != tensor.ndim or not all(
        1 <= rank <= n for rank, n in zip(ranks, tensor.shape, strict=False)
    ):
        raise ConfigError(
            f"Tucker ranks are one for each mode of {tensor.shape}, from 1 to its size, got"
            f" {tuple(ranks)}"
        )
    return np.asarray(tensor, np.float64)
