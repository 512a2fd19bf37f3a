"""Products with weights of any type: by native kernels or in plain JAX.

Weights are `[out, in]`: a row is one dot product. Accumulation is float32. On a CPU, the kernels of
`ops.native` run the numbers of rows for which they measured faster, and read the weights in their
stored form; in all other cases XLA runs the same product in plain JAX.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.ops import cuda, native
from jaxllm.ops.target import is_accelerator
from jaxllm.ops.varying_axes import match_varying
from jaxllm.weights.formats import Weight, as_weight
from jaxllm.weights.types.arrays import add_dependency, matmul
from jaxllm.weights.types.base import BLOCK_ROWS, WeightBase, round_up
from jaxllm.weights.types.int_weight import IntWeight

BLOCKED_SIZE = 1 << 23  # numbers of a weight from which XLA multiplies blocks of it

Weights = tuple[Weight, ...]
Products = tuple[jax.Array, ...]


def linear(
    x: jax.Array, weight_OI: Weight, bias_O: jax.Array | None = None, *, int8_inputs: bool = False
) -> jax.Array:
    """Return `x @ weight.T + bias` over the last axis of x: `[..., I]` to `[..., O]`, float32.

    If the dtypes of x and weight differ, both are widened to float32. The exceptions: without a
    kernel, more than 16 rows of bfloat16 multiply quantized weights that are rounded to bfloat16;
    on a GPU or TPU more than one row does, and codes with a scale per row, which are exact.
    With kernels, a row's bits do not depend on how many rows are multiplied with it, up to the
    kernel's limit (`native.path`); nor beyond it, if a matrix unit takes over.

    Args:
        int8_inputs: round x to int8 if the weights are integers (dynamic quantization): less
            arithmetic, not exact. A block of columns has one scale (`WeightBase.input_block`).
    """
    return linears(x, [(weight_OI, bias_O)], int8_inputs=int8_inputs)[0]


def linears(
    x: jax.Array, terms: Sequence[tuple[Weight, jax.Array | None]], *, int8_inputs: bool = False
) -> list[jax.Array]:
    """Apply `linear` with each weight and bias to one x; the kernels do it in one call."""
    x_RI = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    weights = [as_weight(weight) for weight, _ in terms]
    for weight in weights:
        if weight.shape[1] != x.shape[-1]:
            raise ValueError(f"weight shape {weight.shape} does not match x of shape {x.shape}")
    rounded = [int8_inputs and w.supports_int8_inputs and x.dtype != jnp.int8 for w in weights]
    any_composite = any(weight.is_composite for weight in weights)
    if len(terms) > 1 and (any_composite or len(set(rounded)) > 1):
        return [linear(x, *term, int8_inputs=int8_inputs) for term in terms]
    if any_composite:
        multiply = partial(linear, int8_inputs=int8_inputs)
        products: Products = (weights[0].apply_with(x_RI, multiply),)
    else:
        products = _PRODUCTS[1 if all(rounded) else 3](x_RI, tuple(weight for weight, _ in terms))
    results = []
    for y_RO, (_, bias_O) in zip(products, terms, strict=True):
        y_RO = y_RO if bias_O is None else y_RO + bias_O.astype(jnp.float32)[None]
        # After a reduce-scatter each device has only some rows
        # (`sharding.tensor_parallel.RowParallel`).
        shape = x.shape[:-1] if len(y_RO) == len(x_RI) else (*x.shape[:-2], -1)
        results.append(y_RO.reshape(*shape, y_RO.shape[-1]))
    return results


def embed(weight_VD: Weight, token_BT: jax.Array) -> jax.Array:
    """Return rows of an embedding table: `[B, T]` ids to `[B, T, D]`; NaN for an invalid id."""
    return as_weight(weight_VD).take(token_BT)


def _make_product(digits: int) -> Callable[..., Products]:
    """Return the product, whose derivative is that of the plain one, whichever path runs.

    Rounded inputs have no gradient; the derivative passes straight through (Bengio et al. 2013).
    """

    @jax.custom_jvp
    def multiply(x_RI: jax.Array, weights: Weights) -> Products:
        paths = [_choose_path(x_RI, weight, digits) for weight in weights]
        if len(set(paths)) > 1:
            products: dict[int, jax.Array] = {}
            for path in dict.fromkeys(paths):  # weights of one path in one call
                indices = [i for i, other in enumerate(paths) if other is path]
                some = multiply(x_RI, tuple(weights[i] for i in indices))
                products.update(zip(indices, some, strict=True))
            return tuple(products[i] for i in range(len(weights)))
        if paths[0] is _PLAIN[digits]:
            return paths[0](x_RI, weights)
        platform = {cuda.PLATFORM if paths[0] is _multiply_on_gpu else "cpu": paths[0]}
        y: Products = jax.lax.platform_dependent(x_RI, weights, **platform, default=_PLAIN[digits])
        return y

    @multiply.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return multiply(*primals), jax.jvp(_PLAIN[3], primals, tangents)[1]

    # A model has the same product in every layer: jitted, it is traced only once.
    return jax.jit(multiply)


def _choose_path(x_RI: jax.Array, weight: Weight, digits: int) -> Callable[..., Products]:
    """Choose how a CPU or a GPU multiplies these."""
    if digits == 3 and cuda.takes(x_RI, as_weight(weight).cuda_matrix()):
        return _multiply_on_gpu
    rows, matrix = x_RI.shape[0], as_weight(weight).native_matrix()
    if not native.is_enabled() or is_accelerator() or matrix is None:
        return _PLAIN[digits]
    inputs = "int8" if digits == 1 else "bfloat16" if x_RI.dtype == jnp.bfloat16 else "float32"
    if x_RI.dtype == jnp.int8 and as_weight(weight).supports_int8_inputs:
        return _NATIVE[digits]  # its sums are exact, for any number of rows
    path = native.kernel_path(matrix.kind, inputs)
    if rows > 0 and (path.max_rows is None or rows <= path.max_rows):
        return _NATIVE[digits]
    if path.fallback == "matrix_unit":
        return _NATIVE_MANY[digits]
    if not isinstance(weight, WeightBase) or (path.fallback == "xla" and inputs == "bfloat16"):
        return _PLAIN[digits]
    return _DEQUANTIZED[digits]


def _make_native(digits: int, matrix_unit: bool) -> Callable[..., Products]:
    """Return the product by a native kernel; under `vmap` over x alone, the batch is more rows.

    matrix_unit: by the kernel for many rows.
    """

    @jax.custom_batching.custom_vmap
    def multiply_natively(x_RI: jax.Array, weights: Weights) -> Products:
        codes = x_RI.dtype == jnp.int8 and all(as_weight(w).supports_int8_inputs for w in weights)
        x_RI = x_RI if codes or x_RI.dtype == jnp.bfloat16 else x_RI.astype(jnp.float32)
        matrices = list(map(get_native_matrix, weights))
        columns, number = weights[0].shape[1], 1 if codes else digits
        return tuple(
            native.linear(x_RI, matrices, columns=columns, digits=number, matrix_unit=matrix_unit)
        )

    multiply_natively.def_vmap(partial(_batch_rows, digits))
    return multiply_natively


@jax.custom_batching.custom_vmap
def _multiply_on_gpu(x_RI: jax.Array, weights: Weights) -> Products:
    """Multiply by CUDA kernels; under `vmap` over x alone, the batch is more rows."""
    matrices = [as_weight(weight).cuda_matrix() for weight in weights]
    return tuple(cuda.multiply(x_RI, [matrix for matrix in matrices if matrix is not None]))


@_multiply_on_gpu.def_vmap
def _(size: int, batched: Any, x: jax.Array, weights: Weights) -> tuple[Products, Any]:
    return _batch_rows(3, size, batched, x, weights)


def _batch_rows(
    digits: int, size: int, batched: Any, x: jax.Array, weights: Weights
) -> tuple[Products, Any]:
    """Multiply a batch of rows as more rows; in plain JAX if weights have a batch, too."""
    if any(jax.tree.leaves(batched[1])):
        axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
        products = jax.vmap(_PLAIN[digits], in_axes=axes)(x, weights)
    else:
        rows = _PRODUCTS[digits](x.reshape(-1, x.shape[-1]), weights)
        products = tuple(y.reshape(size, -1, y.shape[-1]) for y in rows)
    return products, (True,) * len(weights)


def _multiply_dequantized(digits: int, x_RI: jax.Array, weights: Sequence[WeightBase]) -> Products:
    """Multiply many rows: weights are dequantized natively, `BLOCK_ROWS` rows of a large one at a
    time, and XLA runs the product.

    XLA holds a dequantized weight twice, once in the order in which it multiplies; a block fits a
    processor's cache. All of the loop depends on x, so that nothing happens before x is there.
    """

    def multiply(x_RI: jax.Array, weight: Any) -> jax.Array:
        x_RI = round_to_int8(x_RI, weight.input_block) if digits == 1 else x_RI
        dtype = jnp.dtype(x_RI.dtype if x_RI.dtype == jnp.bfloat16 else jnp.float32)
        (rows, columns), scale_O = weight.shape, None
        if weight.has_row_scale and dtype == jnp.bfloat16:
            # Integers are exact in bfloat16, and so are powers of two times them; without those, a
            # sum could overflow before it is scaled.
            scale_O, power_O = jnp.frexp(weight.scale[:, 0].astype(jnp.float32))
            weight = weight.replace(scale=jnp.ldexp(jnp.float32(1), power_O)[:, None])
        if weight.size < BLOCKED_SIZE or rows <= BLOCK_ROWS:
            weight = add_dependency(x_RI, weight, kernel=True)  # never all layers' weights at once
            y_RO = matmul(
                x_RI, native.dequantize(get_native_matrix(weight), dtype, columns=columns)
            )
            return y_RO if scale_O is None else y_RO * scale_O[None]

        def multiply_block(i: jax.Array, y_RO: jax.Array) -> jax.Array:
            first = i * BLOCK_ROWS  # the last block overlaps: all three stop at the last row
            if isinstance(weight, IntWeight) and weight.bits < 4:  # not as the kernels take it
                index = jnp.minimum(first, rows - BLOCK_ROWS) + jnp.arange(BLOCK_ROWS)
                dense_oI = weight.take(index).astype(dtype)
            else:
                dense_oI = native.dequantize(
                    get_native_matrix(weight), dtype, columns=columns, first=first, rows=BLOCK_ROWS
                )
            return jax.lax.dynamic_update_slice_in_dim(
                y_RO, matmul(x_RI, dense_oI), first, axis=1, allow_negative_indices=False
            )

        y_RO = add_dependency(x_RI, jnp.zeros((x_RI.shape[0], rows), jnp.float32))
        y_RO = match_varying(y_RO, x_RI, weight)
        y_RO = jax.lax.fori_loop(0, -(-rows // BLOCK_ROWS), multiply_block, y_RO)
        return y_RO if scale_O is None else y_RO * scale_O[None]

    return tuple(multiply(x_RI, weight) for weight in weights)


def get_native_matrix(weight: Weight) -> native.Matrix:
    """Return the arrays of a weight for which there are kernels."""
    matrix = as_weight(weight).native_matrix()
    assert matrix is not None
    return matrix


def _multiply_jax(digits: int, x_RI: jax.Array, weights: Weights) -> Products:
    """Multiply in plain JAX, on any platform; the other paths are defined by this one."""
    products = []
    for weight in map(as_weight, weights):
        some_RI = round_to_int8(x_RI, weight.input_block) if digits == 1 else x_RI
        products.append(weight.matmul(some_RI))
    return tuple(products)


def round_to_int8(x_RI: jax.Array, block: int) -> jax.Array:
    """Round x to int8 with a scale for each `block` columns; return it dequantized, in float32.

    The kernels round to the same integers, bit for bit: by the same operations in the same order.
    """
    rows, columns = x_RI.shape
    width = round_up(columns, block)
    x_RCG = jnp.pad(x_RI.astype(jnp.float32), ((0, 0), (0, width - columns)))
    x_RCG = x_RCG.reshape(rows, -1, block)
    step = jnp.abs(x_RCG).max(axis=-1, keepdims=True) * (1 / 127)
    step = jnp.where(step < 2.0**-102, 0.0, step)
    # By the reciprocal: XLA replaces quotients with it, but not always.
    x_RCG = jnp.round(x_RCG * (1 / jnp.where(step == 0, 1.0, step))) * step
    return x_RCG.reshape(rows, width)[:, :columns]


# By the digits of x: 1 with inputs rounded to int8, else 3.
_PLAIN = {digits: partial(_multiply_jax, digits) for digits in (1, 3)}
_DEQUANTIZED = {digits: partial(_multiply_dequantized, digits) for digits in (1, 3)}
_NATIVE = {digits: _make_native(digits, matrix_unit=False) for digits in (1, 3)}
_NATIVE_MANY = {digits: _make_native(digits, matrix_unit=True) for digits in (1, 3)}
_PRODUCTS = {digits: _make_product(digits) for digits in (1, 3)}
