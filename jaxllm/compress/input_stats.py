"""Statistics of a linear's inputs: sums over all tokens of the calibration data."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import NonFiniteError
from jaxllm.weights.linear import linear


class InputStats(struct.PyTreeNode):
    """Sums over tokens x `[I]`, float32.

    count: number of tokens. gram_II: sum of `x x^T`. abs_I: sum of |x|. peak_I: the largest |x|.
    """

    count: jax.Array
    gram_II: jax.Array
    abs_I: jax.Array
    peak_I: jax.Array

    @classmethod
    def empty(cls, columns: int) -> "InputStats":
        """Return the statistics of no tokens."""
        return cls(
            jnp.float32(0),
            jnp.zeros((columns, columns)),
            jnp.zeros(columns),
            jnp.zeros(columns),  # a separate array, since each is donated
        )

    def add(self, x_RI: jax.Array) -> "InputStats":
        """Add tokens."""
        size_RI = jnp.abs(x_RI.astype(jnp.float32))
        gram_II = linear(x_RI.T, x_RI.T)  # uses the kernels where they are faster
        return InputStats(
            self.count + x_RI.shape[0],
            self.gram_II + gram_II,
            self.abs_I + size_RI.sum(0),
            jnp.maximum(self.peak_I, size_RI.max(0)),
        )

    @property
    def mean_abs_I(self) -> jax.Array:
        return self.abs_I / self.count

    def scale(self, scale_I: jax.Array) -> "InputStats":
        """Return the statistics of `x * scale`."""
        return InputStats(
            self.count,
            self.gram_II * scale_I[:, None] * scale_I[None],
            self.abs_I * scale_I,
            self.peak_I * scale_I,
        )


def check_finite(stats: InputStats, where: str) -> InputStats:
    """Return the statistics. Raises NonFiniteError, naming `where`, if an input is not finite."""
    bad_I = ~np.isfinite(np.asarray(stats.abs_I))
    if bad_I.any() or not np.isfinite(np.asarray(jnp.trace(stats.gram_II))):
        raise NonFiniteError(
            f"{where}: inputs of {int(bad_I.sum()) or 'some'} of {len(bad_I)} channels hold NaN or"
            " infinity, so calibration is impossible"
        )
    return stats
