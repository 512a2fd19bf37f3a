"""A weight whose columns are stored in another order, so that columns of a group lie together.

GPTQ's act-order ("desc_act") rounds columns by falling importance, and groups them so.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.leaves.arrays import as_leaf
from jaxllm.weights.leaves.leaf import Blocks, Format, Leaf, Linear, Shape

KIND = "ordered/"


class Ordered(Leaf, struct.PyTreeNode):
    """A matrix `[O, I]` of which column j of `weight` is column `order[j]`.

    weight: `[O, I]`, an array or a leaf. order: int32 `[I]`, each of 0 to I - 1 once.
    """

    composed = True

    weight: Any
    order: jax.Array

    @property
    def stored(self) -> Leaf:
        """The weight as a leaf."""
        return as_leaf(self.weight)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def format(self) -> str:
        return f"{KIND}{self.stored.format}"

    def dense(self, dtype: Any = None) -> jax.Array:
        return self._unordered(self.stored.dense(dtype))

    def take(self, index: jax.Array) -> jax.Array:
        return self._unordered(self.stored.take(index))

    def product(self, x_RI: jax.Array) -> jax.Array:
        return self.stored.product(self._ordered(x_RI))

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        return linear(self._ordered(x_RI), self.weight)

    def pieces(self) -> dict[str, jax.Array]:
        return {
            ".order": self.order,
            **{f".weight{name}": piece for name, piece in self.stored.pieces().items()},
        }

    def _ordered(self, x: jax.Array) -> jax.Array:
        return jnp.take(x, self.order, axis=-1, mode="clip")

    def _unordered(self, x: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.argsort(self.order), axis=-1, mode="clip")


@dataclasses.dataclass(frozen=True)
class OrderedFormat:
    """The format of `Ordered`; inner: that of what it orders."""

    inner: Format

    @property
    def name(self) -> str:
        return f"{KIND}{self.inner.name}"

    @property
    def exact_in(self) -> str:
        return self.inner.exact_in

    def make(self, array: jax.Array) -> NoReturn:
        raise ConfigError(
            f"{self.name}: numbers alone have no order; GPTQ finds one (act-order), or a"
            " checkpoint brings it (desc_act)"
        )

    def collect(self, shape: tuple[int, ...], blocks: Blocks) -> NoReturn:
        self.make(jnp.empty(0))

    def expected(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        inner = {f".weight{name}": piece for name, piece in self.inner.expected(shape).items()}
        return {".order": (shape[-1:], np.int32), **inner}

    def assemble(
        self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]
    ) -> Ordered:
        order = pieces[".order"]
        if not np.array_equal(np.sort(order), np.arange(shape[-1])):
            raise CheckpointError(f"{path}.order is no order of {shape[-1]} columns")
        inner = {name: pieces[f".weight{name}"] for name in self.inner.expected(shape)}
        weight = self.inner.assemble(f"{path}.weight", shape, inner)
        return Ordered(weight, jax.device_put(order, may_alias=True))


def parse(name: str, inner: Callable[[str], Format]) -> OrderedFormat | None:
    """`ordered/int4-g128`, and so with any format that is not composed; None for other names.

    Raises ConfigError for what is composed itself.
    """
    if not name.startswith(KIND):
        return None
    stored = name.removeprefix(KIND)
    if "/" in stored:
        raise ConfigError(f"{name:.40}: what is ordered is an array, or packed, or integers")
    return OrderedFormat(inner(stored))
