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
from jaxllm.weights.leaves.leaf import Format, Linear, Shape
from jaxllm.weights.leaves.wrapped import Wrapped, WrappedFormat, inner_of

KIND = "ordered/"


class Ordered(Wrapped, struct.PyTreeNode):
    """A matrix `[O, I]`: column j of `weight` is its column `order[j]`."""

    kind = KIND

    weight: Any  # [O, I], an array or a leaf
    order: jax.Array  # int32 [I], a permutation

    def dense(self, dtype: Any = None) -> jax.Array:
        return self._unordered(self.stored.dense(dtype))

    def take(self, index: jax.Array) -> jax.Array:
        return self._unordered(self.stored.take(index))

    def product(self, x_RI: jax.Array) -> jax.Array:
        return self.stored.product(self._ordered(x_RI))

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        return linear(self._ordered(x_RI), self.weight)

    def with_rows(self, index: np.ndarray) -> "Ordered":
        return self.replace(weight=self.stored.with_rows(index))

    def with_columns(self, begin: int, end: int) -> "Ordered":
        raise ConfigError(
            f"columns of {self.format} cannot be sliced: they are permuted by group. Rows can be"
            " sliced: use exact=True on a mesh"
        )

    def with_more(self, after: Sequence["Ordered"], axis: int) -> "Ordered":
        if axis:
            raise ConfigError(f"columns of {self.format} cannot be concatenated: they are permuted")
        return self.replace(weight=self.stored.with_more([x.stored for x in after], axis))

    def beside(self) -> dict[str, jax.Array]:
        return {".order": self.order}

    def _ordered(self, x: jax.Array) -> jax.Array:
        return jnp.take(x, self.order, axis=-1, mode="clip")

    def _unordered(self, x: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.argsort(self.order), axis=-1, mode="clip")


class OrderedFormat(WrappedFormat):
    """The format of `Ordered`."""

    kind = KIND
    lacking = (
        "cannot be made without an order; it comes from GPTQ (act-order) or from a checkpoint"
        " (desc_act)"
    )

    def beside(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        return {".order": (shape[-1:], np.int32)}

    def around(self, weight: Any, pieces: Mapping[str, Any]) -> Ordered:
        return Ordered(weight, pieces[".order"])

    def check(self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]) -> None:
        if not np.array_equal(np.sort(pieces[".order"]), np.arange(shape[-1])):
            raise CheckpointError(f"{path}.order is not a permutation of {shape[-1]} columns")


def parse(name: str, inner: Callable[[str], Format]) -> OrderedFormat | None:
    """Parse `ordered/int4-g128`, with any simple format; None for other names.

    Raises:
        ConfigError: for a composite inner format.
    """
    stored = inner_of(name, KIND, inner)
    return None if stored is None else OrderedFormat(stored)
