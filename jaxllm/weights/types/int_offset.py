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
from jaxllm.weights.types.arrays import matmul
from jaxllm.weights.types.base import (
    Format,
    LinearFn,
    PartialShape,
    check_finite,
    concat_matrices,
    pad_groups,
    take_rows,
)
from jaxllm.weights.types.int_quant import IntFormat, QTensor
from jaxllm.weights.types.wrapper import WeightWrapper, WrapperFormat, parse_inner

PREFIX = "offset/"


class OffsetWeight(WeightWrapper, struct.PyTreeNode):
    """`weight[o, i] + offset[o, i // group]`, computed in float32."""

    format_prefix = PREFIX

    weight: QTensor  # [..., O, I], with groups
    offset: jax.Array  # float32 [..., O, G], like its scales

    def to_dense(self, dtype: Any = None) -> jax.Array:
        wide = self.weight.to_dense() + self._repeat_groups(self.offset)
        return wide.astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        added = jnp.asarray(self.offset).at[index.reshape(-1)].get(mode="clip")
        rows = self.weight.take(index)
        return rows + self._repeat_groups(added).reshape(rows.shape)

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        return self.weight.matmul(x_RI) + matmul(self._group_sums(x_RI), self.offset)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        return linear(x_RI, self.weight) + linear(self._group_sums(x_RI), self.offset)

    def with_rows(self, index: np.ndarray) -> "OffsetWeight":
        return take_rows(self, index)

    def with_columns(self, begin: int, end: int) -> "OffsetWeight":
        part, group = self.weight.with_columns(begin, end), self.weight.int_format.group_size(end)
        offset = self.offset[..., begin // group : -(-end // group)]
        return OffsetWeight(part, pad_groups(offset, part.scale.shape[-1]))

    def concatenate(self, appended: Sequence["OffsetWeight"], axis: int) -> "OffsetWeight":
        parts = [self, *appended]
        if axis == 0:
            return concat_matrices(parts)
        weight = self.weight.concatenate([x.weight for x in appended], axis)
        offset = concat_matrices([x.weight.unpadded_groups(x.offset) for x in parts], 1)
        return OffsetWeight(weight, pad_groups(offset, weight.scale.shape[-1]))

    def extra_arrays(self) -> dict[str, jax.Array]:
        return {".offset": self.offset}

    def _repeat_groups(self, x_OG: jax.Array) -> jax.Array:
        """Repeat each group's value for all its columns."""
        size, columns = self.weight.int_format.group_size(self.weight.columns), self.weight.columns
        return jnp.repeat(x_OG, size, axis=-1)[..., :columns]

    def _group_sums(self, x_RI: jax.Array) -> jax.Array:
        """Sum the inputs of each group, float32 `[R, G]`."""
        groups, size = self.offset.shape[-1], self.weight.int_format.group_size(self.weight.columns)
        x_RI = x_RI.astype(jnp.float32)
        x_RI = jnp.pad(x_RI, ((0, 0), (0, groups * size - x_RI.shape[1])))
        return x_RI.reshape(-1, groups, size).sum(axis=-1)


class OffsetFormat(WrapperFormat):
    """The format of `OffsetWeight`."""

    format_prefix = PREFIX
    missing_info = "cannot be made by quantizing; it comes from GGUF files (Q4_1, Q5_1, Q4_K, Q5_K)"

    def extra_specs(self, shape: tuple[int, ...]) -> dict[str, tuple[PartialShape, Any]]:
        scale, _ = self.inner.array_specs(shape)[".scale"]
        return {".offset": (scale, np.float32)}

    def wrap(self, weight: Any, arrays: Mapping[str, Any]) -> OffsetWeight:
        return OffsetWeight(weight, arrays[".offset"])

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        check_finite(path, arrays, ".offset")


def parse(name: str, inner: Callable[[str], Format]) -> OffsetFormat | None:
    """Parse `offset/int4-g32-zp`, with any integers in groups; None for other names.

    Raises:
        ConfigError: for a format without groups.
    """
    stored = parse_inner(name, PREFIX, inner)
    if stored is None:
        return None
    if not isinstance(stored, IntFormat) or stored.group is None:
        raise ConfigError(f"{name:.40}: format after {PREFIX} must be integers in groups")
    return OffsetFormat(stored)
