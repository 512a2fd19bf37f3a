"""Products with a weight leaf; the leaf's kind decides how, and only here is that decided.

Weights are `[out, in]`: a row is one dot product. Accumulation is float32. On a CPU a few rows go
through the kernels of `ops.native`, which read the weights as they are stored; everywhere else XLA
has the same product in plain JAX.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.ops import native
from jaxllm.weights.formats import Leaf
from jaxllm.weights.qtensor import HALF, Packed, QTensor, or_nan

ROUNDED = 512  # columns of x that share a scale where inputs are rounded

Leaves = tuple[Leaf, ...]
Products = tuple[jax.Array, ...]

_KINDS = {
    jnp.dtype(jnp.float32): native.Kind.FLOAT32,
    jnp.dtype(jnp.bfloat16): native.Kind.BFLOAT16,
    jnp.dtype(jnp.float16): native.Kind.FLOAT16,
}


def linear(
    x: jax.Array, weight_OI: Leaf, bias_O: jax.Array | None = None, *, int8_inputs: bool = False
) -> jax.Array:
    """`x @ weight.T + bias` over the last axis of x: `[..., I]` to `[..., O]`, float32.

    Where the formats of x and weight differ, both are widened to float32; only where there is no
    kernel, products of more than 16 rows of bfloat16 with quantized weights take the weights
    rounded to bfloat16. With kernels, the bits of a row do not depend on how many rows, up to 16,
    are multiplied with it.

    int8_inputs: round x to int8 in blocks of 512 columns where the weights are integers (dynamic
    quantization): less arithmetic, not exact.
    """
    return linears(x, [(weight_OI, bias_O)], int8_inputs=int8_inputs)[0]


def linears(
    x: jax.Array, terms: Sequence[tuple[Leaf, jax.Array | None]], *, int8_inputs: bool = False
) -> list[jax.Array]:
    """`linear` of one x with each weight and bias, which the kernels do in one call."""
    x_RI = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    weights = tuple(weight for weight, _ in terms)
    for weight in weights:
        if weight.shape[1] != x.shape[-1]:
            raise ValueError(f"a weight of shape {weight.shape} does not fit x of shape {x.shape}")
    rounded = [int8_inputs and isinstance(weight, QTensor) for weight in weights]
    if len(set(rounded)) > 1:
        return [linear(x, *term, int8_inputs=int8_inputs) for term in terms]
    multiply = _traced_once[_multiply_int8 if all(rounded) else _multiply]
    products = multiply(x_RI, weights)
    return [
        (y_RO if bias_O is None else y_RO + bias_O.astype(jnp.float32)[None]).reshape(
            *x.shape[:-1], y_RO.shape[-1]
        )
        for y_RO, (_, bias_O) in zip(products, terms, strict=True)
    ]


def embed(weight_VD: Leaf, token_BT: jax.Array) -> jax.Array:
    """Rows of an embedding table: `[B, T]` ids to `[B, T, D]`; NaN for an id outside the table.

    An id that only the device sees cannot be refused: NaN makes it show instead of another row.
    """
    if isinstance(weight_VD, QTensor | Packed):
        return weight_VD.take(token_BT)
    return _rows(weight_VD, token_BT)


@jax.custom_jvp
def _rows(weight_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
    """By the kernels on a CPU, for XLA widens a whole table of 16-bit floats that a loop reads."""
    if not native.enabled():
        return _plain_rows(weight_VD, token_BT)

    def kernel(weight_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
        taken = native.take(weight_VD, token_BT.reshape(-1).astype(jnp.int32))
        return or_nan(taken, token_BT, weight_VD.shape[0])

    rows: jax.Array = jax.lax.platform_dependent(
        weight_VD, token_BT, cpu=kernel, default=_plain_rows
    )
    return rows


@_rows.defjvp
def _(primals: Any, tangents: Any) -> Any:
    slope = tangents[0].at[primals[1]]
    return _rows(*primals), slope.get(mode="fill", wrap_negative_indices=False)


def _plain_rows(weight_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
    return weight_VD.at[token_BT].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


@jax.custom_jvp
def _multiply(x_RI: jax.Array, weights: Leaves) -> Products:
    return _on_each_platform(x_RI, weights, 3)


@_multiply.defjvp
def _(primals: Any, tangents: Any) -> Any:
    """The derivative is that of the plain product, whichever path computed the value."""
    return _multiply(*primals), jax.jvp(partial(_plain, 3), primals, tangents)[1]


@jax.custom_jvp
def _multiply_int8(x_RI: jax.Array, weights: Leaves) -> Products:
    return _on_each_platform(x_RI, weights, 1)


@_multiply_int8.defjvp
def _(primals: Any, tangents: Any) -> Any:
    """Rounding has no slope: the derivative passes through it (Bengio et al. 2013)."""
    return _multiply_int8(*primals), jax.jvp(partial(_plain, 3), primals, tangents)[1]


# A model has the same product in every layer: as a function of its own it is traced but once.
_traced_once = {function: jax.jit(function) for function in (_multiply, _multiply_int8)}


def _on_each_platform(x_RI: jax.Array, weights: Leaves, digits: int) -> Products:
    ways = [_way(x_RI, weight, digits) for weight in weights]
    if len(set(ways)) > 1:
        return tuple(_on_each_platform(x_RI, (weight,), digits)[0] for weight in weights)
    plain = partial(_plain, digits)
    if ways[0] is _plain:
        return plain(x_RI, weights)
    y: Products = jax.lax.platform_dependent(
        x_RI, weights, cpu=partial(ways[0], digits), default=plain
    )
    return y


def _way(x_RI: jax.Array, weight: Leaf, digits: int) -> Callable[..., Products]:
    """How a CPU multiplies these."""
    packed = isinstance(weight, QTensor | Packed)
    few = 0 < x_RI.shape[0] <= native.MAX_ROWS
    half = x_RI.dtype == jnp.bfloat16 and (packed or weight.dtype == jnp.bfloat16)
    every = x_RI.shape[0] > 0 and (half or digits == 1) and native.isa() in native.FAST_PRODUCTS
    if not native.enabled() or not (few or every or packed):
        return _plain
    return _kernel if few or every else _widened


def _kernel(digits: int, x_RI: jax.Array, weights: Leaves) -> Products:
    """Rows by the native kernel; batched over x alone, they are more rows of the same product."""

    @jax.custom_batching.custom_vmap
    def call(x_RI: jax.Array, weights: Leaves) -> Products:
        x_RI = x_RI if x_RI.dtype == jnp.bfloat16 else x_RI.astype(jnp.float32)
        matrices = [_matrix(weight) for weight in weights]
        columns = weights[0].shape[1]
        return tuple(native.linear(x_RI, matrices, columns=columns, digits=digits))

    @call.def_vmap
    def _(size: int, batched: Any, x: jax.Array, weights: Leaves) -> tuple[Products, Any]:
        if any(jax.tree.leaves(batched[1])):
            axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
            products = jax.vmap(partial(_plain, digits), in_axes=axes)(x, weights)
        else:
            rows = _on_each_platform(x.reshape(-1, x.shape[-1]), weights, digits)
            products = tuple(y.reshape(size, -1, y.shape[-1]) for y in rows)
        return products, (True,) * len(weights)

    y: Products = call(x_RI, weights)
    return y


def _widened(digits: int, x_RI: jax.Array, weights: Sequence[QTensor | Packed]) -> Products:
    """Many rows: the weights are expanded natively, for XLA's own product."""
    x_RI = round_to_int8(x_RI) if digits == 1 else x_RI
    dtype = jnp.dtype(x_RI.dtype if x_RI.dtype == jnp.bfloat16 else jnp.float32)
    products = []
    for weight in weights:
        matrix, scale_O = _matrix(weight), None
        if isinstance(weight, QTensor) and weight.group is None and dtype == jnp.bfloat16:
            # Integers are exact in bfloat16, and so are powers of two times them; without those, a
            # sum could overflow before it is scaled.
            scale_O, power = jnp.frexp(weight.scale[:, 0].astype(jnp.float32))
            matrix = matrix._replace(
                pieces=[weight.data, jnp.ldexp(jnp.float32(1), power)[:, None]]
            )
        y_RO = _product(x_RI, native.widen(matrix, dtype, columns=weight.shape[1]))
        products.append(y_RO if scale_O is None else y_RO * scale_O[None])
    return tuple(products)


