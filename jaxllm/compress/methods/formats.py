"""Changes of format without calibration: stored weights, and int8 inputs at run time."""

import dataclasses

import jax

from jaxllm.compress.recipe import FORMAT, ModelState, Options, RuleOptions, StepContext, StepSpec
from jaxllm.weights.formats import (
    Weight,
    as_format,
    as_weight,
    log_slow_formats,
    parse_format,
)
from jaxllm.weights.paths import first_match, map_leaves
from jaxllm.weights.types.base import WeightBase


def store(context: StepContext[RuleOptions]) -> ModelState:
    """Convert weights to another format; values may round."""
    log_slow_formats([context.argument], context.log)
    rule = [(context.options.on, True)]

    def change(path: str, leaf: Weight) -> Weight:
        chosen = leaf.ndim >= 2 and first_match(rule, path)
        return convert_inner(leaf, context.argument) if chosen else leaf

    params = map_leaves(change, context.state.params)
    return dataclasses.replace(context.state, params=params)


def dynamic_inputs(context: StepContext[Options]) -> ModelState:
    """Round inputs of integer weights to int8 at run time (dynamic quantization)."""
    precision = dataclasses.replace(context.state.precision, int8_inputs=True)
    return dataclasses.replace(context.state, precision=precision)


def convert_inner(weight: Weight, name: str) -> Weight:
    """Convert a weight to the format `name`; for one composed of others, convert those."""
    if not as_weight(weight).has_parts or parse_format(name).name.count("/"):
        return as_format(weight, name)

    def change(part: Weight) -> Weight:
        return convert_inner(part, name) if part.ndim >= 2 else part

    changed: Weight = jax.tree.map(
        change, weight, is_leaf=lambda x: isinstance(x, WeightBase) and x is not weight
    )
    return changed


STORE = StepSpec(
    "store",
    "",
    store,
    "convert weights to another format",
    FORMAT,
    RuleOptions,
    needs_calibration=False,
    supports_experts=True,
)
DYNAMIC_INPUTS = StepSpec(
    "activations",
    "dynamic",
    dynamic_inputs,
    "round inputs of integer weights to int8, scaled per token",
    needs_calibration=False,
)
