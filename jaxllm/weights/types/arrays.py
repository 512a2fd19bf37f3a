"""Plain arrays as weights: float32, bfloat16, float16."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.ops import cuda, native
from jaxllm.ops.cuda.launch import Rows
from jaxllm.ops.products import match_dtypes, precision_of
from jaxllm.ops.target import is_accelerator
from jaxllm.weights.types.base import (
    ArraySpecs,
    Format,
    LocalExperts,
    ReadBlocks,
    WeightBase,
    fill_arrays,
    nan_out_of_range,
    to_device,
)

V = TypeVar("V")
MIN_CONTRACT = 32  # rows and columns from which a kernel multiplies matrices
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

_KINDS = {
    jnp.dtype(jnp.float32): native.Kind.FLOAT32,
    jnp.dtype(jnp.bfloat16): native.Kind.BFLOAT16,
    jnp.dtype(jnp.float16): native.Kind.FLOAT16,
}


class DenseWeight(WeightBase, struct.PyTreeNode):
    """An array as a weight object: never stored as a parameter, only made by `as_weight`."""

    array: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def format(self) -> str:
        return str(jnp.dtype(self.dtype))

    def to_dense(self, dtype: Any = None) -> jax.Array:
        return self.array if dtype is None else self.array.astype(dtype)

    def take(self, index: jax.Array) -> jax.Array:
        return _take_rows(self.array, index)

    def matmul(self, x_RI: jax.Array) -> jax.Array:
        if x_RI.shape[0] == 1 and self.dtype == jnp.bfloat16:
            y: jax.Array = jax.lax.platform_dependent(
                x_RI, self.array, cpu=_multiply_row, default=matmul
            )
            return y
        same = x_RI.dtype == self.dtype  # or one layer's weights are widened at a time
        return matmul(x_RI, self.array if same else add_dependency(x_RI, self.array))

    def local_experts(self) -> LocalExperts:
        return LocalExperts(self.array)

    def native_matrix(self) -> native.Matrix:
        return native.Matrix(_KINDS[jnp.dtype(self.dtype)], [self.array])

    def cuda_matrix(self) -> cuda.Matrix | None:
        return cuda.Matrix(Rows(16), {"weight": self.array}) if self.dtype == jnp.bfloat16 else None

    def arrays(self) -> dict[str, jax.Array]:
        return {"": self.array}

    def with_rows(self, index: np.ndarray) -> jax.Array:
        return self.array[index] if self.ndim == 1 else self.array[..., index, :]

    def with_columns(self, begin: int, end: int) -> jax.Array:
        return self.array[..., begin:end]

    def concatenate(self, appended: Sequence["DenseWeight"], axis: int) -> jax.Array:
        arrays = [self.array, *(x.array for x in appended)]
        return jnp.concatenate(arrays, axis=0 if self.ndim == 1 else axis - 2)


def as_weight(weight: jax.Array | WeightBase) -> WeightBase:
    """Return any weight as a `WeightBase`, arrays too."""
    return weight if isinstance(weight, WeightBase) else DenseWeight(weight)


@dataclasses.dataclass(frozen=True)
class FloatFormat(Format):
    """A floating-point format."""

    sliceable_axes = (0, 1)

    dtype: str

    @property
    def name(self) -> str:
        return self.dtype

    @property
    def lossless_dtype(self) -> str:
        return self.dtype

    def quantize(self, array: jax.Array) -> jax.Array:
        return array.astype(DTYPES[self.dtype])

    def quantize_blocks(self, shape: tuple[int, ...], blocks: ReadBlocks) -> jax.Array:
        def convert(block: np.ndarray) -> list[Any]:
            unchanged = self.name in ("float32", block.dtype.name)  # numpy widens in the copy
            return [block if unchanged else self.quantize(jax.device_put(block, may_alias=True))]

        return to_device(fill_arrays({"": (shape, DTYPES[self.dtype])}, blocks(), convert))[""]

    def array_specs(self, shape: tuple[int, ...]) -> ArraySpecs:
        return {"": (shape, DTYPES[self.dtype])}

    def from_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> Any:
        return arrays[""]


def parse(name: str) -> FloatFormat | None:
    """Parse `float32`, `bfloat16` or `float16`; None for other names."""
    return FloatFormat(name) if name in DTYPES else None


def matmul(x_RI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """Return `x @ weight.T`, float32 `[R, O]`; different dtypes are widened to float32."""
    x_RI, weight_OI = match_dtypes(x_RI, weight_OI)
    return jax.lax.dot_general(
        x_RI,
        weight_OI,
        (((1,), (1,)), ((), ())),
        precision_of(x_RI.dtype),
        preferred_element_type=jnp.float32,
    )


def contract(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Return the product of two matrices of one dtype over an axis of each: `[M, N]`, that dtype.

    Sums are float32. A CPU with a matrix unit runs a kernel where it measured faster than XLA: for
    bfloat16, and for float32 if the rows of `b` are contracted (docs/benchmarks/training.md).
    """

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        axes = (((a_axis,), (b_axis,)), ((), ()))
        y: jax.Array = jax.lax.dot_general(
            a, b, axes, precision_of(a.dtype), preferred_element_type=jnp.float32
        )
        return y.astype(a.dtype)

    def kernel(a: jax.Array, b: jax.Array) -> jax.Array:
        return native.multiply(a, b, a_axis, b_axis)

    faster = a.dtype == jnp.bfloat16 or (a_axis, b_axis) == (1, 0)
    has_matrix_unit = native.is_enabled() and native.has_matrix_unit()
    if not (faster and has_matrix_unit) or min(a.shape) < MIN_CONTRACT:
        return plain(a, b)
    y: jax.Array = jax.lax.platform_dependent(a, b, cpu=kernel, default=plain)
    return y


