"""Lower bounds of step times from peak rates, and the largest batch and context that fit.

A step takes at least the time of its memory reads or of its arithmetic, whichever is longer, plus
the time of its collectives (Pope et al. 2022, arXiv 2211.05102, section 3). Overheads, and overlap
of communication with arithmetic, are ignored.
"""

import dataclasses
import math
from collections.abc import Callable

from jaxllm.checkpoints.native import Checkpoint
from jaxllm.errors import ConfigError
from jaxllm.models import build, param_shapes
from jaxllm.models.moe import max_read_fraction
from jaxllm.plan import communication, memory
from jaxllm.plan.collective import Collective
from jaxllm.plan.hardware import Hardware
from jaxllm.sharding.context_parallel import dispatch, sequence_parallel
from jaxllm.sharding.context_parallel.dispatch import ContextParallel
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import local_config
from jaxllm.sharding.pipeline.forward import PipelineRunner, check_stages
from jaxllm.sharding.pipeline.stage_layers import assign_layers
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision

PREFILL_CHUNK = 256  # tokens of a prompt that run at once, as in `prefill`
USABLE_FRACTION = 0.9  # usable share of a device's memory; the runtime needs the rest


@dataclasses.dataclass(frozen=True)
class PlanQuery:
    """A planning query: a checkpoint in the formats of `precision`, on devices of one kind.

    Attributes:
      batch: rows over all devices.
      context: tokens per row.
      deterministic_sums: deterministic sums, without partial sums over devices.
      groups: microbatches of a pipeline; None: as many as stages, at most the number of rows.
    """

    checkpoint: Checkpoint
    precision: Precision
    hardware: Hardware
    axes: MeshSpec
    batch: int = 1
    context: int = 2048
    deterministic_sums: bool = False
    groups: int | None = None

    @property
    def microbatches(self) -> int:
        """The number of microbatches in flight in a pipeline, while it decodes."""
        rows = communication.rows_per_device(self.axes, self.batch)
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
        """The number of microbatches of a prompt chunk (`pipeline.forward.PipelineRunner`)."""
        if self.groups is not None or self.axes.stage == 1:
            return self.microbatches
        rows = communication.rows_per_device(self.axes, self.batch)
        way = ContextParallel(
            min(PREFILL_CHUNK, self.context), self.axes.sequence, self.axes.use_ulysses
        )
        return PipelineRunner(self.axes.stage).count_microbatches(rows, way.local_columns)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The estimates for the most loaded device, in bytes and seconds.

    Attributes:
      decode, prefill: collectives of a decoding step, and of a prompt chunk.
      read_time, compute_time, traffic_time: the parts of a decoding step.
      prompt_time: of a whole prompt of `context` tokens.
      max_batch: largest number of rows at the given context.
      max_context: largest context in tokens at the given batch.
    """

    query: PlanQuery
    weights: memory.WeightBytes
    cache_bytes: int
    working_bytes: int
    decode: list[Collective]
    prefill: list[Collective]
    read_time: float
    compute_time: float
    traffic_time: float
    prompt_time: float
    max_batch: int
    max_context: int

    @property
    def total_bytes(self) -> int:
        return self.weights.total + self.cache_bytes + self.working_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.query.hardware.memory * USABLE_FRACTION

    @property
    def stages(self) -> int:
        return self.query.axes.stage

    @property
    def idle_fraction(self) -> float:
        """The share of a prompt chunk's ticks in which a stage is idle: (p - 1) / (m + p - 1)."""
        p, m = self.stages, self.query.prompt_groups
        return (p - 1) / (m + p - 1)

    @property
    def bubble_overhead(self) -> float:
        """The idle time relative to the ideal time, (p - 1) / m, as in Megatron's papers."""
        return (self.stages - 1) / self.query.prompt_groups

    @property
    def token_time(self) -> float:
        """The time of a decoding step. A microbatch passes all stages before its next token; the
        stages work on other microbatches meanwhile. A tick reads a stage's weights once."""
        groups, h = self.query.microbatches, self.query.hardware
        reading = (self.weights.read_per_step + self.cache_bytes / groups) / h.bandwidth
        tick = max(reading, self.compute_time / groups)
        return max(self.stages, groups) * tick + self.traffic_time

    @property
    def tokens_per_second(self) -> float:
        return self.query.batch / self.token_time


