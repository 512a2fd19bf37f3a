"""8-bit integers in groups of 16 columns, as in GGUF's Q6_K.

The kernels support groups of 32 and more. In such a group the first 16 columns have one scale and
the last 16 another. So the product is a sum of two: the inputs with zeros for the last 16 columns
times the first scales, and the other way round, both with the same integers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import ConfigError
from jaxllm.weights.leaves.digits import CHUNK
from jaxllm.weights.leaves.integers import QTensor
from jaxllm.weights.leaves.leaf import (
    Blocks,
    Leaf,
    Linear,
    Shape,
    check_finite,
    filled,
    joined,
    on_borders,
    on_device,
    or_nan,
    rows_of,
    up,
)

NAME = "int8-g16"
HALF, PAIR = 16, 32  # columns of one group and of two


class Fine(Leaf, struct.PyTreeNode):
    """`weight[o, i] = q[o, i] * scale[o, i // 16]`, computed in float32."""

    composed = True

    data: jax.Array  # q, int8 [..., O, I']; I' is I in whole chunks of 128, padded with zeros
    first: jax.Array  # float32 [..., O, I' / 32], the scales of even groups
    second: jax.Array  # likewise of odd groups
    columns: int = struct.field(pytree_node=False)  # I

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.columns)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.float32)

    @property
    def format(self) -> str:
        return NAME

    def dense(self, dtype: Any = None) -> jax.Array:
        scale = jnp.stack([self.first, self.second], axis=-1)[..., None]
        q = self.data.reshape(*self.first.shape, 2, HALF).astype(jnp.float32)
        numbers = (q * scale).reshape(self.data.shape)[..., : self.columns]
        return numbers.astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda x: x.at[index.reshape(-1)].get(mode="clip"), self)
        return or_nan(part.dense(), index, self.data.shape[0])

    def product(self, x_RI: jax.Array) -> jax.Array:
        return self.through(x_RI, lambda x, weight: weight.product(x))

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        is_first = (jnp.arange(self.columns) % PAIR < HALF)[None]
        zero = jnp.zeros((), x_RI.dtype)
        first, second = (
            linear(
                jnp.where(is_first == even, x_RI, zero),
                QTensor(self.data, scale, None, 8, PAIR, self.columns),
            )
            for even, scale in ((True, self.first), (False, self.second))
        )
        return first + second

    def with_rows(self, index: np.ndarray) -> "Fine":
        return rows_of(self, index)

    def with_columns(self, begin: int, end: int) -> "Fine":
        mine = on_borders(NAME, begin, end, self.columns, PAIR)
        part = self._side("first").with_columns(begin, end)
        second = filled(self.second[..., mine], part.scale.shape[-1])
        return Fine(part.data, part.scale, second, end - begin)

    def with_more(self, after: Sequence["Fine"], axis: int) -> "Fine":
        parts = [self, *after]
        if axis == 0:
            return joined(parts)
        sides = [[x._side(scale) for x in parts] for scale in ("first", "second")]
        first, second = (one.with_more(others, 1) for one, *others in sides)
        return Fine(first.data, first.scale, second.scale, first.columns)

    def _side(self, scale: str) -> QTensor:
        """Return all integers with the scales of the even or of the odd groups."""
        return QTensor(self.data, getattr(self, scale), None, 8, PAIR, self.columns)

    def pieces(self) -> dict[str, jax.Array]:
        return {".data": self.data, ".first": self.first, ".second": self.second}


class FineFormat:
    """The only format of `Fine`."""

    name = NAME
    exact_in = "float32"

    def make(self, array: jax.Array) -> NoReturn:
        raise ConfigError(
            f"{NAME} cannot be made by quantizing; it comes from GGUF files (Q6_K). Use int8-g32"
        )

    def collect(self, shape: tuple[int, ...], blocks: Blocks) -> NoReturn:
        self.make(jnp.empty(0))

    def expected(self, shape: tuple[int, ...]) -> dict[str, tuple[Shape, Any]]:
        *rows, columns = shape
        width = up(columns, CHUNK)
        scales = ((*rows, width // PAIR), np.float32)
        return {".data": ((*rows, width), np.int8), ".first": scales, ".second": scales}

    def of_pieces(self, shape: tuple[int, ...], pieces: Mapping[str, Any]) -> Fine:
        return Fine(pieces[".data"], pieces[".first"], pieces[".second"], shape[-1])

    def assemble(self, path: str, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]) -> Fine:
        check_finite(path, pieces, ".first", ".second")
        return self.of_pieces(shape, on_device(pieces))


def parse(name: str) -> FineFormat | None:
    """Parse `int8-g16`; None for other names."""
    return FineFormat() if name == NAME else None
