"""The loop over a model's matrices: each is changed given the statistics of its inputs.

An expert's are those of the tokens that are routed to it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import ops
from jaxllm.compress.input_stats import InputStats, check_finite
from jaxllm.compress.layerwise import (
    BATCH,
    LayerInputs,
    check_unwrapped,
    get_module,
    match_linears,
    replace_leaves,
    run_layerwise,
)
from jaxllm.compress.recipe import ModelState, StepContext
from jaxllm.errors import ConfigError
from jaxllm.models.moe import MoEConfig, route
from jaxllm.weights.formats import Weight, to_dense
from jaxllm.weights.linear import linear
from jaxllm.weights.paths import Params, first_match

ChangeWeight = Callable[[str, Weight], Weight]  # (path, weight) to the new weight
Prepare = Callable[[InputStats, str], ChangeWeight]  # (input statistics, path for messages)
EXPERTS = "mlp.experts"
STACK_NAMES = ("gate_proj", "up_proj", "down_proj")


def change_by_inputs(context: StepContext[Any], name: str, prepare: Prepare) -> ModelState:
    """Change every matrix that the options' rule matches, given the statistics of its inputs."""

    def change(layer: LayerInputs) -> Params:
        params = layer.params
        for site, chosen in match_linears(layer, context.options.on):
            stats = layer.input_stats(params, site)
            change_weight = prepare(stats, f"{layer.path}.{chosen[0]}")
            for name in chosen:
                weight = get_module(params, name)["weight"]
                weight = change_weight(f"{layer.path}.{name}.weight", weight)
                params = replace_leaves(params, name, weight=weight)
        if stacks := match_expert_stacks(layer, context.options.on):
            params = change_experts(layer, params, stacks, prepare, context.log)
        return params

    return run_layerwise(context, name, change)


def match_expert_stacks(layer: LayerInputs, rule: str) -> list[str]:
    """Return the expert stacks of a layer that match a rule.

    Raises ConfigError for experts that do not read the MLP's input, and what `check_unwrapped`
    raises.
    """
    parallel = f"{layer.path}.moe.experts.{STACK_NAMES[0]}.weight"
    if "experts" in layer.params.get("moe", {}) and first_match([(rule, True)], parallel):
        raise ConfigError(
            f"on={rule} matches experts of {layer.model.config.model_type} that do not read the"
            " MLP's input, so that calibration does not see theirs. Leave them out, and round them"
            " to nearest"
        )
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
    prepare: Prepare,
    log: Callable[[str], None],
) -> Params:
    """Change each expert's matrices, given the statistics of that expert's inputs.

    The inputs of an expert's down projection are computed with its changed gate and up. Experts
    without any token are changed as if their inputs were uncorrelated and of equal size, and are
    logged.
    """
    config = layer.model.config
    assert isinstance(config, MoEConfig)
    tokens = collect_expert_inputs(layer, config, params)
    stacks = {name: get_module(params, f"{EXPERTS}.{name}")["weight"] for name in STACK_NAMES}
    changed: dict[str, list[Weight]] = {name: [] for name in chosen}
    for expert in range(config.num_experts):
        weights = {name: jax.tree.map(itemgetter(expert), w) for name, w in stacks.items()}
        where = f"{layer.path}.{EXPERTS}.{expert}"
        for names in (STACK_NAMES[:2], STACK_NAMES[2:]):
            chosen_names = [name for name in names if name in chosen]
            if not chosen_names:
                continue
            before = () if names == STACK_NAMES[:2] else (weights["gate_proj"], weights["up_proj"])
            stats = tokens.stats(expert, *before)
            change_weight = prepare(stats, f"{where}.{chosen_names[0]}")
            for name in chosen_names:
                weights[name] = change_weight(f"{where}.{name}.weight", weights[name])
                changed[name].append(weights[name])
    if idle := [str(e) for e in range(config.num_experts) if not tokens.count_tokens(e)]:
        log(
            f"{layer.path}: no calibration token is routed to experts {', '.join(idle)}:"
            " they fall back to round-to-nearest"
        )
    for name, matrices in changed.items():
        stack = jax.tree.map(lambda *x: jnp.stack(x), *matrices)
        params = replace_leaves(params, f"{EXPERTS}.{name}", weight=stack)
    return params


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertInputs:
    """The input tokens of one MoE layer.

    x_RD: float32. expert_Rk: the experts that each token is routed to.
    """

    path: str
    config: MoEConfig
    x_RD: np.ndarray
    expert_Rk: np.ndarray
    dtype: str

    def count_tokens(self, expert: int) -> int:
        """Return the number of tokens routed to an expert."""
        return int((self.expert_Rk == expert).any(axis=1).sum())

    def stats(self, expert: int, *gate_up: Weight) -> InputStats:
        """Return the input statistics of an expert's gate and up, or given these `[F, D]`, of down.

        Without any token they are those of uncorrelated inputs of equal size, so columns are
        rounded independently. Raises what `check_finite` raises.
        """
        columns = gate_up[0].shape[0] if gate_up else self.x_RD.shape[1]
        x_RD = self.x_RD[(self.expert_Rk == expert).any(axis=1)]
        if not len(x_RD):
            ones = jnp.ones(columns)
            return InputStats(jnp.float32(1), jnp.eye(columns), ones, ones)
        stats, act = InputStats.empty(columns), self.config.hidden_act
        dense = tuple(to_dense(weight, self.dtype) for weight in gate_up)
        size = min(BATCH, len(self.x_RD))
        for begin in range(0, len(x_RD), size):
            batch = x_RD[begin : begin + size]  # always the same size, to compile once
            batch = np.pad(batch, ((0, size - len(batch)), (0, 0)))
            stats = _add_batch(stats, jnp.asarray(batch, self.dtype), dense, act)
        stats = stats.replace(count=jnp.float32(len(x_RD)))  # without the rows of padding
        return check_finite(stats, f"{self.path}.mlp.experts.{expert}")


def collect_expert_inputs(layer: LayerInputs, config: MoEConfig, params: Params) -> ExpertInputs:
    """Return the inputs of the layer's experts, computed with these parameters of the layer."""
    x_RD = layer.trace_entry(params, "mlp_norm").reshape(-1, config.hidden_size)
    score_RE = layer.trace_entry(params, "router").reshape(-1, config.num_experts)
    bias_E = get_module(params, "mlp.selection")["bias"] if config.routing.has_bias else None
    _, expert_Rk = route(jnp.asarray(score_RE), config.routing, bias_E)
    dtype = layer.model.precision.activations
    return ExpertInputs(layer.path, config, x_RD, np.asarray(expert_Rk), dtype)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _add_batch(
    stats: InputStats, x_RD: jax.Array, gate_up: tuple[jax.Array, ...], act: str
) -> InputStats:
    if gate_up:
        gate_RF, up_RF = (linear(x_RD, weight).astype(x_RD.dtype) for weight in gate_up)
        x_RD = ops.ACTIVATIONS[act](gate_RF) * up_RF
    return stats.add(x_RD)