def plan(query: PlanQuery) -> Plan:
    """Return the plan. Raises ConfigError for sizes that do not divide, with path and axis."""
    _check_mesh(query)
    held = _weight_bytes(query)
    capacity = query.context
    flops = _flops(query)
    rows = communication.rows_per_device(query.axes, query.batch)
    chunk = min(PREFILL_CHUNK, query.context)
    here = ContextParallel(chunk, query.axes.sequence, query.axes.use_ulysses).local_columns
    decode = _step_collectives(query, 1)
    prefill = _step_collectives(query, chunk)
    cache = _cache_bytes(query, query.batch, capacity)
    h = query.hardware
    ring = 1 if query.axes.use_ulysses else query.axes.sequence  # the context must be a multiple
    read = held.read_per_step + cache
    chunks = -(-query.context // chunk)
    keys = _attention_flops(query, query.context)
    p, m = query.axes.stage, query.prompt_groups
    work = rows * (here * flops + chunk * keys / 2) / h.flops
    tick = max(held.read_per_step / h.bandwidth, work / m)
    prompt = chunks * ((m + p - 1) * tick + _collective_seconds(prefill, query))
    return Plan(
        query,
        held,
        cache,
        _working_bytes(query, query.batch, capacity),
        decode,
        prefill,
        read / h.bandwidth,
        rows * (flops + keys) / h.flops,
        _collective_seconds(decode, query),
        prompt,
        _largest_fit(lambda n: _total_bytes(query, held.total, n, capacity), h),
        _largest_fit(lambda n: _total_bytes(query, held.total, query.batch, n * ring), h) * ring,
    )


def _check_mesh(query: PlanQuery) -> None:
    """Raise ConfigError if the model does not run on the mesh (`sharding.make_sharded_model`)."""
    config, axes = query.checkpoint.config, query.axes
    dispatch.check_context_parallel(local_config(config, axes), axes, query.deterministic_sums)
    sequence_parallel.check(axes, query.deterministic_sums)
    check_stages(config, query.precision, PipelineRunner(axes.stage))


def _weight_bytes(query: PlanQuery) -> memory.WeightBytes:
    rows = communication.rows_per_device(query.axes, query.batch)
    return memory.weight_bytes(
        query.checkpoint, query.precision, query.axes, query.deterministic_sums, rows
    )


def _cache_bytes(query: PlanQuery, rows: int, capacity: int) -> int:
    return memory.cache_bytes(query.checkpoint.config, query.precision, query.axes, rows, capacity)


def _working_bytes(query: PlanQuery, rows: int, capacity: int) -> int:
    chunk = min(PREFILL_CHUNK, capacity)
    config, groups = query.checkpoint.config, query.prompt_groups
    return memory.working_bytes(config, query.precision, query.axes, rows, chunk, capacity, groups)


def _total_bytes(query: PlanQuery, weight_bytes: int, rows: int, capacity: int) -> int:
    return (
        weight_bytes + _cache_bytes(query, rows, capacity) + _working_bytes(query, rows, capacity)
    )


def _step_collectives(query: PlanQuery, tokens: int) -> list[Collective]:
    groups = query.microbatches if tokens == 1 else query.prompt_groups
    return communication.step_collectives(
        query.checkpoint.config,
        query.precision,
        query.axes,
        query.batch,
        tokens,
        query.context,
        deterministic_sums=query.deterministic_sums,
        groups=groups,
    )


def _flops(query: PlanQuery) -> float:
    """Return the flops of one token's matmuls on one device: two per active weight."""
    config, axes = query.checkpoint.config, query.axes
    shapes = flatten(param_shapes(build(config)))
    active = sum(
        s.size * max_read_fraction(config, len(s.shape)) for _, s in shapes if len(s.shape) > 1
    )
    active *= _stage_imbalance(query)
    return 2 * active / (axes.tensor * axes.kv_replicas * axes.stage * axes.expert)


def _stage_imbalance(query: PlanQuery) -> float:
    """Return the number of layers of the largest stage, relative to an even share."""
    config, stages = query.checkpoint.config, query.axes.stage
    return len(assign_layers(config, stages)[0]) * stages / config.num_hidden_layers


def _attention_flops(query: PlanQuery, slots: int) -> float:
    """Return the flops of one token's attention to `slots` slots, on one device."""
    config, axes = query.checkpoint.config, query.axes
    heads = config.num_attention_heads * config.num_hidden_layers * _stage_imbalance(query)
    among = axes.tensor * axes.kv_replicas * axes.stage * axes.sequence
    return 4 * heads * config.head_dim * slots / among


def _collective_seconds(collectives: list[Collective], query: PlanQuery) -> float:
    """Return the time of collectives; axes that fit into a node use its internal link."""
    h, axes = query.hardware, query.axes
    total = 0.0
    for c in collectives:
        inner = math.prod(axes.sizes[axes.names.index(c.axis) :])
        total += (
            c.bytes_sent / (h.link if inner <= h.node else h.across) + c.total_calls * h.latency
        )
    return total


def _largest_fit(needed_bytes: Callable[[int], int], h: Hardware) -> int:
    """Return the largest number whose needed bytes fit into memory; 0 if none does."""
    room, high = h.memory * USABLE_FRACTION, 1
    if needed_bytes(1) > room:
        return 0
    while needed_bytes(high) <= room and high < 1 << 40:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed_bytes(middle) <= room else (low, middle)
    return low
