"""Tucker and CP decompositions of stacked matrices, such as one kind from all layers `[L, O, I]`.

An experiment, not a weight format: the result is multiplied out before a model runs. Both share
bases between layers, which helps if layers are similar. CP's rank may exceed the number of inputs,
so its matrices can keep their full rank; but then each layer multiplies more elements than before,
which saves bytes and no time.

Float64 on the host. Terms follow Kolda and Bader 2009 (SIAM Review 51).
"""

import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.errors import ConfigError


class Tucker(NamedTuple):
    """`tensor = core x_1 U_1 x_2 U_2 ...`: a core `[r_1, r_2, ...]`, and for each mode a basis
    `[n, r]` with orthonormal columns.

    Because of that, the squared error is `|tensor|^2 - |core|^2`.
    """

    core: np.ndarray
    bases: tuple[np.ndarray, ...]

    @property
    def size(self) -> int:
        """Number of elements of the decomposition."""
        return int(self.core.size + sum(basis.size for basis in self.bases))

    def dense(self) -> np.ndarray:
        """Return the tensor."""
        tensor = self.core
        for mode, basis in enumerate(self.bases):
            tensor = times(tensor, basis, mode)
        return tensor


class CP(NamedTuple):
    """A sum of R outer products: for each mode a factor `[n, R]`, and the relative error after each
    sweep."""

    factors: tuple[np.ndarray, ...]
    errors: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements of the decomposition."""
        return sum(factor.size for factor in self.factors)

    def dense(self) -> np.ndarray:
        """Return the tensor."""
        modes = string.ascii_lowercase[: len(self.factors)]
        tensor: np.ndarray = np.einsum(
            f"{','.join(f'{mode}R' for mode in modes)}->{modes}", *self.factors, optimize=True
        )
        return tensor


def unfold(tensor: np.ndarray, mode: int) -> np.ndarray:
    """Unfold a tensor along one mode into a matrix `[n, everything else]`."""
    return np.moveaxis(tensor, mode, 0).reshape(tensor.shape[mode], -1)


def times(tensor: np.ndarray, matrix: np.ndarray, mode: int) -> np.ndarray:
    """Return `tensor x_mode matrix`: the matrix `[m, n]` applied to every fiber of the mode."""
    return np.moveaxis(np.tensordot(matrix, tensor, axes=(1, mode)), 0, mode)


def hosvd(tensor: np.ndarray, ranks: Sequence[int]) -> Tucker:
    """Compute Tucker by leading left singular vectors of unfoldings (De Lathauwer et al. 2000).

    The error is at most sqrt(number of modes) times the best for these ranks. Raises ConfigError
    unless each rank is from 1 to the size of its mode.
    """
    wide = _checked(tensor, ranks)
    bases = tuple(_leading(unfold(wide, mode), rank) for mode, rank in enumerate(ranks))
    return Tucker(_core(wide, bases), bases)


def hooi(tensor: np.ndarray, ranks: Sequence[int], *, sweeps: int) -> Tucker:
    """Refine `hosvd`: optimize each basis in turn for the others.

    The error never grows from one sweep to the next. Raises what `hosvd` raises.
    """
    wide = _checked(tensor, ranks)
    bases = list(hosvd(wide, ranks).bases)
    for _ in range(sweeps):
        for mode, rank in enumerate(ranks):
            others = [b if m != mode else np.eye(len(b)) for m, b in enumerate(bases)]
            bases[mode] = _leading(unfold(_core(wide, others), mode), rank)
    return Tucker(_core(wide, bases), tuple(bases))


def tucker_error(tensor: np.ndarray, found: Tucker) -> float:
    """Return the norm of the error, from the norms of the tensor and of the core."""
    squared = (np.asarray(tensor, np.float64) ** 2).sum() - (found.core**2).sum()
    return float(np.sqrt(max(squared, 0.0)))


def cp(tensor: np.ndarray, rank: int, *, sweeps: int, rng: np.random.Generator) -> CP:
    """Compute CP by alternating least squares: optimize each factor in turn for the others.

    Starts from the leading singular vectors of each unfolding, and random columns from `rng` where
    a mode has fewer than `rank`. The error never grows, but may reach only a local minimum. Raises
    ConfigError for a rank below 1.
    """
    wide = np.asarray(tensor, np.float64)
    if rank < 1:
        raise ConfigError(f"CP rank must be at least 1: got {rank}")
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
    if rank > left.shape[1]:  # the mode is longer than the product of the others
        left, _, _ = np.linalg.svd(matrix, full_matrices=True)
    return left[:, :rank]


def _first(matrix: np.ndarray, rank: int, rng: np.random.Generator) -> np.ndarray:
    found = _leading(matrix, min(rank, len(matrix)))
    return np.hstack([found, rng.normal(0, 1, (len(matrix), rank - found.shape[1]))])


def _contracted(tensor: np.ndarray, factors: Sequence[np.ndarray], mode: int) -> np.ndarray:
    """Contract every mode but one with its factor, column by column: `[n, R]`."""
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
    """Return the elementwise product of the factors' Gram matrices `[R, R]`."""
    product: np.ndarray = np.prod([factor.T @ factor for factor in factors], axis=0)
    return product


def _checked(tensor: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
    if len(ranks) != tensor.ndim or not all(
        1 <= rank <= n for rank, n in zip(ranks, tensor.shape, strict=False)
    ):
        raise ConfigError(
            f"Tucker ranks must be from 1 to the size of each mode of {tensor.shape}: got"
            f" {tuple(ranks)}"
        )
    return np.asarray(tensor, np.float64)
