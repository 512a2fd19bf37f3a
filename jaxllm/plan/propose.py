"""A ranking of the meshes of a number of devices: those that fit first, then by the goal."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.rules import fitted
from jaxllm.models.experts import MixtureConfig
from jaxllm.plan.estimate import Asked, Plan, plan

# Optimization goals, and the function to minimize for each.
GOALS: dict[str, Callable[[Plan], float]] = {
    "latency": lambda p: p.token_time,
    "throughput": lambda p: -p.tokens_per_second,
    "prompt": lambda p: p.prompt_time,
}


def meshes(asked: Asked, devices: int) -> Iterator[Axes]:
    """Yield the meshes data x stage x sequence x expert x tensor that divide model and context.

    Context parallelism is by ring attention or by Ulysses (`exchange`). `estimate.plan` rejects
    some of the meshes.
    """
    config = asked.opened.config
    experts = config.num_experts if isinstance(config, MixtureConfig) else 1
    for tensor, expert, stage, sequence in itertools.product(_divisors(devices), repeat=4):
        data, rest = divmod(devices, tensor * expert * stage * sequence)
        if rest or not 0 < data <= asked.batch:
            continue
        if experts % expert:
            continue
        for exchange in (False, True) if sequence > 1 else (False,):
            if not exchange and asked.context % sequence:
                continue  # the cache would be replicated
            axes = Axes(
                data=data,
                stage=stage,
                sequence=sequence,
                expert=expert,
                tensor=tensor,
                exchange=exchange,
            )
            try:
                yield fitted(axes, config)
            except ConfigError:
                continue


def check_goal(goal: str) -> None:
    """Raise ConfigError for an unknown goal."""
    if goal not in GOALS:
        raise ConfigError(f"the goal must be {' or '.join(GOALS)}, got {goal!r:.40}")


def proposals(asked: Asked, devices: int, goal: str = "latency") -> list[Plan]:
    """Return the plans of all meshes: those that fit in memory first, then sorted by `goal`.

    Throughput is that of the given batch. Raises ConfigError for another goal, and if no mesh of
    `devices` devices divides the model.
    """
    check_goal(goal)
    found = []
    for axes in meshes(asked, devices):
        try:
            found.append(plan(dataclasses.replace(asked, axes=axes, groups=None)))
        except ConfigError:
            continue
    if not found:
        raise ConfigError(
            f"no mesh of {devices} devices divides this model and a batch of {asked.batch}"
        )
    return sorted(found, key=lambda p: (not p.fits, GOALS[goal](p), p.total))


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]