def _matrix(weight: Leaf) -> native.Matrix:
    """A leaf as the kernels take it."""
    if isinstance(weight, QTensor):
        kind = native.Kind.INT8 if weight.bits == 8 else native.Kind.INT4
        return native.Matrix(kind, jax.tree.leaves(weight), weight.group)
    if isinstance(weight, Packed):
        return native.Matrix(native.Kind.PACKED, jax.tree.leaves(weight))
    return native.Matrix(_KINDS[jnp.dtype(weight.dtype)], [weight])


def _plain(digits: int, x_RI: jax.Array, weights: Leaves) -> Products:
    """The products in plain JAX: for every platform, and the meaning of all the others."""
    x_RI = round_to_int8(x_RI) if digits == 1 else x_RI
    return tuple(_plain_product(x_RI, weight) for weight in weights)


def _plain_product(x_RI: jax.Array, weight: Leaf) -> jax.Array:
    rows = x_RI.shape[0]
    if isinstance(weight, QTensor):
        if rows == 1:
            return _summed(x_RI, weight)
        many = x_RI.dtype == jnp.bfloat16 and rows > native.MAX_ROWS
        weight = weight.dense(jnp.bfloat16 if many else jnp.float32)
    elif isinstance(weight, Packed):
        weight = weight.dense()
    if rows == 1 and weight.dtype == jnp.bfloat16:
        y: jax.Array = jax.lax.platform_dependent(x_RI, weight, cpu=_row_sum, default=_product)
        return y
    return _product(x_RI, weight)


