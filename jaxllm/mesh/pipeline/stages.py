"""Layers in stages: microbatches of rows go from device to device, one tick a stage.

This is the `Course` of a model of which a device has its stage's layers, inside `jax.shard_map`.
Ticks go by the table of `schedule.forward`. A stage that waits runs nothing, or where attention is
of all devices at once (`Across.at_once`) whatever it has. What comes of such a tick is never looked
at: keys and values are taken from the ticks of its jobs alone.
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

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, TokenError
from jaxllm.mesh.pipeline.places import AXIS, layers_of, run_places
from jaxllm.mesh.pipeline.schedule import Schedule, forward
from jaxllm.models.layers import Layer, Scope
from jaxllm.weights.precision import Precision
from jaxllm.whole import whole

LEAST = 64  # tokens of a microbatch: with fewer, a tick takes what reading the weights takes


@dataclasses.dataclass(frozen=True)
class Stages:
    """How the layers of a pipeline's stage are run.

    chunks: runs of layers that a stage has (see `schedule`). microbatches: into how many the rows
    are divided; None: as many as divide them and keep `LEAST` tokens in each, up to four for each
    stage, beyond which less than a fifth is idle.
    """

    stages: int
    chunks: int = 1
    microbatches: int | None = None

    def divided(self, rows: int, tokens: int) -> int:
        """Into how many microbatches so many rows of so many tokens go.

        Raises TokenError where rows do not divide.
        """
        if self.microbatches is None:
            most = max(1, min(4 * self.stages, rows * tokens // LEAST))
            return max(m for m in range(1, min(most, rows) + 1) if rows % m == 0)
        if rows % self.microbatches:
            raise TokenError(
                f"{rows} rows do not divide into {self.microbatches} microbatches: give rows in"
                " multiples of them, or other microbatches"
            )
        return self.microbatches

    def __call__(
        self, blocks: Sequence[nn.Module], x: jax.Array, scope: Scope, remat: bool
    ) -> tuple[tuple[Layer, ...], jax.Array]:
        """This stage's layers of all rows, and what the last stage puts out, on all of them.

        blocks: of all layers of the model, by number.
        """
        count = self.divided(*scope.position_BT.shape)
        table = forward(self.stages, count, self.chunks)
        layers_by_stage = layers_of(blocks[0].config, self.stages, self.chunks)
        each = len(layers_by_stage[0]) // self.chunks
        chunks = [range(i, i + each) for i in range(0, each * self.chunks, each)]
        stage, rows = jax.lax.axis_index(AXIS), x.shape[0] // count
        ring = [(i, (i + 1) % self.stages) for i in range(self.stages)]

        def work(number: jax.Array, chunk: jax.Array, message: jax.Array) -> Any:
            new, begins = rows_of(x, number, count), (stage == 0) & (chunk == 0)
            read = jnp.where(begins, new, message)

            # Each takes its rows of the cache itself: those of another chunk are not copied.
            def run(places: range, x: jax.Array, number: jax.Array) -> tuple[Layer, ...]:
                part = part_of(scope, number, count)
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
            layers = job() if scope.across.at_once else jax.lax.cond(busy, job, blank)
            return jax.lax.ppermute(layers[-1].x, AXIS, ring), layers

        _, ticks = jax.lax.scan(tick, blank_x, _jobs(table))
        when = jnp.asarray(_when(table))[stage]  # [chunks, microbatches]

        def gathered(y: jax.Array, chunk: int) -> jax.Array:
            """Of all ticks `[ticks, rows, ...]` those of a chunk's jobs, as `[B, ...]`."""
            return jnp.take(y, when[chunk], axis=0).reshape(-1, *y.shape[2:])

        layers = tuple(
            jax.tree.map(lambda y, chunk=chunk: gathered(y, chunk), layer)
            for chunk in range(self.chunks)
            for layer in ticks
        )
        last = jnp.where(stage == self.stages - 1, layers[-1].x, 0)
        return layers, jax.lax.psum(last, AXIS)


def check_stages(config: ModelConfig, precision: Precision, course: Stages) -> None:
    """Raises ConfigError where a model's layers cannot be run so: by size and axis."""
    whole("stages", course.stages, 1, error=ConfigError)
    whole("chunks of a stage", course.chunks, 1, error=ConfigError)
    if course.microbatches is not None:
        whole("microbatches", course.microbatches, 1, error=ConfigError)
    if course.stages == 1 and (course.chunks > 1 or course.microbatches is not None):
        raise ConfigError("chunks and microbatches are of stages: give a mesh with stage=2 or more")
    if course.stages == 1:
        return
    if any(re.search(r"\d", regex) for regex, _ in precision.overrides):
        raise ConfigError(
            "precision overrides that name layers by number do not go with stages, each of which"
            " runs the same program: name kinds of linears, or use stage=1"
        )
    layers_of(config, course.stages, course.chunks)


def rows_of(x: jax.Array, number: jax.Array, count: int) -> jax.Array:
    """A microbatch of `[B, ...]` by its number, of `count`."""
    if count == 1:
        return x
    found: jax.Array = x.reshape(count, -1, *x.shape[1:])[number]
    return found


def part_of(scope: Scope, number: jax.Array, count: int) -> Scope:
    """What a microbatch may attend to; segments that all rows share stay whole."""
    batch = scope.position_BT.shape[0]

    def part(x: Any) -> Any:
        return rows_of(x, number, count) if x.shape[0] == batch else x

    fields = scope._asdict()
    fixed = {name: fields.pop(name) for name in ("mass", "across")}
    parts: dict[str, Any] = jax.tree.map(part, fields)
    return Scope(**parts, **fixed)


def _jobs(table: Schedule) -> tuple[jax.Array, ...]:
    """Of each tick each stage's microbatch and chunk, int32, and whether it has one."""
    jobs = [
        [(0, 0, 0) if j is None else (j.microbatch, j.chunk, 1) for j in row] for row in table.ticks
    ]
    number, chunk, busy = np.moveaxis(np.array(jobs, np.int32), 2, 0)
    return jnp.asarray(number), jnp.asarray(chunk), jnp.asarray(busy > 0)


def _when(table: Schedule) -> np.ndarray:
    """The tick of each job, int32 `[stages, chunks, microbatches]`."""
    found = np.zeros((table.stages, table.chunks, table.microbatches), np.int32)
    for tick, row in enumerate(table.ticks):
        for stage, job in enumerate(row):
            if job is not None:
                found[stage, job.chunk, job.microbatch] = tick
    return found
