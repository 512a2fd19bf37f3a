"""Ranks of low-rank factors: a number, a share of the elements, or of the energy."""

import heapq
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxllm.compress.recipe import Argument, Shapes
from jaxllm.errors import ConfigError
from jaxllm.weights.sparsity import parse_share

Ranks = dict[str, int | None]  # by path; None keeps the matrix dense


class RankBudget(NamedTuple):
    """How to choose a matrix's rank; one field is set.

    rank: the rank itself. share: share of the matrix's elements that the factors have. energy:
    share of the squared singular values that they keep.
    """

    rank: int | None = None
    share: float | None = None
    energy: float | None = None

    def rank_for(self, sigma_R: np.ndarray, shape: tuple[int, int]) -> int:
        """Return the rank of one matrix."""
        if self.energy is not None:
            return rank_of_energy(sigma_R, self.energy)
        if self.share is not None:
            return rank_of_share(shape, self.share)
        assert self.rank is not None
        return self.rank

    def allocate(self, sigmas: Mapping[str, np.ndarray], shapes: Shapes) -> Ranks:
        """Allocate the share of all matrices' elements with `allocate_ranks`."""
        assert self.share is not None
        matrices = {path: (shapes[path][0], shapes[path][1]) for path in sigmas}
        elements = sum(rows * columns for rows, columns in matrices.values())
        return allocate_ranks(sigmas, matrices, int(self.share * elements))


def parse_rank_budget(text: str) -> RankBudget:
    """Parse `64` (a rank), `80%` (of the elements), `energy:95%` (of the squared singular values).

    Raises ConfigError for anything else.
    """
    if re.fullmatch(r"[1-9]\d{0,6}", text):
        return RankBudget(rank=int(text))
    try:
        energy = text.removeprefix("energy:")
        return (
            RankBudget(share=parse_share(text))
            if energy == text
            else RankBudget(energy=parse_share(energy))
        )
    except ConfigError as error:
        raise ConfigError(
            f"size must be a rank such as 64, a share, or energy:95%: {error}"
        ) from None


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
    """Return the largest rank at which the factors have at most this share of the elements.

    Raises ConfigError if the share is not between 0 and 1, or too small for rank 1.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share to keep out of range: got {share}, expected between 0 and 1")
    if rank := int(shape[0] * shape[1] * share / (shape[0] + shape[1])):
        return rank
    raise ConfigError(f"share {share} is too small: rank 1 of a matrix {shape} needs more")


def allocate_ranks(
    sigmas: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, int]], budget: int
) -> Ranks:
    """Allocate ranks to a model's matrices so that together they have at most `budget` elements.

    Greedy: every matrix starts at rank 1. The next rank goes where it lowers the relative squared
    error most per element, so all outputs count equally, however large they are. If one more rank
    would save nothing, a matrix stays dense (None) and costs its own size.

    Args:
        sigmas: Singular values of each matrix, the largest first.
        shapes: `[O, I]` of each matrix.
        budget: Number of elements.

    Raises:
        ConfigError: If the budget does not cover rank 1 of all matrices.
    """
    ranks: Ranks = dict.fromkeys(sigmas, 1)
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
    if (left := shape[0] * shape[1] - rank * cost) > 0:
        yield -energy_R[rank:].sum() / left, left, 0


RANK_BUDGET = Argument("RANK|KEPT%|energy:KEPT%", parse_rank_budget)