def _multiply_row(x_1I: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """Multiply one row: XLA:CPU fuses widening with a sum, but not with a dot product."""
    return (weight_OI.astype(jnp.float32) * x_1I.astype(jnp.float32)).sum(axis=1)[None]


@jax.custom_jvp
def _take_rows(weight_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
    """Take rows natively on a CPU: in a loop, XLA would widen a whole table of 16-bit floats."""
    if not native.is_enabled():
        return _take_rows_jax(weight_VD, token_BT)

    def kernel(weight_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
        rows = native.take(weight_VD, token_BT.reshape(-1).astype(jnp.int32))
        return nan_out_of_range(rows, token_BT, weight_VD.shape[0])

    rows: jax.Array = jax.lax.platform_dependent(
        weight_VD, token_BT, cpu=kernel, default=_take_rows_jax
    )
    return rows


@_take_rows.defjvp
def _(primals: Any, tangents: Any) -> Any:
    slope = tangents[0].at[primals[1]]
    return _take_rows(*primals), slope.get(mode="fill", wrap_negative_indices=False)


def _take_rows_jax(weight_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
    return weight_VD.at[token_BT].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def add_dependency(x: jax.Array, weight: V, *, kernel: bool = False) -> V:
    """Make a weight depend on `x`, of two axes, so that nothing is computed from it before `x`.

    XLA's CPU compiler drops optimization barriers before it schedules. A zero that it cannot prove
    to be zero stays, and is added instead. As an integer it is zero for any `x`, also NaN. Other
    compilers fuse what is computed from a weight into its product, unless it depends on `x`.

    Args:
        kernel: whether a kernel takes all of the weight, so that the smallest of its arrays, which
            is copied, is enough.
    """
    if is_accelerator():
        return weight
    zero = (x[:1, :1].astype(jnp.float32).sum() * 0).astype(jnp.int32)
    pieces, structure = jax.tree.flatten(weight)
    sizes = [piece.size or math.inf for piece in pieces]
    some = [sizes.index(min(sizes))] if kernel else range(len(pieces))
    for i in some:
        pieces[i] = pieces[i] + zero.astype(pieces[i].dtype)
    later: V = jax.tree.unflatten(structure, pieces)
    return later
