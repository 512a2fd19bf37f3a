"""Weights with permuted columns, so that the columns of a group are adjacent.

GPTQ's act-order ("desc_act") quantizes columns by falling importance, and groups them in that
order.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.types.base import ArraySpecs, Format, LinearFn, ReadBlocks
from jaxllm.weights.types.wrapper import WeightWrapper

PREFIX = "ordered/"


class PermutedWeight(WeightWrapper, struct.PyTreeNode):
    """A matrix `[O, I]`: column j of `weight` is its column `order[j]`."""

    format_prefix = PREFIX

    weight: Any  # [O, I], an array or a weight that is not composite
    order: jax.Array  # int32 [I], a permutation

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return self._unpermute(self.inner.to_dense(dtype))

    def take(self, index: jax.Array) -> jax.Array:
        return self._unpermute(self.inner.take(index))

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        return linear(jnp.take(x_RI, self.order, axis=-1, mode="clip"), self.weight)

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

    def _unpermute(self, x: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.argsort(self.order), axis=-1, mode="clip")


@dataclasses.dataclass(frozen=True)
class PermutedFormat(Format):
    """The format of `PermutedWeight`."""

    inner: Format  # of the weight with permuted columns

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.inner.name}"

    @property
    def lossless_dtype(self) -> str:
        return self.inner.lossless_dtype

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> NoReturn:
        raise ConfigError(
            f"{self.name} cannot be made without an order; it comes from GPTQ (act-order) or from a"
            " checkpoint (desc_act)"
        )

    def array_specs(self, shape: tuple[int, ...]) -> ArraySpecs:
        inner = {f".weight{name}": spec for name, spec in self.inner.array_specs(shape).items()}
        return {**inner, ".order": (shape[-1:], np.int32)}

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> PermutedWeight:
        inner = self.inner.from_arrays(shape, _inner_arrays(arrays))
        return PermutedWeight(inner, arrays[".order"])

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        self.inner.check_arrays(f"{path}.weight", shape, _inner_arrays(arrays))
        if not np.array_equal(np.sort(arrays[".order"]), np.arange(shape[-1])):
            raise CheckpointError(f"{path}.order is not a permutation of {shape[-1]} columns")


def _inner_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of the weight with permuted columns, under its own names."""
    return {n.removeprefix(".weight"): x for n, x in arrays.items() if n != ".order"}


def parse(name: str, parse_inner: Callable[[str], Format]) -> PermutedFormat | None:
    """Parse `ordered/int4-g128`, with any format that is not composite; None for other names.

    Raises:
        ConfigError: for a composite inner format.
    """
    if not name.startswith(PREFIX):
        return None
    if name.count("/") > 1:
        raise ConfigError(f"{name:.40}: format after {PREFIX} must be simple, got a composite")
    return PermutedFormat(parse_inner(name.removeprefix(PREFIX)))
