"""Integer weights with a float offset per group, as GGUF has them.

A zero point is an integer number of steps; an offset is any number, so `Q4_K` and its like are
stored bit for bit. The product is that of the integers, by their kernels, plus that of each group's
input sum with its offset: `x @ w.T = x @ (q s).T + sum_g(x) @ b.T`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import ConfigError
from jaxllm.weights.leaves.arrays import product
from jaxllm.weights.leaves.integers import Integer, QTensor
from jaxllm.weights.leaves.leaf import (
    Format,
    Linear,
    Shape,
    check_finite,
    filled,
    joined,
    rows_of,
)
from jaxllm.weights.leaves.wrapped import Wrapped, WrappedFormat, inner_of

KIND = "offset/"


class Offset(Wrapped, struct.PyTreeNode):
    """`weight[o, i] + offset[o, i // group]`, computed in float32."""

    kind = KIND

    weight: QTensor  # [..., O, I], with groups
    offset: jax.Array  # float32 [..., O, G], like its scales

    def dense(self, dtype: Any = None) -> jax.Array:
        wide = self.weight.dense() + self._spread(self.offset)
        return wide.astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        added = self.offset.at[index.reshape(-1)].get(mode="clip")
        rows = self.weight.take(index)
        return rows + self._spread(added).reshape(rows.shape)

    def product(self, x_RI: jax.Array) -> jax.Array:
        return self.weight.product(x_RI) + product(self._sums(x_RI), self.offset)

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        return linear(x_RI, self.weight) + linear(self._sums(x_RI), self.offset)

    def with_rows(self, index: np.ndarray) -> "Offset":
        return rows_of(self, index)

    def with_columns(self, begin: int, end: int) -> "Offset":
        part, group = self.weight.with_columns(begin, end), self.weight.kind.size(end)
        offset = self.offset[..., begin // group : -(-end // group)]
        return Offset(part, filled(offset, part.scale.shape[-1]))

    def with_more(self, after: Sequence["Offset"], axis: int) -> "Offset":
        parts = [self, *after]
        if axis == 0:
            return joined(parts)
        weight = self.weight.with_more([x.weight for x in after], axis)
        offset = joined([x.weight.own_groups(x.offset) for x in parts], 1)
        return Offset(weight, filled(offset, weight.scale.shape[-1]))

    def beside(self) -> dict[str, jax.Array]:
        return {".offset": self.offset}

    def _spread(self, x_OG: jax.Array) -> jax.Array:
        """Repeat each group's value for all its columns."""
        size, columns = self.weight.kind.size(self.weight.columns), self.weight.columns
        return jnp.repeat(x_OG, size, axis=-1)[..., :columns]

    def _sums(self, x_RI: jax.Array) -> jax.Array:
        """Sum the inputs of each group, float32 `[R, G]`."""
        groups, size = self.offset.shape[-1], self.weight.kind.size(self.weight.columns)
        x_RI = x_RI.astype(jnp.float32)
        x_RI = jnp.pad(x_RI, ((0, 0), (0, groups * size - x_RI.shape[1])))
        return x_RI.reshape(-1, groups, size).sum(axis=-1)


class OffsetFormat(WrappedFormat):
    """The format of `Offset`."""

    kind = KIND
    lacking = "cannot be made by quantizing; it comes from GGUF files (Q4_1, Q5_1, Q4_K, Q5_K)"

    def beside(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        scale, _ = self.inner.expected(shape)[".scale"]
        return {".offset": (scale, np.float32)}

    def around(self, weight: Any, pieces: Mapping[str, Any]) -> Offset:
        return Offset(weight, pieces[".offset"])

    def check(self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]) -> None:
        check_finite(path, pieces, ".offset")


def parse(name: str, inner: Callable[[str], Format]) -> OffsetFormat | None:
    """Parse `offset/int4-g32-zp`, with any integers in groups; None for other names.

    Raises:
        ConfigError: for a format without groups.
    """
    stored = inner_of(name, KIND, inner)
    if stored is None:
        return None
    if not isinstance(stored, Integer) or stored.group is None:
        raise ConfigError(f"{name:.40}: format after {KIND} must be integers in groups")
    return OffsetFormat(stored)
