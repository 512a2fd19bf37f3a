"""GPTQ: rounds column by column, and later columns compensate earlier errors.

Frantar et al. 2022, arXiv 2210.17323. `column_solver` has the loop over columns.
"""

import jax.numpy as jnp

from jaxllm.compress.column_solver import factor_inputs, solve_columns
from jaxllm.compress.input_stats import InputStats
from jaxllm.compress.recipe import (
    INTEGER_FORMAT,
    Fraction,
    ModelState,
    RuleOptions,
    Shapes,
    StepContext,
    StepSpec,
    match_paths,
    parse_integer_format,
)
from jaxllm.compress.weight_loop import ChangeWeight, change_by_inputs
from jaxllm.errors import ConfigError
from jaxllm.weights.formats import Weight, to_dense
from jaxllm.weights.types.permuted import PermutedWeight


class GptqOptions(RuleOptions, frozen=True):
    """Options of GPTQ.

    act_order: process columns with larger inputs first. static_groups: with act_order, groups are
    still adjacent columns. damping: added to H's diagonal, as a fraction of its mean.
    """

    act_order: bool = True
    static_groups: bool = True
    damping: Fraction = 0.01


def gptq(context: StepContext[GptqOptions]) -> ModelState:
    """Quantize to integers column by column; later columns compensate earlier errors."""
    to, options = parse_integer_format(context.argument), context.options

    def prepare(stats: InputStats, where: str) -> ChangeWeight:
        factor = factor_inputs(stats, where, options.damping, context.log, options.act_order)

        def change(path: str, weight: Weight) -> Weight:
            array = to_dense(weight, jnp.float32)
            solved = solve_columns(array, factor, target=to, static_groups=options.static_groups)
            if options.act_order and not options.static_groups and to.group is not None:
                order_I = jnp.asarray(factor.order_I, jnp.int32)
                return PermutedWeight(solved.to_weight(to, order_I), order_I)
            return solved.to_weight(to)

        return change

    return change_by_inputs(context, f"GPTQ, {to.name}", prepare)


def check_gptq(shapes: Shapes, argument: str, options: GptqOptions) -> None:
    """Raise ConfigError for experts with act_order and static_groups=false: orders would differ."""
    ordered = (
        options.act_order and not options.static_groups and parse_integer_format(argument).group
    )
    for path in match_paths(shapes, options.on, argument):
        if ordered and len(shapes[path]) > 2:
            raise ConfigError(f"{path} belongs to experts: act_order requires static_groups=true")


STEP = StepSpec(
    "quantize",
    "gptq",
    gptq,
    "integers; later columns compensate the errors of earlier ones",
    INTEGER_FORMAT,
    GptqOptions,
    supports_experts=True,
    check=check_gptq,
)
