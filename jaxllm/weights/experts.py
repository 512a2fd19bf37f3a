"""Products of rows with one matrix each of a stack `[E, O, I]`: the experts of a mixture.

The native kernels read only the matrices that are selected. A run of rows for one expert reads it
once, so callers with many rows sort them first. In plain JAX a loop takes one matrix after the
other from the stack. Derivatives are those of `jax.lax.ragged_dot`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxllm.errors import ConfigError
from jaxllm.ops import native
from jaxllm.ops.products import match_dtypes, precision_of
from jaxllm.weights.formats import STACKABLE, Weight, as_weight, can_stack
from jaxllm.weights.linear import get_native_matrix, round_to_int8
from jaxllm.weights.types.base import WeightBase

Stacks = tuple[Weight, ...]
Products = tuple[jax.Array, ...]
MAX_BLOCK_ROWS = 128  # maximum number of rows that are multiplied with a matrix at once


def expert_linears(
    x_AI: jax.Array,
    stacks: Sequence[Weight],
    expert_A: jax.Array,
    *,
    biases: Sequence[jax.Array | None] = (),
    int8_inputs: bool = False,
) -> list[jax.Array]:
    """Return `x[a] @ stack[expert[a]].T` for each of the stacks `[E, O, I]`: float32 `[A, O]`.

    Formats and int8_inputs: as for `linear`. A row has the bits that `linear` gives it, whatever
    else is multiplied with it.

    Args:
        expert_A: int32 expert numbers; for any other number (-1) the result is 0.
        biases: `[E, O]` of each stack, of which `bias[expert[a]]` is added; None for none.
    """
    products = _multiply(x_AI, stacks, expert_A, int8_inputs)
    for i, bias in enumerate(biases):
        if bias is not None:
            bias_EO = as_weight(bias).to_dense()  # gathered, if it is sharded over data
            row_A = jnp.where(expert_A < 0, len(bias_EO), expert_A)  # -1 would be the last
            products[i] += bias_EO.at[row_A].get(mode="fill", fill_value=0).astype(jnp.float32)
    return products


def _multiply(
    x_AI: jax.Array, stacks: Sequence[Weight], expert_A: jax.Array, int8_inputs: bool
) -> list[jax.Array]:
    for stack in map(as_weight, stacks):
        if stack.ndim != 3 or stack.shape[2] != x_AI.shape[1]:
            raise ValueError(f"expert stack {stack.shape} does not match x of shape {x_AI.shape}")
        if stack.is_sharded:
            continue  # the weight inside is checked when it multiplies
        if stack.is_composite or not can_stack(stack.format):
            raise ConfigError(f"format of experts must be {STACKABLE}, got {stack.format}")
    if any(as_weight(stack).is_sharded for stack in stacks):

        def multiply(x_AI: jax.Array, stack: Weight, expert_A: jax.Array) -> jax.Array:
            leaf = as_weight(stack)
            if leaf.is_sharded:
                return leaf.apply_with(x_AI, multiply, expert_A)
            return _multiply(x_AI, (stack,), expert_A, int8_inputs)[0]

        return [multiply(x_AI, stack, expert_A) for stack in stacks]
    digits = (
        1 if int8_inputs and all(as_weight(stack).supports_int8_inputs for stack in stacks) else 3
    )
    return list(_PRODUCTS[digits](x_AI, tuple(stacks), expert_A))


def _make_product(digits: int) -> Callable[..., Products]:
    @jax.custom_jvp
    def multiply(x_AI: jax.Array, stacks: Stacks, expert_A: jax.Array) -> Products:
        return _dispatch_platform(digits, x_AI, stacks, expert_A)

    @partial(multiply.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        leaves, structure = jax.tree.flatten(primals[:2])
        slopes = jax.tree.leaves(tangents[:2])
        # Frozen experts cost nothing here.
        moving = [i for i, slope in enumerate(slopes) if not isinstance(slope, SymbolicZero)]

        def smooth(*moved: jax.Array) -> Products:
            some = dict(zip(moving, moved, strict=True))
            x_AI, stacks = jax.tree.unflatten(
                structure, [some.get(i, x) for i, x in enumerate(leaves)]
            )
            return _multiply_smooth(x_AI, stacks, primals[2])

        old, new = ([values[i] for i in moving] for values in (leaves, slopes))
        return multiply(*primals), jax.jvp(smooth, old, new)[1]

    return jax.jit(multiply)


_PRODUCTS = {digits: _make_product(digits) for digits in (1, 3)}  # 1: with inputs rounded to int8


def _dispatch_platform(
    digits: int, x_AI: jax.Array, stacks: Stacks, expert_A: jax.Array
) -> Products:
    plain = partial(_multiply_jax, digits)
    if not (native.is_enabled() and all(map(is_kernel_ready, map(as_weight, stacks)))):
        return plain(x_AI, stacks, expert_A)
    y: Products = jax.lax.platform_dependent(
        x_AI, stacks, expert_A, cpu=partial(_multiply_native, digits), default=plain
    )
    return y


def is_kernel_ready(leaf: WeightBase) -> bool:
    """Return whether the kernels take the arrays as stored, without a copy of the whole stack."""
    if (matrix := leaf.native_matrix()) is None or matrix.kind not in native.EXPERT_KINDS:
        return False
    return all(a is b for a, b in zip(matrix.arrays, leaf.arrays().values(), strict=True))


def _multiply_native(digits: int, x_AI: jax.Array, stacks: Stacks, expert_A: jax.Array) -> Products:
    if x_AI.dtype != jnp.bfloat16:
        x_AI = x_AI.astype(jnp.float32)
    inputs = "int8" if digits == 1 else "bfloat16" if x_AI.dtype == jnp.bfloat16 else "float32"
    matrices = list(map(get_native_matrix, stacks))
    paths = [native.kernel_path(matrix.kind, inputs) for matrix in matrices]
    rows = x_AI.shape[0] / stacks[0].shape[0]  # per expert, by shape and not by routing
    many = all(
        p.fallback == "matrix_unit" and p.max_rows is not None and rows > p.max_rows for p in paths
    )
    columns = stacks[0].shape[2]
    return tuple(
        native.experts(x_AI, expert_A, matrices, columns=columns, digits=digits, matrix_unit=many)
    )


def _multiply_jax(digits: int, x_AI: jax.Array, stacks: Stacks, expert_A: jax.Array) -> Products:
    """Multiply in plain JAX, on any platform; the other paths are defined by this one."""
    products = []
    for stack in stacks:
        some_AI = round_to_int8(x_AI, as_weight(stack).input_block) if digits == 1 else x_AI
        products.append(_multiply_blocks(some_AI, stack, expert_A))
    return tuple(products)


def plan_blocks(rows: int, experts: int) -> tuple[int, int]:
    """Return how many rows of one expert a block has, and the maximum number of blocks.

    The last block of each expert may be short.
    """
    width = min(MAX_BLOCK_ROWS, 1 << max(0, math.ceil(math.log2(max(rows, 1) / experts))))
    return width, min(rows, rows // width + experts)


def _multiply_blocks(x_AI: jax.Array, stack: Weight, expert_A: jax.Array) -> jax.Array:
    """Multiply blocks of rows of one expert, one after the other."""
    A, E = x_AI.shape[0], stack.shape[0]
    width, count = plan_blocks(A, E)
    known_A = (expert_A >= 0) & (expert_A < E)
    expert_A = jnp.where(known_A, expert_A, E)  # the rows of expert E are in no block
    rows_E = jnp.zeros(E + 1, jnp.int32).at[expert_A].add(1)[:E]
    blocks_E = -(-rows_E // width)
    end_E = jnp.cumsum(blocks_E)
    # A row's place in its expert: how many rows of that expert come before it.
    order_A = jnp.argsort(expert_A, stable=True)
    first_E = jnp.cumsum(rows_E) - rows_E
    place_A = jnp.zeros(A, jnp.int32).at[order_A].set(jnp.arange(A, dtype=jnp.int32))
    place_A = place_A - jnp.append(first_E, 0)[expert_A]
    at_A = jnp.append((end_E - blocks_E) * width, 0)[expert_A] + place_A
    at_A = jnp.where(known_A, at_A, count * width)
    x_PI = jnp.zeros((count * width, x_AI.shape[1]), x_AI.dtype).at[at_A].set(x_AI, mode="drop")
    expert_G = jnp.searchsorted(end_E, jnp.arange(count), side="right")

    def block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_RI, expert = part
        return as_weight(jax.tree.map(lambda piece: piece[expert], stack)).matmul(x_RI)

    y_GRO = jax.lax.map(block, (x_PI.reshape(count, width, x_AI.shape[1]), expert_G))
    y_PO = y_GRO.reshape(count * width, stack.shape[1])
    return y_PO.at[at_A].get(mode="fill", fill_value=0.0)


def _multiply_smooth(x_AI: jax.Array, stacks: Stacks, expert_A: jax.Array) -> Products:
    """Return the same products, whose derivatives do not read all matrices for each row."""
    return tuple(
        _multiply_jax(3, x_AI, (stack,), expert_A)[0]
        if isinstance(stack, WeightBase)
        else _ragged_dot(x_AI, stack, expert_A)
        for stack in stacks
    )


def _ragged_dot(x_AI: jax.Array, stack_EOI: jax.Array, expert_A: jax.Array) -> jax.Array:
    E = stack_EOI.shape[0]
    known_A = (expert_A >= 0) & (expert_A < E)
    expert_A = jnp.where(known_A, expert_A, E)
    rows_E = jnp.zeros(E + 1, jnp.int32).at[expert_A].add(1)[:E]
    order_A = jnp.argsort(expert_A, stable=True)
    x_AI, stack_EOI = match_dtypes(x_AI, stack_EOI)
    # In x's dtype, so that the gradient's products are too; the value is not used.
    sorted_AO = jax.lax.ragged_dot(
        x_AI[order_A], stack_EOI.swapaxes(1, 2), rows_E, precision_of(x_AI.dtype)
    )
    y_AO = sorted_AO[jnp.argsort(order_A)].astype(jnp.float32)
    return jnp.where(known_A[:, None], y_AO, 0.0)
