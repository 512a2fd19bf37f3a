"""GPTQ, SparseGPT, Wanda, magnitude pruning, AWQ and SmoothQuant."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jaxllm.compress.layers import channel_scaling
from jaxllm.compress.layers.input_stats import InputStats
from jaxllm.compress.layers.layerwise import LayerInputs, get_module, replace_leaves
from jaxllm.compress.matrices import pruning
from jaxllm.compress.matrices.column_solver import HessianFactor, factor_hessian, solve_columns
from jaxllm.compress.matrices.sparsity import parse as parse_sparsity
from jaxllm.compress.matrices.weight_clipping import round_to_nearest
from jaxllm.compress.methods.experts import ChangeWeight, change_experts, match_expert_stacks
from jaxllm.compress.methods.layer_loop import match_linears, match_weights, run_layerwise
from jaxllm.compress.recipe import (
    Fraction,
    ModelState,
    RuleOptions,
    Shapes,
    StepContext,
    match_paths,
)
from jaxllm.errors import ConfigError
from jaxllm.weights.formats import Weight, parse_format, to_dense
from jaxllm.weights.paths import Params, first_match, map_leaves
from jaxllm.weights.types.act_order import PermutedWeight
from jaxllm.weights.types.int_weight import IntFormat


class GptqOptions(RuleOptions, frozen=True):
    """Options of GPTQ.

    act_order: process columns with larger inputs first. static_groups: with act_order, groups are
    still adjacent columns. damping: added to H's diagonal, as a fraction of its mean.
    """

    act_order: bool = False
    static_groups: bool = True
    damping: Fraction = 0.01


class SparseGptOptions(RuleOptions, frozen=True):
    """quantize: integer format for the remaining weights; "" keeps them. damping: as GPTQ's."""

    quantize: str = ""
    damping: Fraction = 0.01


class AwqOptions(RuleOptions, frozen=True):
    """clip: also clip ranges, except of linears that match the regex `keep`."""

    clip: bool = True
    keep: str = r".*(q_proj|k_proj|c_attn)"


class SmoothQuantOptions(RuleOptions, frozen=True):
    """alpha: migration strength, from 0 (scale by weights only) to 1 (by activations only)."""

    alpha: Fraction = 0.5


class MagnitudeOptions(RuleOptions, frozen=True):
    """scope: "layer" prunes the same share of each matrix, "model" the smallest weights overall."""

    scope: str = "layer"


def gptq(
    state: ModelState, argument: str, options: GptqOptions, context: StepContext
) -> ModelState:
    """Quantize to integers column by column; later columns compensate earlier errors."""
    to = parse_integer_format(argument)

    def prepare(stats: InputStats, where: str) -> ChangeWeight:
        by = _factor_inputs(stats, where, options.damping, context, act_order=options.act_order)

        def change(path: str, weight: Weight) -> Weight:
            array = to_dense(weight, jnp.float32)
            found = solve_columns(array, by, target=to, static_groups=options.static_groups)
            assert found.codes_OI is not None and found.scale_OG is not None
            if options.act_order and not options.static_groups and to.group is not None:
                order_I = jnp.asarray(by.order_I, jnp.int32)
                codes_OI = found.codes_OI[:, order_I]
                return PermutedWeight(
                    to.from_codes(codes_OI, found.scale_OG, found.zero_OG), order_I
                )
            return to.from_codes(found.codes_OI, found.scale_OG, found.zero_OG)

        return change

    return change_by_inputs(state, options, context, f"GPTQ, {to.name}", prepare)


def sparsegpt(
    state: ModelState, argument: str, options: SparseGptOptions, context: StepContext
) -> ModelState:
    """Zero the weights that cost least; later columns compensate."""
    sparsity = parse_sparsity(argument)
    to = parse_integer_format(options.quantize) if options.quantize else None

    def prepare(stats: InputStats, where: str) -> ChangeWeight:
        by = _factor_inputs(stats, where, options.damping, context)

        def change(path: str, weight: Weight) -> Weight:
            found = solve_columns(to_dense(weight, jnp.float32), by, target=to, sparsity=sparsity)
            if to is None:
                return found.value_OI.astype(to_dense(weight).dtype)
            assert found.codes_OI is not None and found.scale_OG is not None
            return to.from_codes(found.codes_OI, found.scale_OG, found.zero_OG)

        return change

    return change_by_inputs(state, options, context, f"SparseGPT, {sparsity.name}", prepare)


def _factor_inputs(
    stats: InputStats, where: str, damping: float, context: StepContext, act_order: bool = False
) -> HessianFactor:
    """Factor the inverse Hessian of a site's inputs. Logs if more damping than asked was needed."""
    by = factor_hessian(stats.gram_II, float(stats.count), damping=damping, act_order=act_order)
    if by.damping > damping:
        context.log(f"{where}: H is not positive definite, damping raised to {by.damping:.3g}")
    return by


def wanda(
    state: ModelState, argument: str, options: RuleOptions, context: StepContext
) -> ModelState:
    """Zero the smallest |weight| x input norm in each row."""
    sparsity = parse_sparsity(argument)

    def prepare(stats: InputStats, where: str) -> ChangeWeight:
        return lambda path, weight: pruning.prune_wanda(weight, stats, sparsity)

    return change_by_inputs(state, options, context, f"Wanda, {sparsity.name}", prepare)


