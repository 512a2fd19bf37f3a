"""SparseGPT: zeroes the weights that cost least, column by column; later columns compensate.

Frantar and Alistarh 2023, arXiv 2301.00774. `column_solver` has the loop over columns.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.column_solver import (
    COLUMN_BLOCK,
    HessianFactor,
    OBSResult,
    factor_inputs,
    solve_columns,
)
from jaxllm.compress.input_stats import InputStats
from jaxllm.compress.recipe import (
    Fraction,
    ModelState,
    RuleOptions,
    Shapes,
    StepContext,
    StepSpec,
    parse_integer_format,
)
from jaxllm.compress.weight_loop import ChangeWeight, change_by_inputs
from jaxllm.errors import ConfigError
from jaxllm.research.pruning.sparsity import (
    PATTERN,
    Sparsity,
    check_pattern,
    lowest_in_groups,
    parse as parse_sparsity,
)
from jaxllm.weights.formats import Weight, to_dense
from jaxllm.weights.types.int_weight import IntFormat


class SparseGptOptions(RuleOptions, frozen=True):
    """quantize: integer format for the remaining weights; "" keeps them. damping: as GPTQ's."""

    quantize: str = ""
    damping: Fraction = 0.01


def sparsegpt(context: StepContext[SparseGptOptions]) -> ModelState:
    """Zero the weights that cost least; later columns compensate."""
    sparsity, options = parse_sparsity(context.argument), context.options
    to = parse_integer_format(options.quantize) if options.quantize else None

    def prepare(stats: InputStats, where: str) -> ChangeWeight:
        factor = factor_inputs(stats, where, options.damping, context.log)

        def change(path: str, weight: Weight) -> Weight:
            array = to_dense(weight, jnp.float32)
            solved = prune_columns(array, factor, sparsity, to)
            if to is None:
                return solved.value_OI.astype(to_dense(weight).dtype)
            return solved.to_weight(to)

        return change

    return change_by_inputs(context, f"SparseGPT, {sparsity.name}", prepare)


@dataclasses.dataclass(frozen=True)
class CheapestZeros:
    """Zeroes the weights with the smallest `w^2 / U_ii^2`, as `solve_columns` asks.

    A share is chosen over all rows of a block of columns at its first, N:M at the first column of
    each M.
    """

    sparsity: Sparsity

    def __call__(
        self,
        i: jax.Array,
        w_CO: jax.Array,
        gone_CO: jax.Array,
        u_CC: jax.Array,
        is_real_C: jax.Array,
    ) -> jax.Array:
        n, m = self.sparsity.pattern or (0, COLUMN_BLOCK)

        def choose_columns() -> jax.Array:
            w_MO = jax.lax.dynamic_slice_in_dim(w_CO, i, m)
            gone_MO = jax.lax.dynamic_slice_in_dim(gone_CO, i, m)
            u_M = jax.lax.dynamic_slice_in_dim(jnp.diagonal(u_CC), i, m)
            score_MO = jnp.where(gone_MO, 0.0, w_MO**2 / u_M[:, None] ** 2)
            if self.sparsity.pattern is None:
                gone_MO |= _lowest_share(score_MO, is_real_C, self.sparsity.fraction)
            else:
                gone_MO |= lowest_in_groups(score_MO.T, m - n).T
            return jax.lax.dynamic_update_slice_in_dim(gone_CO, gone_MO, i, 0)

        return jax.lax.cond(i % m == 0, choose_columns, lambda: gone_CO)


def prune_columns(
    weight_OI: jax.Array, hessian: HessianFactor, sparsity: Sparsity, to: IntFormat | None = None
) -> OBSResult:
    """Zero the cheapest weights, and round the others to integers if there is a format.

    Raises ConfigError for N:M sparsity with `act_order`.
    """
    if sparsity.pattern and (np.diff(hessian.order_I) < 0).any():
        raise ConfigError(f"{sparsity.name} needs adjacent columns: incompatible with act_order")
    return solve_columns(weight_OI, hessian, target=to, choose_zeros=CheapestZeros(sparsity))


def _lowest_share(score_CO: jax.Array, is_real_C: jax.Array, fraction: float) -> jax.Array:
    """Return a mask of the lowest scores in a block, over all rows, without its padding."""
    score_CO = jnp.where(is_real_C[:, None], score_CO, jnp.inf)
    count = jnp.floor(is_real_C.sum().astype(jnp.float32) * score_CO.shape[1] * fraction)
    rank = jnp.argsort(jnp.argsort(score_CO.reshape(-1), stable=True), stable=True)
    return rank.reshape(score_CO.shape) < count.astype(jnp.int32)


def check_sparsegpt(shapes: Shapes, argument: str, options: SparseGptOptions) -> None:
    """Raise ConfigError as `check_pattern` does, and for a format that is not integer."""
    check_pattern(shapes, argument, options)
    if options.quantize:
        parse_integer_format(options.quantize)


STEP = StepSpec(
    "prune",
    "sparsegpt",
    sparsegpt,
    "zero the cheapest weights; later columns compensate",
    PATTERN,
    SparseGptOptions,
    supports_experts=True,
    check=check_sparsegpt,
)
