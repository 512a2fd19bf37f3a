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
from jaxllm.weights.types.base import (
    LinearFn,
    PartialShape,
    ReadBlocks,
    WeightBase,
    check_finite,
    concat_matrices,
    group_slice,
    nan_out_of_range,
    pad_groups,
    round_up,
    take_rows,
    to_device,
)
from jaxllm.weights.types.bitpack import CHUNK
from jaxllm.weights.types.int_quant import QTensor

NAME = "int8-g16"
HALF, PAIR = 16, 32  # columns of one group and of two


class Q6K(WeightBase, struct.PyTreeNode):
    """`weight[o, i] = q[o, i] * scale[o, i // 16]`, computed in float32."""

    is_composite = True

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

    def to_dense(self, dtype: Any = None) -> jax.Array:
        scale = jnp.stack([self.first, self.second], axis=-1)[..., None]
        q = self.data.reshape(*self.first.shape, 2, HALF).astype(jnp.float32)
        numbers = (q * scale).reshape(self.data.shape)[..., : self.columns]
        return numbers.astype(dtype or jnp.float32)

    def take(self, index: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda x: jnp.asarray(x).at[index.reshape(-1)].get(mode="clip"), self)
        return nan_out_of_range(part.to_dense(), index, self.data.shape[0])

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        return self.apply_with(x_RI, lambda x, weight: weight.matmul(x))

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
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

    def with_rows(self, index: np.ndarray) -> "Q6K":
        return take_rows(self, index)

    def with_columns(self, begin: int, end: int) -> "Q6K":
        mine = group_slice(NAME, begin, end, self.columns, PAIR)
        part = self._with_scale("first").with_columns(begin, end)
        second = pad_groups(self.second[..., mine], part.scale.shape[-1])
        return Q6K(part.data, part.scale, second, end - begin)

    def concatenate(self, appended: Sequence["Q6K"], axis: int) -> "Q6K":
        parts = [self, *appended]
        if axis == 0:
            return concat_matrices(parts)
        sides = [[x._with_scale(scale) for x in parts] for scale in ("first", "second")]
        first, second = (one.concatenate(others, 1) for one, *others in sides)
        return Q6K(first.data, first.scale, second.scale, first.columns)

    def _with_scale(self, scale: str) -> QTensor:
        """Return all integers with the scales of the even or of the odd groups."""
        return QTensor(self.data, getattr(self, scale), None, 8, PAIR, self.columns)

    def arrays(self) -> dict[str, jax.Array]:
        return {".data": self.data, ".first": self.first, ".second": self.second}


class Q6KFormat:
    """The only format of `Q6K`."""

    name = NAME
    lossless_dtype = "float32"

    def quantize(self, array: jax.Array) -> NoReturn:
        raise ConfigError(
            f"{NAME} cannot be made by quantizing; it comes from GGUF files (Q6_K). Use int8-g32"
        )

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> NoReturn:
        self.quantize(jnp.empty(0))

    def array_specs(self, shape: tuple[int, ...]) -> dict[str, tuple[PartialShape, Any]]:
        *rows, columns = shape
        width = round_up(columns, CHUNK)
        scales = ((*rows, width // PAIR), np.float32)
        return {".data": ((*rows, width), np.int8), ".first": scales, ".second": scales}

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> Q6K:
        return Q6K(arrays[".data"], arrays[".first"], arrays[".second"], shape[-1])

    def from_file(self, path: str, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> Q6K:
        check_finite(path, arrays, ".first", ".second")
        return self.from_arrays(shape, to_device(arrays))


def parse(name: str) -> Q6KFormat | None:
    """Parse `int8-g16`; None for other names."""
    return Q6KFormat() if name == NAME else None
