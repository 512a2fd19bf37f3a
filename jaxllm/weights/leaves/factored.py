"""Weights of low rank: two thin matrices in place of one, never multiplied out."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.leaves.arrays import as_leaf
from jaxllm.weights.leaves.leaf import Blocks, Format, Leaf, Linear, Shape


class Factored(Leaf, struct.PyTreeNode):
    """`weight = left @ right`, with left `[..., O, K]` and right `[..., K, I]`, of rank K.

    Each is an array or any leaf of another kind. It is smaller than the matrix where
    `K < O I / (O + I)`. What lies between the two products keeps float32, as they return it:
    rounding it would add an error as large as that of rounded inputs. With bfloat16 weights that
    is also faster for one row, and slower for many, which multiply float32 without a matrix unit.
    """

    composed = True
    trained = ("left", "right")

    left: Any
    right: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.left.shape[:-1], self.right.shape[-1])

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.float32)

    @property
    def rank(self) -> int:
        return int(self.right.shape[-2])

    @property
    def format(self) -> str:
        """Raises ConfigError where the factors have two formats, for which there is no name."""
        left, right = (as_leaf(side).format for side in (self.left, self.right))
        if left != right:
            raise ConfigError(f"factors of low rank have one format: left {left}, right {right}")
        return f"rank{self.rank}/{left}"

    def dense(self, dtype: Any = None) -> jax.Array:
        """The product of the two, computed in float32."""
        return _product(self.left, self.right).astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        return _product(as_leaf(self.left).take(index), self.right)

    def product(self, x_RI: jax.Array) -> jax.Array:
        return as_leaf(self.left).product(as_leaf(self.right).product(x_RI))

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        return linear(linear(x_RI, self.right), self.left)

    def with_rows(self, index: np.ndarray) -> "Factored":
        return self.replace(left=as_leaf(self.left).with_rows(index))

    def with_columns(self, begin: int, end: int) -> "Factored":
        return self.replace(right=as_leaf(self.right).with_columns(begin, end))

    def with_more(self, after: Sequence["Factored"], axis: int) -> "Factored":
        name = "right" if axis else "left"
        first, *others = (as_leaf(getattr(x, name)) for x in (self, *after))
        return self.replace(**{name: first.with_more(others, axis)})

    def pieces(self) -> dict[str, jax.Array]:
        sides = {".left": as_leaf(self.left), ".right": as_leaf(self.right)}
        return {f"{s}{name}": x for s, leaf in sides.items() for name, x in leaf.pieces().items()}


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Two factors in the format `inner`, of a matrix's singular value decomposition.

    Formats of integers keep rows in whole chunks of 128 columns: of the left factor these are
    ranks, which are best multiples of 128 there.
    """

    rank: int
    inner: Format

    @property
    def name(self) -> str:
        return f"rank{self.rank}/{self.inner.name}"

    @property
    def exact_in(self) -> str:
        return "float32"

    def make(self, array: jax.Array) -> Factored:
        """The nearest matrix of this rank (Eckart and Young 1936): `U sqrt(S)`, `sqrt(S) V^T`.

        Decomposed in float64. Where a number is not finite, all factors are NaN. Raises ConfigError
        for a rank beyond the matrix's sides.
        """
        return self._nearest(np.asarray(array).astype(np.float64))

    def collect(self, shape: tuple[int, ...], blocks: Blocks) -> Factored:
        """Memory beside the leaf: the matrix and its decomposition in float64."""
        rows = [np.asarray(block).astype(np.float64) for block in blocks()]
        return self._nearest(np.concatenate(rows).reshape(shape))

    def of(self, left_OK: np.ndarray, right_KI: np.ndarray) -> Factored:
        """A leaf of given factors, rounded to the inner format."""
        exact = [
            jnp.asarray(x, jnp.float32).astype(self.inner.exact_in) for x in (left_OK, right_KI)
        ]
        return Factored(*map(self.inner.make, exact))

    def _nearest(self, w_OI: np.ndarray) -> Factored:
        if complaint := self._complaint(w_OI.shape):
            raise ConfigError(f"{self.name}: {complaint}")
        if not np.isfinite(w_OI).all():
            left, right = self._sides(w_OI.shape)
            return self.of(np.full(left, np.nan), np.full(right, np.nan))
        u, sigma, v = np.linalg.svd(w_OI, full_matrices=False)
        root, kept = np.sqrt(sigma[..., : self.rank]), slice(self.rank)
        return self.of(u[..., kept] * root[..., None, :], root[..., None] * v[..., kept, :])

    def expected(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        left, right = self._sides(shape)
        return {
            **{f".left{name}": piece for name, piece in self.inner.expected(left).items()},
            **{f".right{name}": piece for name, piece in self.inner.expected(right).items()},
        }

    def of_pieces(self, shape: tuple[int, ...], pieces: Mapping[str, Any]) -> Factored:
        each = self._each(shape, pieces)
        return Factored(**{side: self.inner.of_pieces(form, mine) for side, form, mine in each})

    def assemble(
        self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]
    ) -> Factored:
        if complaint := self._complaint(shape):
            raise CheckpointError(f"{path}: {complaint}")
        return Factored(
            **{
                side: self.inner.assemble(f"{path}.{side}", form, mine)
                for side, form, mine in self._each(shape, pieces)
            }
        )

    def _each(self, shape: tuple[int, ...], pieces: Mapping[str, Any]) -> Iterator[Any]:
        """Of each factor its name, its shape and its pieces."""
        for side, form in zip(("left", "right"), self._sides(shape), strict=True):
            mine = {
                name.removeprefix(f".{side}"): piece
                for name, piece in pieces.items()
                if name.startswith(f".{side}")
            }
            yield side, form, mine

    def _sides(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        *stack, rows, columns = shape
        return (*stack, rows, self.rank), (*stack, self.rank, columns)

    def _complaint(self, shape: tuple[int, ...]) -> str | None:
        most = min(shape[-2:])
        if self.rank <= most:
            return None
        return f"rank {self.rank} is beyond {most}, the shorter side of a matrix {shape}"


def parse(name: str, inner: Callable[[str], Format]) -> LowRank | None:
    """`rank64/int8` and the like: the rank and the format of both factors; None for other names.

    Raises ConfigError for rank 0, and for factors that are composed themselves.
    """
    found = re.fullmatch(r"rank(0|[1-9]\d{0,6})/(.+)", name)
    if not found:
        return None
    rank, factors = int(found[1]), found[2]
    if not rank:
        raise ConfigError(f"{name:.40}: a rank is at least 1")
    if "/" in factors:
        raise ConfigError(f"{name:.40}: factors are arrays, or packed, or integers")
    return LowRank(rank, inner(factors))


def _product(left: Any, right: Any) -> jax.Array:
    """`left @ right` of arrays or leaves, stacks too, in float32."""
    wide = [as_leaf(weight).dense(jnp.float32) for weight in (left, right)]
    return jnp.matmul(*wide, precision=jax.lax.Precision.HIGHEST)