def magnitude(
    state: ModelState, argument: str, options: MagnitudeOptions, context: StepContext
) -> ModelState:
    """Zero the smallest weights of each matrix, or of all matrices together."""
    sparsity = parse_sparsity(argument)
    leaves = match_weights(state.params, options.on, "prune: magnitude")
    bound: float | None = None
    if options.scope == "model":
        bound = pruning.magnitude_threshold(leaves.values(), sparsity.fraction)

    def change(path: str, leaf: Weight) -> Weight:
        if path not in leaves:
            return leaf
        if bound is not None:
            return pruning.prune_below(leaf, bound)
        return pruning.prune_magnitude(leaf, sparsity)

    return dataclasses.replace(state, params=map_leaves(change, state.params))


def awq(state: ModelState, argument: str, options: AwqOptions, context: StepContext) -> ModelState:
    """Quantize to integers, with channels scaled so that important ones lose less."""
    to = parse_integer_format(argument)

    def change(layer: LayerInputs) -> Params:
        params = layer.params
        for site, chosen in match_linears(layer, options.on):
            moments = layer.input_stats(params, site)
            if len(chosen) == len(site.linears) and channel_scaling.can_fold(params, site):
                found = channel_scaling.search_scale(layer, params, site, moments, to)
                params, scale_I = channel_scaling.fold_scale(params, site, found.scale_I)
                moments = moments.scale(1 / scale_I)
            for linear in chosen:
                weight = to_dense(get_module(params, linear)["weight"])
                clip = options.clip and not first_match([(options.keep, True)], linear)
                leaf = round_to_nearest(weight, to, moments, clip=clip)
                params = replace_leaves(params, linear, weight=leaf)
        return params

    return run_layerwise(state, context, f"AWQ, {to.name}", change)


def smoothquant(
    state: ModelState, argument: str, options: SmoothQuantOptions, context: StepContext
) -> ModelState:
    """Scale channels so that activations are easier to quantize; the outputs stay the same."""

    def change(layer: LayerInputs) -> Params:
        params = layer.params
        for site, chosen in match_linears(layer, options.on):
            follows_norm = site.source and get_module(params, site.source)["weight"].ndim == 1
            if follows_norm and len(chosen) == len(site.linears):
                moments = layer.input_stats(params, site)
                weights = [get_module(params, linear)["weight"] for linear in chosen]
                scale_I = channel_scaling.smoothquant_scale(weights, moments, options.alpha)
                params, _ = channel_scaling.fold_scale(params, site, scale_I)
        return params

    return run_layerwise(state, context, "SmoothQuant", change)


def parse_integer_format(name: str) -> IntFormat:
    """Parse an integer format. Raises ConfigError for any other."""
    found = parse_format(name)
    if not (isinstance(found, IntFormat) and found.is_plain):
        raise ConfigError(f"{name} is not an integer format such as int8, int4-g64 or int3-g128-zp")
    return found


def check_gptq(shapes: Shapes, argument: str, options: GptqOptions) -> None:
    """Raise ConfigError for experts with act_order and static_groups=false: orders would differ."""
    ordered = (
        options.act_order and not options.static_groups and parse_integer_format(argument).group
    )
    for path in match_paths(shapes, options.on, argument):
        if ordered and len(shapes[path]) > 2:
            raise ConfigError(f"{path} belongs to experts: act_order requires static_groups=true")


def check_pattern(shapes: Shapes, argument: str, options: RuleOptions) -> None:
    """Raise ConfigError for a matrix whose rows cannot be split into groups of M."""
    sparsity = parse_sparsity(argument)
    for path in match_paths(shapes, options.on, argument):
        sparsity.check(shapes[path][-1], path)


def check_magnitude(shapes: Shapes, argument: str, options: MagnitudeOptions) -> None:
    """Raise ConfigError as `check_pattern` does, and for an invalid scope."""
    check_pattern(shapes, argument, options)
    if options.scope not in ("layer", "model"):
        raise ConfigError(f"scope must be layer or model: got {options.scope!r:.40}")
    if options.scope == "model" and parse_sparsity(argument).pattern:
        raise ConfigError(f"scope=model requires a share such as 50%: got {argument}")


def check_sparsegpt(shapes: Shapes, argument: str, options: SparseGptOptions) -> None:
    """Raise ConfigError as `check_pattern` does, and for a format that is not integer."""
    check_pattern(shapes, argument, options)
    if options.quantize:
        parse_integer_format(options.quantize)


def change_by_inputs(
    state: ModelState,
    options: RuleOptions,
    context: StepContext,
    name: str,
    prepare: Callable[[InputStats, str], ChangeWeight],
) -> ModelState:
    """Change every matrix that the rule matches, given the statistics of its inputs."""

    def change(layer: LayerInputs) -> Params:
        params = layer.params
        for site, chosen in match_linears(layer, options.on):
            one = prepare(layer.input_stats(params, site), f"{layer.path}.{chosen[0]}")
            for linear in chosen:
                path = f"{layer.path}.{linear}.weight"
                params = replace_leaves(
                    params, linear, weight=one(path, get_module(params, linear)["weight"])
                )
        if stacks := match_expert_stacks(layer, options.on):
            params = change_experts(layer, params, stacks, prepare, context.log)
        return params

    return run_layerwise(state, context, name, change)
