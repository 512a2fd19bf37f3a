"""Calibrated changes of experts: each is calibrated on the tokens routed to it."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxllm.compress.layers.expert_inputs import collect_expert_inputs
from jaxllm.compress.layers.input_stats import InputStats
from jaxllm.compress.layers.layerwise import LayerInputs, get_module, replace_leaves
from jaxllm.compress.methods.layer_loop import check_unwrapped
from jaxllm.models.moe import MoEConfig
from jaxllm.weights.formats import Weight
from jaxllm.weights.paths import Params, first_match

ChangeWeight = Callable[[str, Weight], Weight]  # (path, weight) to the new weight
EXPERTS = "mlp.experts"
STACK_NAMES = ("gate_proj", "up_proj", "down_proj")


def match_expert_stacks(layer: LayerInputs, rule: str) -> list[str]:
    """Return the expert stacks of a layer that match a rule. Raises what `check_unwrapped`
    raises.
    """
    if "experts" not in layer.params.get("mlp", {}):
        return []
    paths = {name: f"{layer.path}.{EXPERTS}.{name}.weight" for name in STACK_NAMES}
    chosen = [name for name, path in paths.items() if first_match([(rule, True)], path)]
    for name in chosen:
        check_unwrapped(paths[name], get_module(layer.params, f"{EXPERTS}.{name}")["weight"])
    return chosen


def change_experts(
    layer: LayerInputs,
    params: Params,
    chosen: Sequence[str],
    prepare: Callable[[InputStats, str], ChangeWeight],
    log: Callable[[str], None],
) -> Params:
    """Change each expert's matrices, given the statistics of its own inputs.

    The inputs of an expert's down projection are computed with its changed gate and up. Experts
    without any token are changed as if their inputs were uncorrelated and of equal size, and are
    logged.
    """
    config = layer.model.config
    assert isinstance(config, MoEConfig)
    tokens = collect_expert_inputs(layer, config, params)
    stacks = {name: get_module(params, f"{EXPERTS}.{name}")["weight"] for name in STACK_NAMES}
    made: dict[str, list[Weight]] = {name: [] for name in chosen}
    for expert in range(config.num_experts):
        one = {name: _expert_weight(stack, expert) for name, stack in stacks.items()}
        where = f"{layer.path}.{EXPERTS}.{expert}"
        for names in (STACK_NAMES[:2], STACK_NAMES[2:]):
            mine = [name for name in names if name in chosen]
            if not mine:
                continue
            if names == STACK_NAMES[:2]:
                moments = tokens.stats(expert)
            else:
                moments = tokens.hidden_stats(expert, one["gate_proj"], one["up_proj"])
            linear = prepare(moments, f"{where}.{mine[0]}")
            for name in mine:
                one[name] = linear(f"{where}.{name}.weight", one[name])
                made[name].append(one[name])
    if idle := [str(e) for e in range(config.num_experts) if not tokens.count_tokens(e)]:
        log(
            f"{layer.path}: no calibration token is routed to experts {', '.join(idle)}:"
            " they fall back to round-to-nearest"
        )
    for name, matrices in made.items():
        whole = jax.tree.map(lambda *x: jnp.stack(x), *matrices)
        params = replace_leaves(params, f"{EXPERTS}.{name}", weight=whole)
    return params


def _expert_weight(stack: Weight, expert: int) -> Weight:
    one: Weight = jax.tree.map(lambda x: x[expert], stack)
    return one
