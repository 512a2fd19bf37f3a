"""Calibrated changes of experts: each is calibrated on the tokens routed to it."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxllm.compress.layers.moments import Moments
from jaxllm.compress.layers.routed import routed
from jaxllm.compress.layers.stream import Stage, at, put
from jaxllm.compress.methods.walk import check_single
from jaxllm.models.experts import MixtureConfig
from jaxllm.weights.formats import Weight
from jaxllm.weights.paths import Params, first_match

Linear = Callable[[str, Weight], Weight]  # (path, weight) to the new weight
EXPERTS = "mlp.experts"
NAMES = ("gate_proj", "up_proj", "down_proj")


def chosen_stacks(stage: Stage, rule: str) -> list[str]:
    """Return the expert stacks of a layer that match a rule. Raises what `check_single` raises."""
    if "experts" not in stage.params.get("mlp", {}):
        return []
    paths = {name: f"{stage.path}.{EXPERTS}.{name}.weight" for name in NAMES}
    chosen = [name for name, path in paths.items() if first_match([(rule, True)], path)]
    for name in chosen:
        check_single(paths[name], at(stage.params, f"{EXPERTS}.{name}")["weight"])
    return chosen


def by_expert(
    stage: Stage,
    params: Params,
    chosen: Sequence[str],
    prepare: Callable[[Moments, str], Linear],
    say: Callable[[str], None],
) -> Params:
    """Change each expert's matrices, given the statistics of its own inputs.

    The inputs of an expert's down projection are computed with its changed gate and up. Experts
    without any token are changed as if their inputs were uncorrelated and of equal size, and are
    logged.
    """
    config = stage.model.config
    assert isinstance(config, MixtureConfig)
    tokens = routed(stage, config, params)
    stacks = {name: at(params, f"{EXPERTS}.{name}")["weight"] for name in NAMES}
    made: dict[str, list[Weight]] = {name: [] for name in chosen}
    for expert in range(config.num_experts):
        one = {name: _matrix(stack, expert) for name, stack in stacks.items()}
        where = f"{stage.path}.{EXPERTS}.{expert}"
        for names in (NAMES[:2], NAMES[2:]):
            mine = [name for name in names if name in chosen]
            if not mine:
                continue
            if names == NAMES[:2]:
                moments = tokens.moments(expert)
            else:
                moments = tokens.hidden_moments(expert, one["gate_proj"], one["up_proj"])
            linear = prepare(moments, f"{where}.{mine[0]}")
            for name in mine:
                one[name] = linear(f"{where}.{name}.weight", one[name])
                made[name].append(one[name])
    if idle := [str(e) for e in range(config.num_experts) if not tokens.count(e)]:
        say(
            f"{stage.path}: no calibration token is routed to experts {', '.join(idle)}:"
            " they fall back to round-to-nearest"
        )
    for name, matrices in made.items():
        whole = jax.tree.map(lambda *x: jnp.stack(x), *matrices)
        params = put(params, f"{EXPERTS}.{name}", weight=whole)
    return params


def _matrix(stack: Weight, expert: int) -> Weight:
    one: Weight = jax.tree.map(lambda x: x[expert], stack)
    return one
