"""SparseGPT: zeroes the weights that cost least, column by column; later columns compensate.

Frantar and Alistarh 2023, arXiv 2301.00774. `column_solver` has the loop over columns.
"""

import jax.numpy as jnp

from jaxllm.compress.column_solver import factor_inputs, solve_columns
from jaxllm.compress.input_stats import InputStats
from jaxllm.compress.recipe import (
    PATTERN,
    Fraction,
    ModelState,
    RuleOptions,
    Shapes,
    StepContext,
    StepSpec,
    check_pattern,
    parse_integer_format,
)
from jaxllm.compress.weight_loop import ChangeWeight, change_by_inputs
from jaxllm.weights.formats import Weight, to_dense
from jaxllm.weights.sparsity import parse as parse_sparsity


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
            solved = solve_columns(array, factor, target=to, sparsity=sparsity)
            if to is None:
                return solved.value_OI.astype(to_dense(weight).dtype)
            return solved.to_weight(to)

        return change

    return change_by_inputs(context, f"SparseGPT, {sparsity.name}", prepare)


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
