"""Meshes for a number of devices: all that divide the model and fit, the best first."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.rules import fitted
from jaxllm.models.experts import MixtureConfig
from jaxllm.plan.estimate import Asked, Plan, plan

# What is wanted, and what is the less the better then.
GOALS: dict[str, Callable[[Plan], float]] = {
    "latency": lambda p: p.token_time,
    "throughput": lambda p: -p.tokens_per_second,
    "prompt": lambda p: p.prompt_time,
}


def meshes(asked: Asked, devices: int) -> Iterator[Axes]:
    """Data x stage x sequence x expert x tensor for so many devices, where they divide the model
    and its context: around a ring, or exchanged for heads. `estimate.plan` refuses some of them.
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
                continue  # slots that do not divide are on all devices
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
    """Raise ConfigError for what no mesh is proposed for."""
    if goal not in GOALS:
        raise ConfigError(f"a mesh is proposed for {' or '.join(GOALS)}, got {goal!r:.40}")


def proposals(asked: Asked, devices: int, goal: str = "latency") -> list[Plan]:
    """Their plans, those that fit before those that do not, the best by `goal` first.

    Throughput is that of the batch asked for. Raises ConfigError for another goal, and where no
    mesh of so many devices divides the model.
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
            f"no mesh of {devices} devices divides this model and its batch of {asked.batch}"
        )
    return sorted(found, key=lambda p: (not p.fits, GOALS[goal](p), p.total))


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]
