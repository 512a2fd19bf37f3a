"""Meshes for a number of devices: all that divide the model and fit, the best first."""

import dataclasses
from collections.abc import Callable, Iterator

from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.rules import fitted
from jaxllm.models.experts import MixtureConfig
from jaxllm.plan.estimate import Asked, Plan, plan

# What is wanted, and what is the less the better then.
GOALS: dict[str, Callable[[Plan], float]] = {
    "latency": lambda p: p.token_time,
    "throughput": lambda p: -p.most_batch / max(p.token_time, 1e-12),
}


def meshes(asked: Asked, devices: int) -> Iterator[Axes]:
    """Data x stage x expert x tensor for so many devices, where they divide the model."""
    config = asked.opened.config
    for tensor in _divisors(devices):
        for expert in _divisors(devices // tensor):
            if expert > 1 and not isinstance(config, MixtureConfig):
                continue
            for stage in _divisors(devices // tensor // expert):
                data = devices // tensor // expert // stage
                if data > asked.batch or config.num_hidden_layers % stage:
                    continue
                if isinstance(config, MixtureConfig) and config.num_experts % expert:
                    continue
                try:
                    yield fitted(Axes(data=data, stage=stage, expert=expert, tensor=tensor), config)
                except ConfigError:
                    continue


def proposals(asked: Asked, devices: int, goal: str = "latency") -> list[Plan]:
    """Their plans, those that fit before those that do not, the best by `goal` first.

    Raises ConfigError for another goal, and where no mesh of so many devices divides the model.
    """
    if goal not in GOALS:
        raise ConfigError(f"a mesh is proposed for {' or '.join(GOALS)}, got {goal!r:.40}")
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
