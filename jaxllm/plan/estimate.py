"""Lower bounds of step times from peak rates, and the largest batch and context that fit.

A step takes at least the time of its memory reads or of its arithmetic, whichever is longer, plus
the time of its collectives (Pope et al. 2022, arXiv 2211.05102, section 3). Overheads, and overlap
of communication with arithmetic, are ignored.
"""

import dataclasses
import math
from collections.abc import Callable

from jaxllm.checkpoint import Checkpoint
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.pipeline.places import layers_of
from jaxllm.mesh.pipeline.stages import Stages, check_stages
from jaxllm.mesh.rules import share_of
from jaxllm.mesh.sequence import megatron, ways
from jaxllm.mesh.sequence.ways import Way
from jaxllm.models import build, param_shapes
from jaxllm.models.experts import share_read
from jaxllm.plan import sizes, traffic
from jaxllm.plan.collective import Collective
from jaxllm.plan.hardware import Hardware
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision

CHUNK = 256  # tokens of a prompt that run at once, as in `prefill`
SPARE = 0.9  # usable share of a device's memory; the runtime needs the rest


@dataclasses.dataclass(frozen=True)
class Asked:
    """A planning query: a checkpoint in the formats of `precision`, on devices of one kind.

    Attributes:
      batch: rows over all devices.
      context: tokens per row.
      exact: deterministic sums, without partial sums over devices.
      groups: microbatches of a pipeline; None: as many as stages, at most the number of rows.
    """

    opened: Checkpoint
    precision: Precision
    hardware: Hardware
    axes: Axes
    batch: int = 1
    context: int = 2048
    exact: bool = False
    groups: int | None = None

    @property
    def microbatches(self) -> int:
        """The number of microbatches in flight in a pipeline, while it decodes."""
        rows = traffic.rows_of(self.axes, self.batch)
        if self.groups is None:
            return min(self.axes.stage, rows)
        if rows % self.groups:
            raise ConfigError(
                f"{rows} rows on each of data={self.axes.data} are not divisible by {self.groups}"
                " microbatches"
            )
        return self.groups

    @property
    def prompt_groups(self) -> int:
        """The number of microbatches of a prompt chunk (`pipeline.stages.Stages`)."""
        if self.groups is not None or self.axes.stage == 1:
            return self.microbatches
        rows = traffic.rows_of(self.axes, self.batch)
        way = Way(min(CHUNK, self.context), self.axes.sequence, self.axes.exchange)
        return Stages(self.axes.stage).divided(rows, way.here)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The estimates for the most loaded device, in bytes and seconds.

    Attributes:
      decode, prefill: collectives of a decoding step, and of a prompt chunk.
      read_time, compute_time, traffic_time: the parts of a decoding step.
      prompt_time: of a whole prompt of `context` tokens.
      most_batch: largest number of rows at the given context.
      most_context: largest context in tokens at the given batch.
    """

    asked: Asked
    weights: sizes.Weights
    cache: int
    working: int
    decode: list[Collective]
    prefill: list[Collective]
    read_time: float
    compute_time: float
    traffic_time: float
    prompt_time: float
    most_batch: int
    most_context: int

    @property
    def total(self) -> int:
        return self.weights.held + self.cache + self.working

    @property
    def fits(self) -> bool:
        return self.total <= self.asked.hardware.memory * SPARE

    @property
    def stages(self) -> int:
        return self.asked.axes.stage

    @property
    def idle(self) -> float:
        """The share of a prompt chunk's ticks in which a stage is idle: (p - 1) / (m + p - 1)."""
        p, m = self.stages, self.asked.prompt_groups
        return (p - 1) / (m + p - 1)

    @property
    def overhead(self) -> float:
        """The idle time relative to the ideal time, (p - 1) / m, as in Megatron's papers."""
        return (self.stages - 1) / self.asked.prompt_groups

    @property
    def token_time(self) -> float:
        """The time of a decoding step. A microbatch passes all stages before its next token; the
        stages work on other microbatches meanwhile. A tick reads a stage's weights once."""
        groups, h = self.asked.microbatches, self.asked.hardware
        reading = (self.weights.read + self.cache / groups) / h.bandwidth
        tick = max(reading, self.compute_time / groups)
        return max(self.stages, groups) * tick + self.traffic_time

    @property
    def tokens_per_second(self) -> float:
        return self.asked.batch / self.token_time


