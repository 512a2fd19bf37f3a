"""Zeros that stay zero while a pruned model is trained.

A constraint is applied after the optimizer's update, so momentum and decay cannot undo it. Sparse
weights need none: only their stored values are trained.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.train.partition import ALL_PARAMS, Rules, TrainedParams
from jaxllm.weights.paths import first_match

MIN_ZERO_FRACTION = 0.1  # share of zeros from which a matrix counts as pruned


@dataclasses.dataclass(frozen=True)
class KeepZeros:
    """Keeps what was zero before an update at zero, in the matrices at `paths`."""

    paths: tuple[str, ...]

    def __call__(self, old: TrainedParams, new: TrainedParams, step: jax.Array) -> TrainedParams:
        kept = {path: restore_zeros(old[path], new[path]) for path in self.paths}
        return {**new, **kept}


def keep_zeros(
    trained: TrainedParams, rules: Rules = ALL_PARAMS, *, min_zeros: float = MIN_ZERO_FRACTION
) -> KeepZeros:
    """Return the constraint for a pruned model: its matrices with at least `min_zeros` zeros.

    rules: which matrices are examined. Raises ConfigError if none of them has enough zeros.
    """
    matrices = dict(select_matrices(trained, rules))
    paths = tuple(p for p, x in matrices.items() if float((x == 0).mean()) >= min_zeros)
    if not paths:
        raise ConfigError(
            f"no zeros to keep: none of {len(matrices)} trained matrices has {min_zeros:.0%} zeros."
            " Is the model pruned, and not yet in a sparse format?"
        )
    return KeepZeros(paths)


def select_matrices(trained: TrainedParams, rules: Rules) -> Iterator[tuple[str, jax.Array]]:
    """Return the trained matrices that the rules select, by path."""
    return ((p, x) for p, x in trained.items() if x.ndim >= 2 and first_match(rules, p))


def restore_zeros(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the new weights with the zeros of the old ones."""
    return jnp.where(old == 0, jnp.zeros((), new.dtype), new)