def _product(x_RI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    if x_RI.dtype != weight_OI.dtype:
        x_RI, weight_OI = x_RI.astype(jnp.float32), weight_OI.astype(jnp.float32)
    return jax.lax.dot_general(
        x_RI, weight_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _row_sum(x_1I: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """One row: XLA:CPU fuses widening with multiplying and adding, but not with a product."""
    return (weight_OI.astype(jnp.float32) * x_1I.astype(jnp.float32)).sum(axis=1)[None]


def _summed(x_1I: jax.Array, weight: QTensor) -> jax.Array:
    """One row times integers, as `_row_sum` does it: their bytes where they lie, scaled first."""
    data, size = weight.data, weight.data.shape[1] // weight.scale.shape[1]
    scale = jnp.repeat(weight.scale.astype(jnp.float32), size, axis=1)
    width = data.shape[1] * 8 // weight.bits
    x_1I = jnp.pad(x_1I.astype(jnp.float32), ((0, 0), (0, width - x_1I.shape[1])))
    if weight.bits == 8:
        return (data.astype(jnp.float32) * scale * x_1I).sum(axis=1)[None]
    low, high = (half.reshape(1, -1) for half in jnp.moveaxis(x_1I.reshape(-1, 2, HALF), 1, 0))
    zero = 8.0 if weight.zero is None else jnp.repeat(weight.zero.astype(jnp.float32), size, axis=1)
    product = ((data & 15).astype(jnp.float32) - zero) * scale * low
    product += ((data >> 4).astype(jnp.float32) - zero) * scale * high
    return product.sum(axis=1)[None]


def round_to_int8(x_RI: jax.Array) -> jax.Array:
    """x as int8 with a scale for each 512 columns stands for it: float32 of the same shape.

    The kernels round to the same integers, bit for bit: by the same operations in the same order.
    """
    rows, columns = x_RI.shape
    width = -(-columns // ROUNDED) * ROUNDED
    x_RCG = jnp.pad(x_RI.astype(jnp.float32), ((0, 0), (0, width - columns)))
    x_RCG = x_RCG.reshape(rows, -1, ROUNDED)
    step = jnp.abs(x_RCG).max(axis=-1, keepdims=True) * (1 / 127)
    x_RCG = jnp.round(x_RCG / jnp.where(step == 0, 1.0, step)) * step
    return x_RCG.reshape(rows, width)[:, :columns]
