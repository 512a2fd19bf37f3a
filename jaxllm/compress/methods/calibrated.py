"""GPTQ, SparseGPT, Wanda, magnitude pruning, AWQ and SmoothQuant."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jaxllm.compress.layers import scaling
from jaxllm.compress.layers.moments import Moments
from jaxllm.compress.layers.stream import Stage, at, put
from jaxllm.compress.matrices import pruning
from jaxllm.compress.matrices.clip import rounded
from jaxllm.compress.matrices.sparsity import parse as parse_sparsity
from jaxllm.compress.matrices.surgery import Factor, factor, solve
from jaxllm.compress.methods.experts import Linear, by_expert, chosen_stacks
from jaxllm.compress.methods.walk import chosen_of, layer_by_layer, single
from jaxllm.compress.recipe import Fraction, On, Shapes, Subject, Work, matched
from jaxllm.errors import ConfigError
from jaxllm.weights.formats import Weight, dense, parse
from jaxllm.weights.leaves.integers import Integer
from jaxllm.weights.leaves.ordered import Ordered
from jaxllm.weights.paths import Params, first_match, map_leaves


class Gptq(On, frozen=True):
    """Options of GPTQ.

    act_order: process columns with larger inputs first. static_groups: with act_order, groups are
    still adjacent columns. damping: added to H's diagonal, as a fraction of its mean.
    """

    act_order: bool = False
    static_groups: bool = True
    damping: Fraction = 0.01


class SparseGpt(On, frozen=True):
    """quantize: integer format for the remaining weights; "" keeps them. damping: as GPTQ's."""

    quantize: str = ""
    damping: Fraction = 0.01


class Awq(On, frozen=True):
    """clip: also clip ranges, except of linears that match the regex `keep`."""

    clip: bool = True
    keep: str = r".*(q_proj|k_proj|c_attn)"


class Smooth(On, frozen=True):
    """alpha: migration strength, from 0 (scale by weights only) to 1 (by activations only)."""

    alpha: Fraction = 0.5


class Magnitude(On, frozen=True):
    """scope: "layer" prunes the same share of each matrix, "model" the smallest weights overall."""

    scope: str = "layer"


def gptq(subject: Subject, argument: str, options: Gptq, work: Work) -> Subject:
    """Quantize to integers column by column; later columns compensate earlier errors."""
    to = integers(argument)

    def prepare(moments: Moments, where: str) -> Linear:
        by = _factored(moments, where, options.damping, work, act_order=options.act_order)

        def change(path: str, weight: Weight) -> Weight:
            array = dense(weight, jnp.float32)
            found = solve(array, by, to=to, static_groups=options.static_groups)
            assert found.codes_OI is not None and found.scale_OG is not None
            if options.act_order and not options.static_groups and to.group is not None:
                order_I = jnp.asarray(by.order_I, jnp.int32)
                codes_OI = found.codes_OI[:, order_I]
                return Ordered(to.of(codes_OI, found.scale_OG, found.zero_OG), order_I)
            return to.of(found.codes_OI, found.scale_OG, found.zero_OG)

        return change

    return by_inputs(subject, options, work, f"GPTQ, {to.name}", prepare)


def sparsegpt(subject: Subject, argument: str, options: SparseGpt, work: Work) -> Subject:
    """Zero the weights that cost least; later columns compensate."""
    sparsity = parse_sparsity(argument)
    to = integers(options.quantize) if options.quantize else None

    def prepare(moments: Moments, where: str) -> Linear:
        by = _factored(moments, where, options.damping, work)

        def change(path: str, weight: Weight) -> Weight:
            found = solve(dense(weight, jnp.float32), by, to=to, sparsity=sparsity)
            if to is None:
                return found.value_OI.astype(dense(weight).dtype)
            assert found.codes_OI is not None and found.scale_OG is not None
            return to.of(found.codes_OI, found.scale_OG, found.zero_OG)

        return change

    return by_inputs(subject, options, work, f"SparseGPT, {sparsity.name}", prepare)


def _factored(
    moments: Moments, where: str, damping: float, work: Work, act_order: bool = False
) -> Factor:
    """Factor the inverse Hessian of a site's inputs. Logs if more damping than asked was needed."""
    by = factor(moments.gram_II, float(moments.count), damping=damping, act_order=act_order)
    if by.damping > damping:
        work.say(f"{where}: H is not positive definite, damping raised to {by.damping:.3g}")
    return by


def wanda(subject: Subject, argument: str, options: On, work: Work) -> Subject:
    """Zero the smallest |weight| x input norm in each row."""
    sparsity = parse_sparsity(argument)

    def prepare(moments: Moments, where: str) -> Linear:
        return lambda path, weight: pruning.wanda(weight, moments, sparsity)

    return by_inputs(subject, options, work, f"Wanda, {sparsity.name}", prepare)


