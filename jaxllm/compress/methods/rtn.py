"""Methods without calibration: round to nearest, changes of format, dynamic int8 inputs."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxllm.compress.matrices.weight_clipping import round_to_nearest
from jaxllm.compress.recipe import ModelState, Options, RuleOptions, StepContext
from jaxllm.weights.formats import Weight, as_format, as_weight, parse_format, to_dense
from jaxllm.weights.paths import first_match, map_leaves
from jaxllm.weights.quantize import POSITION_RULE, ROUTER_RULE, Rules, find_format
from jaxllm.weights.types.base import WeightBase
from jaxllm.weights.types.int_weight import IntFormat, IntWeight


class RtnOptions(RuleOptions, frozen=True):
    """on: as in `RuleOptions`, by default all matrices. clip: clip each integer range to minimize
    the weights' squared error.
    """

    on: str = ".*"
    clip: bool = False


def rtn(state: ModelState, argument: str, options: RtnOptions, context: StepContext) -> ModelState:
    """Round each weight to the nearest value of its format.

    With the default rule this is `quantize(params, argument)`, which keeps embeddings and the LM
    head at 8 bits if the rest has 4.
    """
    plain = options.on == RtnOptions().on
    rules: Rules = argument if plain else [POSITION_RULE, ROUTER_RULE, (options.on, argument)]

    def change(path: str, leaf: Weight) -> Weight:
        name = find_format(rules, path, leaf.ndim)
        if name is None:
            return leaf
        to, is_composite = parse_format(name), as_weight(leaf).is_composite
        if options.clip and isinstance(to, IntFormat) and to.is_plain and not is_composite:
            wide = to_dense(leaf, jnp.float32)
            if wide.ndim == 2:
                return round_to_nearest(wide, to, clip=True)
            return jax.tree.map(
                lambda *x: jnp.stack(x), *(round_to_nearest(w, to, clip=True) for w in wide)
            )
        return convert_inner(leaf, name)

    return dataclasses.replace(state, params=map_leaves(change, state.params))


def store(
    state: ModelState, argument: str, options: RuleOptions, context: StepContext
) -> ModelState:
    """Convert weights to another format; values may round."""

    def change(path: str, leaf: Weight) -> Weight:
        chosen = leaf.ndim >= 2 and first_match([(options.on, True)], path)
        return convert_inner(leaf, argument) if chosen else leaf

    return dataclasses.replace(state, params=map_leaves(change, state.params))


def convert_inner(weight: Weight, name: str) -> Weight:
    """Convert a weight to the format `name`; for one composed of others, convert those."""
    is_nested = as_weight(weight).is_composite and not isinstance(weight, IntWeight)
    if not is_nested or parse_format(name).name.count("/"):
        return as_format(weight, name)

    def change(part: Weight) -> Weight:
        return convert_inner(part, name) if part.ndim >= 2 else part

    changed: Weight = jax.tree.map(
        change, weight, is_leaf=lambda x: isinstance(x, WeightBase) and x is not weight
    )
    return changed


def dynamic_inputs(
    state: ModelState, argument: str, options: Options, context: StepContext
) -> ModelState:
    """Round inputs of integer weights to int8 at run time (dynamic quantization)."""
    precision = dataclasses.replace(state.precision, int8_inputs=True)
    return dataclasses.replace(state, precision=precision)
