"""Low-rank weights: two thin matrices instead of one, never multiplied out."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.types.arrays import as_weight
from jaxllm.weights.types.base import ArraySpecs, Format, LinearFn, ReadBlocks, WeightBase

NAMES = ("rank64/int8",)
_SIDES = ("left", "right")


class LowRankWeight(WeightBase, struct.PyTreeNode):
    """`weight = left @ right`, with left `[..., O, K]` and right `[..., K, I]`, of rank K.

    Each factor is an array or any simple weight. They are smaller than the matrix if `K < O I / (O
    + I)`. The activations between the two products stay float32: rounding them would add an error
    as large as that of rounded inputs. With bfloat16 weights this is also faster for one row, and
    slower for many, which multiply in float32 without a matrix unit.
    """

    is_composite = True
    trainable_fields = ("left", "right")

    left: Any
    right: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.left.shape[:-1], self.right.shape[-1])

    @property
    def rank(self) -> int:
        return int(self.right.shape[-2])

    @property
    def format(self) -> str:
        """Raises ConfigError if the factors have different formats, which have no name."""
        left, right = (as_weight(side).format for side in (self.left, self.right))
        if left != right:
            raise ConfigError(f"low-rank factors must have one format: got {left} and {right}")
        return f"rank{self.rank}/{left}"

    def to_dense(self, dtype: Any = None) -> jax.Array:
        """Return the product of the factors, computed in float32."""
        return _matmul_f32(self.left, self.right).astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        return _matmul_f32(as_weight(self.left).take(index), self.right)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        return linear(linear(x_RI, self.right), self.left)

    def with_rows(self, index: np.ndarray) -> "LowRankWeight":
        return self.replace(left=as_weight(self.left).with_rows(index))

    def with_columns(self, begin: int, end: int) -> "LowRankWeight":
        return self.replace(right=as_weight(self.right).with_columns(begin, end))

    def concatenate(self, appended: Sequence["LowRankWeight"], axis: int) -> "LowRankWeight":
        name = "right" if axis else "left"
        first, *others = (as_weight(getattr(x, name)) for x in (self, *appended))
        return self.replace(**{name: first.concatenate(others, axis)})


@dataclasses.dataclass(frozen=True)
class LowRankFormat(Format):
    """Two factors of a singular value decomposition, in the format `inner`.

    Integer formats store rows in whole chunks of 128 columns; in the left factor these are ranks,
    so multiples of 128 are best.
    """

    sliceable_axes = ()

    rank: int
    inner: Format

    @property
    def name(self) -> str:
        return f"rank{self.rank}/{self.inner.name}"

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> LowRankWeight:
        """Return the nearest matrix of this rank, as `U sqrt(S)` and `sqrt(S) V^T`.

        Eckart and Young 1936, in float64. If a number is not finite, all factors are NaN. Memory
        besides the result: the matrix and its decomposition in float64.

        Raises:
            ConfigError: for a rank that exceeds the matrix's sides.
        """
        if complaint := self._rank_problem(shape):
            raise ConfigError(f"{self.name}: {complaint}")
        rows = [np.asarray(block).astype(np.float64) for block in blocks()]
        w_OI = np.concatenate(rows).reshape(shape)
        if not np.isfinite(w_OI).all():
            left, right = self._side_shapes(shape)
            return self.from_factors(np.full(left, np.nan), np.full(right, np.nan))
        u, sigma, v = np.linalg.svd(w_OI, full_matrices=False)
        root, first = np.sqrt(sigma[..., : self.rank]), slice(self.rank)
        return self.from_factors(
            u[..., first] * root[..., None, :], root[..., None] * v[..., first, :]
        )

    def from_factors(self, left_OK: np.ndarray, right_KI: np.ndarray) -> LowRankWeight:
        """Return the weight with these factors, converted to the inner format."""
        exact = [
            jnp.asarray(x, jnp.float32).astype(self.inner.lossless_dtype)
            for x in (left_OK, right_KI)
        ]
        return LowRankWeight(*map(self.inner.quantize, exact))

    def array_specs(self, shape: tuple[int, ...]) -> ArraySpecs:
        return {
            f".{side}{name}": spec
            for side, side_shape in zip(_SIDES, self._side_shapes(shape), strict=True)
            for name, spec in self.inner.array_specs(side_shape).items()
        }

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> LowRankWeight:
        sides = self._side_arrays(shape, arrays)
        return LowRankWeight(
            **{side: self.inner.from_arrays(*arguments) for side, *arguments in sides}
        )

    def check_arrays(
        self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]
    ) -> None:
        if complaint := self._rank_problem(shape):
            raise CheckpointError(f"{path}: {complaint}")
        for side, *arguments in self._side_arrays(shape, arrays):
            self.inner.check_arrays(f"{path}.{side}", *arguments)

    def _side_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the name, the shape and the arrays of each factor."""
        for side, side_shape in zip(_SIDES, self._side_shapes(shape), strict=True):
            prefix = f".{side}"
            yield (
                side,
                side_shape,
                {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)},
            )

    def _side_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        *stack, rows, columns = shape
        return (*stack, rows, self.rank), (*stack, self.rank, columns)

    def _rank_problem(self, shape: tuple[int, ...]) -> str | None:
        most = min(shape[-2:])
        if self.rank <= most:
            return None
        return f"rank {self.rank} exceeds {most}, the shorter side of matrix {shape}"


def parse(name: str, inner: Callable[[str], Format]) -> LowRankFormat | None:
    """Parse `rank64/int8` and the like: rank and format of both factors; None for other names.

    Raises:
        ConfigError: for rank 0, and for composite factors.
    """
    match = re.fullmatch(r"rank(0|[1-9]\d{0,6})/(.+)", name)
    if not match:
        return None
    rank, factors = int(match[1]), match[2]
    if not rank:
        raise ConfigError(f"{name:.40}: rank must be at least 1, got 0")
    if "/" in factors:
        raise ConfigError(f"{name:.40}: format of the factors must be simple, got a composite")
    return LowRankFormat(rank, inner(factors))


def _matmul_f32(left: Any, right: Any) -> jax.Array:
    """Return `left @ right` of arrays or weights, stacks too, in float32."""
    wide = [as_weight(weight).to_dense(jnp.float32) for weight in (left, right)]
    return jnp.matmul(*wide, precision=jax.lax.Precision.HIGHEST)