def magnitude(subject: Subject, argument: str, options: Magnitude, work: Work) -> Subject:
    """Zero the smallest weights of each matrix, or of all matrices together."""
    sparsity = parse_sparsity(argument)
    leaves = single(subject.params, options.on, "prune: magnitude")
    bound: float | None = None
    if options.scope == "model":
        bound = pruning.bound_of(leaves.values(), sparsity.fraction)

    def change(path: str, leaf: Weight) -> Weight:
        if path not in leaves:
            return leaf
        if bound is not None:
            return pruning.below(leaf, bound)
        return pruning.by_magnitude(leaf, sparsity)

    return dataclasses.replace(subject, params=map_leaves(change, subject.params))


def awq(subject: Subject, argument: str, options: Awq, work: Work) -> Subject:
    """Quantize to integers, with channels scaled so that important ones lose less."""
    to = integers(argument)

    def change(stage: Stage) -> Params:
        params = stage.params
        for site, chosen in chosen_of(stage, options.on):
            moments = stage.moments(params, site)
            if len(chosen) == len(site.linears) and scaling.foldable(params, site):
                found = scaling.search(stage, params, site, moments, to)
                params, scale_I = scaling.fold(params, site, found.scale_I)
                moments = moments.scaled(1 / scale_I)
            for linear in chosen:
                weight = dense(at(params, linear)["weight"])
                clip = options.clip and not first_match([(options.keep, True)], linear)
                leaf = rounded(weight, to, moments, clip=clip)
                params = put(params, linear, weight=leaf)
        return params

    return layer_by_layer(subject, work, f"AWQ, {to.name}", change)


def smoothquant(subject: Subject, argument: str, options: Smooth, work: Work) -> Subject:
    """Scale channels so that activations are easier to quantize; the outputs stay the same."""

    def change(stage: Stage) -> Params:
        params = stage.params
        for site, chosen in chosen_of(stage, options.on):
            follows_norm = site.source and at(params, site.source)["weight"].ndim == 1
            if follows_norm and len(chosen) == len(site.linears):
                moments = stage.moments(params, site)
                weights = [at(params, linear)["weight"] for linear in chosen]
                scale_I = scaling.smoothing(weights, moments, options.alpha)
                params, _ = scaling.fold(params, site, scale_I)
        return params

    return layer_by_layer(subject, work, "SmoothQuant", change)


def integers(name: str) -> Integer:
    """Parse an integer format. Raises ConfigError for any other."""
    found = parse(name)
    if not isinstance(found, Integer):
        raise ConfigError(f"{name} is not an integer format such as int8, int4-g64 or int3-g128-zp")
    return found


def check_gptq(shapes: Shapes, argument: str, options: Gptq) -> None:
    """Raise ConfigError for experts with act_order and static_groups=false: orders would differ."""
    ordered = options.act_order and not options.static_groups and integers(argument).group
    for path in matched(shapes, options.on, argument):
        if ordered and len(shapes[path]) > 2:
            raise ConfigError(f"{path} belongs to experts: act_order requires static_groups=true")


def check_pattern(shapes: Shapes, argument: str, options: On) -> None:
    """Raise ConfigError for a matrix whose rows cannot be split into groups of M."""
    sparsity = parse_sparsity(argument)
    for path in matched(shapes, options.on, argument):
        sparsity.check(shapes[path][-1], path)


def check_magnitude(shapes: Shapes, argument: str, options: Magnitude) -> None:
    """Raise ConfigError as `check_pattern` does, and for an invalid scope."""
    check_pattern(shapes, argument, options)
    if options.scope not in ("layer", "model"):
        raise ConfigError(f"scope must be layer or model: got {options.scope!r:.40}")
    if options.scope == "model" and parse_sparsity(argument).pattern:
        raise ConfigError(f"scope=model requires a share such as 50%: got {argument}")


def check_sparsegpt(shapes: Shapes, argument: str, options: SparseGpt) -> None:
    """Raise ConfigError as `check_pattern` does, and for a format that is not integer."""
    check_pattern(shapes, argument, options)
    if options.quantize:
        integers(options.quantize)


def by_inputs(
    subject: Subject,
    options: On,
    work: Work,
    name: str,
    prepare: Callable[[Moments, str], Linear],
) -> Subject:
    """Change every matrix that the rule matches, given the statistics of its inputs."""

    def change(stage: Stage) -> Params:
        params = stage.params
        for site, chosen in chosen_of(stage, options.on):
            one = prepare(stage.moments(params, site), f"{stage.path}.{chosen[0]}")
            for linear in chosen:
                path = f"{stage.path}.{linear}.weight"
                params = put(params, linear, weight=one(path, at(params, linear)["weight"]))
        if stacks := chosen_stacks(stage, options.on):
            params = by_expert(stage, params, stacks, prepare, work.say)
        return params

    return layer_by_layer(subject, work, name, change)
