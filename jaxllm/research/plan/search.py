"""A ranking of the meshes of a number of devices: by whether they fit, then by the goal."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from jaxllm.errors import ConfigError
from jaxllm.models.moe import MoEConfig
from jaxllm.research.plan.estimate import Plan, PlanQuery, plan
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import resolve_mesh

# Optimization goals, and the function to minimize for each.
GOALS: dict[str, Callable[[Plan], float]] = {
    "latency": lambda p: p.token_time,
    "throughput": lambda p: -p.tokens_per_second,
    "prompt": lambda p: p.prompt_time,
}


def candidate_meshes(query: PlanQuery, devices: int) -> Iterator[MeshSpec]:
    """Yield the meshes data x stage x sequence x expert x tensor that divide model and context.

    Context parallelism is by ring attention or by Ulysses (`use_ulysses`). `estimate.plan` rejects
    some of the meshes.
    """
    config = query.checkpoint.config
    experts = config.num_experts if isinstance(config, MoEConfig) else 1
    for tensor, expert, stage, sequence in itertools.product(_divisors(devices), repeat=4):
        data, rest = divmod(devices, tensor * expert * stage * sequence)
        if rest or not 0 < data <= query.batch:
            continue
        if experts % expert:
            continue
        for exchange in (False, True) if sequence > 1 else (False,):
            if not exchange and query.context % sequence:
                continue  # the cache would be replicated
            axes = MeshSpec(
                data=data,
                stage=stage,
                sequence=sequence,
                expert=expert,
                tensor=tensor,
                use_ulysses=exchange,
            )
            try:
                yield resolve_mesh(axes, config)
            except ConfigError:
                continue


def check_goal(goal: str) -> None:
    """Raise ConfigError for an unknown goal."""
    if goal not in GOALS:
        raise ConfigError(f"the goal must be {' or '.join(GOALS)}, got {goal!r:.40}")


def propose_meshes(query: PlanQuery, devices: int, goal: str = "latency") -> list[Plan]:
    """Return the plans of all meshes, sorted by whether they fit in memory, then by `goal`.

    Throughput is that of the given batch. Raises ConfigError for another goal, and if no mesh of
    `devices` devices divides the model.
    """
    check_goal(goal)
    plans = []
    for axes in candidate_meshes(query, devices):
        try:
            plans.append(plan(dataclasses.replace(query, axes=axes, groups=None)))
        except ConfigError:
            continue
    if not plans:
        raise ConfigError(
            f"no mesh of {devices} devices divides this model and a batch of {query.batch}"
        )
    return sorted(plans, key=lambda p: (not p.fits, GOALS[goal](p), p.total_bytes))


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]
