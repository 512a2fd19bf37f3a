"""The pipelined forward pass: microbatches of rows go from stage to stage, one tick each.

It is the `LayerRunner` of a model whose device has the layers of one stage, inside `jax.shard_map`.
Ticks follow the table of `schedule.forward_only`. An idle stage runs nothing; but if attention
needs all devices at once (`ParallelHooks.global_sync`), it computes on invalid data. Its results
are never used: keys and values are taken only from the ticks of its jobs.
"""

import dataclasses
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, TokenError
from jaxllm.models.layers import AttentionContext, Layer
from jaxllm.research.pipeline.schedule import Schedule, forward_only
from jaxllm.research.pipeline.stage_layers import AXIS, assign_layers, run_places
from jaxllm.runtime.validation import check_int
from jaxllm.sharding.context_parallel.ring import pass_on
from jaxllm.weights.precision import Precision

MIN_TOKENS = 64  # tokens per microbatch; with fewer, reading the weights bounds the time of a tick


@dataclasses.dataclass(frozen=True)
class PipelineRunner:
    """Runs the layers of a pipeline stage."""

    stages: int
    chunks: int = 1  # runs of layers in a stage (see `schedule`)
    # None: as many as divide the rows and have `MIN_TOKENS` tokens each, up to four per stage, at
    # which less than a fifth of the ticks is idle.
    microbatches: int | None = None

    def count_microbatches(self, rows: int, tokens: int) -> int:
        """Return the number of microbatches for `rows` rows of `tokens` tokens.

        Raises:
            TokenError: if the rows are not divisible.
        """
        if self.microbatches is None:
            most = max(1, min(4 * self.stages, rows * tokens // MIN_TOKENS))
            return max(m for m in range(1, min(most, rows) + 1) if rows % m == 0)
        if rows % self.microbatches:
            raise TokenError(
                f"{rows} rows are not divisible into {self.microbatches} microbatches. Use a"
                " multiple of them, or another number of microbatches"
            )
        return self.microbatches

    def __call__(
        self, blocks: Sequence[nn.Module], x: jax.Array, context: AttentionContext, remat: bool
    ) -> tuple[tuple[Layer, ...], jax.Array]:
        """Run this stage's layers on all rows.

        Args:
            blocks: of all layers of the model, by number.

        Returns:
            This stage's layers, and the output of the last stage, on all stages.
        """
        count = self.count_microbatches(*context.position_BT.shape)
        table = forward_only(self.stages, count, self.chunks)
        layers_by_stage = assign_layers(blocks[0].config, self.stages, self.chunks)
        each = len(layers_by_stage[0]) // self.chunks
        chunks = [range(i, i + each) for i in range(0, each * self.chunks, each)]
        stage, rows = jax.lax.axis_index(AXIS), x.shape[0] // count

        def work(number: jax.Array, chunk: jax.Array, message: jax.Array) -> Any:
            new, begins = take_microbatch(x, number, count), (stage == 0) & (chunk == 0)
            read = jnp.where(begins, new, message)

            # Each chunk slices its own rows of the cache: those of other chunks are not copied.
            def run(places: range, x: jax.Array, number: jax.Array) -> tuple[Layer, ...]:
                part = slice_context(context, number, count)
                return run_places(blocks, layers_by_stage, places, x, part, remat)[0]

            return jax.lax.switch(chunk, [partial(run, some) for some in chunks], read, number)

        blank_x = jnp.zeros((rows, *x.shape[1:]), x.dtype)
        zero = jnp.zeros((), jnp.int32)
        form = jax.eval_shape(lambda: work(zero, zero, blank_x))

        def blank() -> Any:
            return jax.tree.map(lambda f: jnp.zeros(f.shape, f.dtype), form)

        def tick(message: jax.Array, jobs: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
            number, chunk, busy = (job[stage] for job in jobs)
            job = partial(work, number, chunk, message)
            layers = job() if context.hooks.global_sync else jax.lax.cond(busy, job, blank)
            return pass_on(layers[-1].x, AXIS), layers

        _, ticks = jax.lax.scan(tick, blank_x, _job_arrays(table))
        when = jnp.asarray(_job_ticks(table))[stage]  # [chunks, microbatches]

        def gather_chunk(at: jax.Array, y: jax.Array) -> jax.Array:
            """Select a chunk's jobs from all ticks `[ticks, rows, ...]`, as `[B, ...]`."""
            return jnp.take(y, at, axis=0).reshape(-1, *y.shape[2:])

        layers = tuple(
            jax.tree.map(partial(gather_chunk, when[chunk]), layer)
            for chunk in range(self.chunks)
            for layer in ticks
        )
        last = jnp.where(stage == self.stages - 1, layers[-1].x, 0)
        return layers, jax.lax.psum(last, AXIS)


def check_stages(config: ModelConfig, precision: Precision, runner: PipelineRunner) -> None:
    """Raise ConfigError if a model's layers cannot be run so; the message has size and axis."""
    check_int("stages", runner.stages, 1, error=ConfigError)
    check_int("chunks of a stage", runner.chunks, 1, error=ConfigError)
    if runner.microbatches is not None:
        check_int("microbatches", runner.microbatches, 1, error=ConfigError)
    if runner.stages == 1:
        return
    if any(re.search(r"\d", regex) for regex, _ in precision.overrides):
        raise ConfigError(
            "precision overrides that name layers by number cannot be combined with stages, which"
            " all run one program. Name modules without a layer number, or use stage=1"
        )
    assign_layers(config, runner.stages, runner.chunks)


def take_microbatch(x: jax.Array, number: jax.Array, count: int) -> jax.Array:
    """Return microbatch `number` of `count` from `[B, ...]`."""
    if count == 1:
        return x
    microbatch: jax.Array = x.reshape(count, -1, *x.shape[1:])[number]
    return microbatch


def slice_context(context: AttentionContext, number: jax.Array, count: int) -> AttentionContext:
    """Slice the context of one microbatch; segments that all rows share stay whole."""
    batch = context.position_BT.shape[0]

    def part(x: Any) -> Any:
        return take_microbatch(x, number, count) if x.shape[0] == batch else x

    fields = context._asdict()
    fixed = {name: fields.pop(name) for name in ("mass", "hooks", "read", "packed")}
    parts: dict[str, Any] = jax.tree.map(part, fields)
    return AttentionContext(**parts, **fixed)


def _job_arrays(table: Schedule) -> tuple[jax.Array, ...]:
    """Return the microbatch and chunk of each stage at each tick, int32, and whether it is busy."""
    jobs = [
        [(0, 0, 0) if j is None else (j.microbatch, j.chunk, 1) for j in row] for row in table.ticks
    ]
    number, chunk, busy = np.moveaxis(np.array(jobs, np.int32), 2, 0)
    return jnp.asarray(number), jnp.asarray(chunk), jnp.asarray(busy > 0)


def _job_ticks(table: Schedule) -> np.ndarray:
    """Return the tick of each job, int32 `[stages, chunks, microbatches]`."""
    job_ticks = np.zeros((table.stages, table.chunks, table.microbatches), np.int32)
    for tick, row in enumerate(table.ticks):
        for stage, job in enumerate(row):
            if job is not None:
                job_ticks[stage, job.chunk, job.microbatch] = tick
    return job_ticks
