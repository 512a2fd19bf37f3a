"""Pruned models in training: zeros that stay zero, and pruning little by little.

A constraint is applied after the optimiser's update, whatever its momentum and decay would do.
Sparse leaves need none of this: of them only the stored values are trained.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.matrices.sparsity import Sparsity, gradual, lowest_of, parse
from jaxllm.errors import ConfigError
from jaxllm.train.trained import ALL, Rules, Trained
from jaxllm.weights.paths import first_match
from jaxllm.whole import whole

LEAST = 0.1  # of a matrix that is zero, for it to have been pruned


@dataclasses.dataclass(frozen=True)
class KeepZeros:
    """What was zero before the update is zero after it. paths: of the matrices that this holds."""

    paths: tuple[str, ...]

    def __call__(self, before: Trained, after: Trained, step: jax.Array) -> Trained:
        kept = {path: _where_zero(before[path], after[path]) for path in self.paths}
        return {**after, **kept}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneGradually:
    """Weights of least magnitude become zero and stay so, every few steps some more.

    Zhu and Gupta 2017 (arXiv 1710.01878). paths: of the matrices. sparsity: at the end, a share of
    each matrix or N:M of each M neighbours of a row. begin, end: the steps of the first and of the
    last pruning, from 0; every: steps from one to the next. first: the share that is pruned first.
    Of a matrix of n weights exactly `int(n * share)` are zero, or as many in each M neighbours as
    the share makes of M, rounded down.

    Raises ConfigError for steps that are none, and a first share that is not below the last.
    """

    paths: tuple[str, ...]
    sparsity: Sparsity
    begin: int
    end: int
    every: int
    first: float = 0.0

    def __post_init__(self) -> None:
        whole("begin of pruning", self.begin, 0, None, ConfigError)
        whole("end of pruning", self.end, self.begin + 1, None, ConfigError)
        whole("steps between prunings", self.every, 1, None, ConfigError)
        if not 0 <= self.first < self.sparsity.fraction:
            raise ConfigError(
                f"gradual pruning begins with a share from 0 to below {self.sparsity.fraction:.4g},"
                f" its last one, got {self.first}"
            )

    @property
    def shares(self) -> tuple[float, ...]:
        """What is pruned each time, from `begin` to `end`."""
        times = range(self.begin, self.end + self.every, self.every)
        return tuple(
            gradual(
                min(step, self.end),
                begin=self.begin,
                end=self.end,
                first=self.first,
                last=self.sparsity.fraction,
            )
            for step in times
        )

    def __call__(self, before: Trained, after: Trained, step: jax.Array) -> Trained:
        shares = self.shares
        # The last time comes at `end`, whether or not it is a multiple of `every` after `begin`.
        at = jnp.where(step == self.end, len(shares) - 1, (step - self.begin) // self.every)
        now = (step >= self.begin) & (step <= self.end)
        now &= ((step - self.begin) % self.every == 0) | (step == self.end)
        kept = {path: _where_zero(before[path], after[path]) for path in self.paths}

        def pruned(kept: Trained) -> Trained:
            return {path: self._pruned(x, at, shares) for path, x in kept.items()}

        return {**after, **jax.lax.cond(now, pruned, lambda kept: kept, kept)}

    def _pruned(self, weight_OI: jax.Array, at: jax.Array, shares: tuple[float, ...]) -> jax.Array:
        if self.sparsity.pattern is None:
            score_GM = jnp.abs(weight_OI).reshape(1, -1)
        else:
            score_GM = jnp.abs(weight_OI).reshape(-1, self.sparsity.pattern[1])
        size = score_GM.shape[1]
        # The last share of N:M is 1 - N / M, whose product with M may be a little too small.
        counts = np.array([int(size * share + 1e-6) for share in shares], np.int32)
        gone = _lowest(score_GM, jnp.asarray(counts)[at])
        return jnp.where(gone.reshape(weight_OI.shape), 0.0, weight_OI)


def keep_zeros(trained: Trained, rules: Rules = ALL, *, least: float = LEAST) -> KeepZeros:
    """The constraint for a model that was pruned: for its matrices of which so much is zero.

    rules: which matrices are looked at. Raises ConfigError where none of them has zeros.
    """
    matrices = dict(_matrices(trained, rules))
    paths = tuple(p for p, x in matrices.items() if float((x == 0).mean()) >= least)
    if not paths:
        raise ConfigError(
            f"no zeros to keep: of {len(matrices)} trained matrices none has {least:.0%} of zeros."
            " Is the model pruned, and not already sparse?"
        )
    return KeepZeros(paths)


def prune_gradually(
    trained: Trained, target: str, *, begin: int, end: int, every: int, rules: Rules = ALL
) -> PruneGradually:
    """The constraint for the matrices that `rules` choose. target: `50%`, `0.5` or `2:4`.

    Raises ConfigError for another target, for columns that are no multiple of M, where no matrix is
    chosen, and for steps that are none.
    """
    sparsity, matrices = parse(target), dict(_matrices(trained, rules))
    if not matrices:
        raise ConfigError("no matrix to prune: the rules choose none that is trained")
    for path, matrix in matrices.items():
        sparsity.check(matrix.shape[-1], path)
    return PruneGradually(
        paths=tuple(matrices), sparsity=sparsity, begin=begin, end=end, every=every
    )


def _matrices(trained: Trained, rules: Rules) -> Iterator[tuple[str, jax.Array]]:
    return ((p, x) for p, x in trained.items() if x.ndim >= 2 and first_match(rules, p))


def _where_zero(before: jax.Array, after: jax.Array) -> jax.Array:
    return jnp.where(before == 0, jnp.zeros((), after.dtype), after)


def _lowest(score_GM: jax.Array, count: jax.Array) -> jax.Array:
    """Which of each M scores `[G, M]` are the `count` lowest, of equal ones the first."""
    if score_GM.shape[1] <= 64:  # neighbours: the ranks themselves
        return lowest_of(score_GM, count)
    ordered = jnp.sort(score_GM, axis=1)
    bound = jnp.take(ordered, jnp.maximum(count - 1, 0), axis=1)[:, None]
    below, equal = score_GM < bound, score_GM == bound
    left = count - below.sum(axis=1, keepdims=True, dtype=jnp.int32)
    return below | (equal & (jnp.cumsum(equal, axis=1, dtype=jnp.int32) <= left))
