"""Weights with permuted columns, so that the columns of a group are adjacent.

GPTQ's act-order ("desc_act") quantizes columns by falling importance, and groups them in that
order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.types.base import Format, LinearFn, PartialShape
from jaxllm.weights.types.wrapper import WeightWrapper, WrapperFormat, parse_inner

PREFIX = "ordered/"


class PermutedWeight(WeightWrapper, struct.PyTreeNode):
    """A matrix `[O, I]`: column j of `weight` is its column `order[j]`."""

    format_prefix = PREFIX

    weight: Any  # [O, I], an array or a leaf
    order: jax.Array  # int32 [I], a permutation

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return self._unpermute(self.inner.to_dense(dtype))

    def take(self, index: jax.Array) -> jax.Array:
        return self._unpermute(self.inner.take(index))

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        return self.inner.matmul(self._permute(x_RI))

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        return linear(self._permute(x_RI), self.weight)

    def with_rows(self, index: np.ndarray) -> "PermutedWeight":
        return self.replace(weight=self.inner.with_rows(index))

    def with_columns(self, begin: int, end: int) -> "PermutedWeight":
        raise ConfigError(
            f"columns of {self.format} cannot be sliced: they are permuted by group. Rows can be"
            " sliced: use exact=True on a mesh"
        )

    def concatenate(self, appended: Sequence["PermutedWeight"], axis: int) -> "PermutedWeight":
        if axis:
            raise ConfigError(f"columns of {self.format} cannot be concatenated: they are permuted")
        return self.replace(weight=self.inner.concatenate([x.inner for x in appended], axis))

    def extra_arrays(self) -> dict[str, jax.Array]:
        return {".order": self.order}

    def _permute(self, x: jax.Array) -> jax.Array:
        return jnp.take(x, self.order, axis=-1, mode="clip")

    def _unpermute(self, x: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.argsort(self.order), axis=-1, mode="clip")


class PermutedFormat(WrapperFormat):
    """The format of `PermutedWeight`."""

    format_prefix = PREFIX
    missing_info = (
        "cannot be made without an order; it comes from GPTQ (act-order) or from a checkpoint"
        " (desc_act)"
    )

    def extra_specs(self, shape: tuple[int, ...]) -> dict[str, tuple[PartialShape, Any]]:
        return {".order": (shape[-1:], np.int32)}

    def wrap(self, weight: Any, arrays: Mapping[str, Any]) -> PermutedWeight:
        return PermutedWeight(weight, arrays[".order"])

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        if not np.array_equal(np.sort(arrays[".order"]), np.arange(shape[-1])):
            raise CheckpointError(f"{path}.order is not a permutation of {shape[-1]} columns")


def parse(name: str, inner: Callable[[str], Format]) -> PermutedFormat | None:
    """Parse `ordered/int4-g128`, with any simple format; None for other names.

    Raises:
        ConfigError: for a composite inner format.
    """
    stored = parse_inner(name, PREFIX, inner)
    return None if stored is None else PermutedFormat(stored)
