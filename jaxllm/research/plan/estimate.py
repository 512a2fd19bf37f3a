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
from jaxllm.research.pipeline.forward import PipelineRunner, check_stages
from jaxllm.research.pipeline.stage_layers import assign_layers
from jaxllm.research.plan import communication, memory
from jaxllm.research.plan.collective import Collective, StepSizes, rows_per_device
from jaxllm.research.plan.hardware import Hardware
from jaxllm.sharding.context_parallel import dispatch, sequence_parallel
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import local_config
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
    def rows(self) -> int:
        """The rows of a device."""
        return rows_per_device(self.axes, self.batch)

    @property
    def microbatches(self) -> int:
        """The number of microbatches in flight in a pipeline, while it decodes."""
        if self.groups is None:
            return min(self.axes.stage, self.rows)
        if self.rows % self.groups:
            raise ConfigError(
                f"{self.rows} rows on each of data={self.axes.data} are not divisible by"
                f" {self.groups} microbatches"
            )
        return self.groups

    @property
    def prompt_groups(self) -> int:
        """The number of microbatches of a prompt chunk (`pipeline.forward.PipelineRunner`)."""
        if self.groups is not None or self.axes.stage == 1:
            return self.microbatches
        chunk = StepSizes(
            self.checkpoint.config, self.precision, self.axes, self.batch,
            min(PREFILL_CHUNK, self.context), self.context,
        )  # fmt: skip
        return PipelineRunner(self.axes.stage).count_microbatches(self.rows, chunk.local_tokens)

    def step(self, tokens: int) -> StepSizes:
        """Return the sizes of a step of `tokens` tokens per row."""
        groups = self.microbatches if tokens == 1 else self.prompt_groups
        return StepSizes(
            self.checkpoint.config, self.precision, self.axes, self.batch, tokens, self.context,
            self.deterministic_sums, groups,
        )  # fmt: skip


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
    axes, h, rows, groups = query.axes, query.hardware, query.rows, query.prompt_groups
    weights = memory.weight_bytes(
        query.checkpoint, query.precision, axes, query.deterministic_sums, rows
    )
    chunk = min(PREFILL_CHUNK, query.context)
    prompt = query.step(chunk)
    decode = communication.step_collectives(query.step(1))
    prefill = communication.step_collectives(prompt)

    def cache_and_working_bytes(batch: int, slots: int) -> tuple[int, int]:
        step = dataclasses.replace(
            prompt, batch=batch, slots=slots, tokens=min(PREFILL_CHUNK, slots), groups=groups
        )
        return memory.cache_bytes(step), memory.working_bytes(step)

    def total_bytes(batch: int, slots: int) -> int:
        return weights.total + sum(cache_and_working_bytes(batch, slots))

    cache, working = cache_and_working_bytes(query.batch, query.context)
    ring = 1 if axes.use_ulysses else axes.sequence  # the context must be a multiple
    flops, attention_flops = _flops(query), _attention_flops(query)
    work = rows * (prompt.local_tokens * flops + chunk * attention_flops / 2) / h.flops
    tick = max(weights.read_per_step / h.bandwidth, work / groups)
    seconds = (groups + axes.stage - 1) * tick + _collective_seconds(prefill, query)
    return Plan(
        query,
        weights,
        cache,
        working,
        decode,
        prefill,
        (weights.read_per_step + cache) / h.bandwidth,
        rows * (flops + attention_flops) / h.flops,
        _collective_seconds(decode, query),
        -(-query.context // chunk) * seconds,
        _largest_fit(lambda n: total_bytes(n, query.context), h),
        _largest_fit(lambda n: total_bytes(query.batch, n * ring), h) * ring,
    )


def _check_mesh(query: PlanQuery) -> None:
    """Raise ConfigError if the model does not run on the mesh (`sharding.make_sharded_model`)."""
    config, axes = query.checkpoint.config, query.axes
    dispatch.check_context_parallel(local_config(config, axes), axes, query.deterministic_sums)
    sequence_parallel.check(axes, query.deterministic_sums)
    check_stages(config, query.precision, PipelineRunner(axes.stage))


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


def _attention_flops(query: PlanQuery) -> float:
    """Return the flops of one token's attention to `context` slots, on one device."""
    config, axes = query.checkpoint.config, query.axes
    widths = sum(map(config.layer_head_dim, range(config.num_hidden_layers)))
    channels = config.num_attention_heads * widths * _stage_imbalance(query)
    devices = axes.tensor * axes.kv_replicas * axes.stage * axes.sequence
    return 4 * channels * query.context / devices


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
