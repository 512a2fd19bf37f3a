"""Gradual pruning: matrices lose weights while they are trained (`train.constraints`)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.research.pruning.sparsity import Sparsity, lowest_in_groups, parse
from jaxllm.runtime.validation import check_int
from jaxllm.train.constraints import restore_zeros, select_matrices
from jaxllm.train.partition import ALL_PARAMS, Rules, TrainedParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneGradually:
    """Gradual magnitude pruning (Zhu and Gupta 2017, arXiv 1710.01878); pruned weights stay zero.

    Of a matrix of n weights exactly `int(n * share)` are zero; with N:M sparsity `int(M * share)`
    of each M neighbors.

    Attributes:
        paths: of the matrices.
        sparsity: at the end, a share of each matrix, or N:M of each M neighbors in a row.
        begin, end: steps of the first and of the last pruning, counted from 0.
        every: steps from one pruning to the next.
        initial_fraction: share that the first pruning removes.

    Raises ConfigError for invalid steps, and for a first share that is not below the last.
    """

    paths: tuple[str, ...]
    sparsity: Sparsity
    begin: int
    end: int
    every: int
    initial_fraction: float = 0.0

    def __post_init__(self) -> None:
        check_int("begin of pruning", self.begin, 0, None, ConfigError)
        check_int("end of pruning", self.end, self.begin + 1, None, ConfigError)
        check_int("steps between prunings", self.every, 1, None, ConfigError)
        if not 0 <= self.initial_fraction < self.sparsity.fraction:
            raise ConfigError(
                f"the first share of gradual pruning must be at least 0 and below its last one,"
                f" {self.sparsity.fraction:.4g}: got {self.initial_fraction}"
            )

    @property
    def fractions(self) -> tuple[float, ...]:
        """The share that each pruning reaches, from `begin` to `end`."""
        times = range(self.begin, self.end + self.every, self.every)
        return tuple(
            gradual_sparsity(
                min(step, self.end),
                begin=self.begin,
                end=self.end,
                first=self.initial_fraction,
                last=self.sparsity.fraction,
            )
            for step in times
        )

    def __call__(self, old: TrainedParams, new: TrainedParams, step: jax.Array) -> TrainedParams:
        shares = self.fractions
        # The last pruning is at `end`, even if `end - begin` is not a multiple of `every`.
        at = jnp.where(step == self.end, len(shares) - 1, (step - self.begin) // self.every)
        is_due = (step >= self.begin) & (step <= self.end)
        is_due &= ((step - self.begin) % self.every == 0) | (step == self.end)
        kept = {path: restore_zeros(old[path], new[path]) for path in self.paths}

        def prune(kept: TrainedParams) -> TrainedParams:
            return {path: self._prune(x, at, shares) for path, x in kept.items()}

        return {**new, **jax.lax.cond(is_due, prune, lambda kept: kept, kept)}

    def _prune(
        self, weight_OI: jax.Array, index: jax.Array, fractions: tuple[float, ...]
    ) -> jax.Array:
        if self.sparsity.pattern is None:
            score_GM = jnp.abs(weight_OI).reshape(1, -1)
        else:
            score_GM = jnp.abs(weight_OI).reshape(-1, self.sparsity.pattern[1])
        size = score_GM.shape[1]
        # The last share of N:M is 1 - N / M; its product with M may be rounded down.
        counts = np.array([int(size * share + 1e-6) for share in fractions], np.int32)
        gone = _mask_lowest(score_GM, jnp.asarray(counts)[index])
        return jnp.where(gone.reshape(weight_OI.shape), 0.0, weight_OI)


def gradual_sparsity(step: int, *, begin: int, end: int, first: float, last: float) -> float:
    """Return the sparsity at a training step: `first` until `begin`, `last` from `end` on.

    Between them it is `last + (first - last) (1 - (step - begin) / (end - begin))^3` (Zhu and Gupta
    2017).
    """
    if not begin < end:
        raise ConfigError(f"gradual pruning must begin before it ends: got {begin} and {end}")
    done = min(max((step - begin) / (end - begin), 0.0), 1.0)
    return last + (first - last) * (1 - done) ** 3


def prune_gradually(
    trained: TrainedParams,
    target: str,
    *,
    begin: int,
    end: int,
    every: int,
    rules: Rules = ALL_PARAMS,
) -> PruneGradually:
    """Return the constraint for the matrices that `rules` select. target: `50%`, `0.5` or `2:4`.

    Raises ConfigError for another target, invalid steps, a number of columns that M does not
    divide, and if no matrix is selected.
    """
    sparsity, matrices = parse(target), dict(select_matrices(trained, rules))
    if not matrices:
        raise ConfigError("no matrix to prune: the rules select no trained matrix")
    for path, matrix in matrices.items():
        sparsity.check(matrix.shape[-1], path)
    return PruneGradually(
        paths=tuple(matrices), sparsity=sparsity, begin=begin, end=end, every=every
    )


def _mask_lowest(score_GM: jax.Array, count: jax.Array) -> jax.Array:
    """Return a mask of the `count` lowest of each M scores `[G, M]`; ties go to the first."""
    if score_GM.shape[1] <= 64:  # N:M groups: compare ranks
        return lowest_in_groups(score_GM, count)
    ordered = jnp.sort(score_GM, axis=1)
    bound = jnp.take(ordered, jnp.maximum(count - 1, 0), axis=1)[:, None]
    below, equal = score_GM < bound, score_GM == bound
    left = count - below.sum(axis=1, keepdims=True, dtype=jnp.int32)
    return below | (equal & (jnp.cumsum(equal, axis=1, dtype=jnp.int32) <= left))