def plan(asked: Asked) -> Plan:
    """Return the plan. Raises ConfigError for sizes that do not divide, with path and axis."""
    _check(asked)
    held = _weights(asked)
    capacity = asked.context
    flops = _flops(asked)
    rows = traffic.rows_of(asked.axes, asked.batch)
    chunk = min(CHUNK, asked.context)
    here = Way(chunk, asked.axes.sequence, asked.axes.exchange).here
    decode = _traffic(asked, 1)
    prefill = _traffic(asked, chunk)
    cache = _cache(asked, asked.batch, capacity)
    h = asked.hardware
    ring = 1 if asked.axes.exchange else asked.axes.sequence  # the context must be a multiple
    read = held.read + cache
    chunks = -(-asked.context // chunk)
    keys = _attention(asked, asked.context)
    p, m = asked.axes.stage, asked.prompt_groups
    work = rows * (here * flops + chunk * keys / 2) / h.flops
    tick = max(held.read / h.bandwidth, work / m)
    prompt = chunks * ((m + p - 1) * tick + _seconds(prefill, asked))
    return Plan(
        asked,
        held,
        cache,
        _working(asked, asked.batch, capacity),
        decode,
        prefill,
        read / h.bandwidth,
        rows * (flops + keys) / h.flops,
        _seconds(decode, asked),
        prompt,
        _most(lambda n: _bytes(asked, held.held, n, capacity), h),
        _most(lambda n: _bytes(asked, held.held, asked.batch, n * ring), h) * ring,
    )


def _check(asked: Asked) -> None:
    """Raise ConfigError if the model does not run on the mesh (`mesh.meshed`)."""
    config, axes = asked.opened.config, asked.axes
    ways.check(share_of(config, axes), axes, asked.exact)
    megatron.check(axes, asked.exact)
    check_stages(config, asked.precision, Stages(axes.stage))


def _weights(asked: Asked) -> sizes.Weights:
    rows = traffic.rows_of(asked.axes, asked.batch)
    return sizes.weights(asked.opened, asked.precision, asked.axes, asked.exact, rows)


def _cache(asked: Asked, rows: int, capacity: int) -> int:
    return sizes.cache(asked.opened.config, asked.precision, asked.axes, rows, capacity)


def _working(asked: Asked, rows: int, capacity: int) -> int:
    chunk = min(CHUNK, capacity)
    config, groups = asked.opened.config, asked.prompt_groups
    return sizes.working(config, asked.precision, asked.axes, rows, chunk, capacity, groups)


def _bytes(asked: Asked, held: int, rows: int, capacity: int) -> int:
    return held + _cache(asked, rows, capacity) + _working(asked, rows, capacity)


def _traffic(asked: Asked, tokens: int) -> list[Collective]:
    groups = asked.microbatches if tokens == 1 else asked.prompt_groups
    return traffic.step(
        asked.opened.config,
        asked.precision,
        asked.axes,
        asked.batch,
        tokens,
        asked.context,
        exact=asked.exact,
        groups=groups,
    )


def _flops(asked: Asked) -> float:
    """Return the flops of one token's matmuls on one device: two per active weight."""
    config, axes = asked.opened.config, asked.axes
    shapes = flatten(param_shapes(build(config)))
    active = sum(s.size * share_read(config, len(s.shape)) for _, s in shapes if len(s.shape) > 1)
    active *= _fullest(asked)
    return 2 * active / (axes.tensor * axes.copies * axes.stage * axes.expert)


def _fullest(asked: Asked) -> float:
    """Return the number of layers of the largest stage, relative to an even share."""
    config, stages = asked.opened.config, asked.axes.stage
    return len(layers_of(config, stages)[0]) * stages / config.num_hidden_layers


def _attention(asked: Asked, slots: int) -> float:
    """Return the flops of one token's attention to `slots` slots, on one device."""
    config, axes = asked.opened.config, asked.axes
    heads = config.num_attention_heads * config.num_hidden_layers * _fullest(asked)
    among = axes.tensor * axes.copies * axes.stage * axes.sequence
    return 4 * heads * config.head_dim * slots / among


def _seconds(found: list[Collective], asked: Asked) -> float:
    """Return the time of collectives; axes that fit into a node use its internal link."""
    h, axes = asked.hardware, asked.axes
    total = 0.0
    for c in found:
        inner = math.prod(axes.sizes[axes.names.index(c.axis) :])
        total += c.sent / (h.link if inner <= h.node else h.across) + c.calls * h.latency
    return total


def _most(needed: Callable[[int], int], h: Hardware) -> int:
    """Return the largest number whose needed bytes fit into memory; 0 if none does."""
    room, high = h.memory * SPARE, 1
    if needed(1) > room:
        return 0
    while needed(high) <= room and high < 1 << 40:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= room else (low, middle)
    return low
