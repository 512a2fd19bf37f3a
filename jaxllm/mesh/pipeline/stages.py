"""Layers in stages: microbatches of rows go from device to device, one tick a stage.

This is the `Course` of a model of which a device has its stage's layers, inside `jax.shard_map`.
Ticks go by the table of `schedule.forward`. A stage that waits runs nothing, or where attention is
of all devices at once (`Across.at_once`) whatever it has. What comes of such a tick is never looked
at: keys and values are taken from the ticks of its jobs alone.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, TokenError
from jaxllm.mesh.pipeline.schedule import Schedule, forward
from jaxllm.models.layers import Layer, Scope, run_blocks
from jaxllm.weights.precision import Precision
from jaxllm.whole import whole

AXIS = "stage"
LEAST = 64  # tokens of a microbatch: with fewer, a tick takes what reading the weights takes

Run = Callable[[jax.Array, Scope], tuple[Layer, ...]]


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
        """This stage's layers of all rows, and what the last stage puts out, on all of them."""
        count = self.divided(*scope.position_BT.shape)
        table = forward(self.stages, count, self.chunks)
        each = len(blocks) // self.chunks
        runs = [apart(blocks[i : i + each], remat) for i in range(0, len(blocks), each)]
        stage, rows = jax.lax.axis_index(AXIS), x.shape[0] // count
        ring = [(i, (i + 1) % self.stages) for i in range(self.stages)]

        def work(number: jax.Array, chunk: jax.Array, message: jax.Array) -> Any:
            new, begins = rows_of(x, number, count), (stage == 0) & (chunk == 0)
            read = jnp.where(begins, new, message)
            # Each takes its rows of the cache itself: those of another chunk are not copied.
            branches = [lambda x, i, run=run: run(x, part_of(scope, i, count)) for run in runs]
            return jax.lax.switch(chunk, branches, read, number)

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


def layers_of(config: ModelConfig, stages: int, chunks: int = 1) -> list[list[int]]:
    """The numbers of the layers that each stage has, in its order.

    Raises ConfigError where they do not divide, where those in one place of two stages compute
    otherwise, and for layers that keep a memory.
    """
    count, parts = config.num_hidden_layers, stages * chunks
    within = f"{stages} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
    if count % parts:
        raise ConfigError(f"num_hidden_layers {count} does not divide into {within}")
    if stages > 1 and any(config.memory(i) is not None for i in range(count)):
        raise ConfigError(
            "layers of this model keep a memory, which goes from segment to segment and not from"
            " stage to stage: use a mesh with stage=1"
        )
    each = count // parts
    table = [
        [(chunk * stages + stage) * each + i for chunk in range(chunks) for i in range(each)]
        for stage in range(stages)
    ]
    kinds = [config.computes(i) for i in range(count)]
    for row in (*table[1:], range(len(table[0]))):  # a cache's arrays go by the last ones' numbers
        for first, other in zip(table[0], row, strict=True):
            if kinds[first] != kinds[other]:
                raise ConfigError(
                    f"layers {first} and {other} compute otherwise (their windows, rotations or"
                    f" kinds of attention differ), but stand in one place of two stages: {within}"
                    " must each begin where the pattern of layers does"
                )
    return table


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


class _Named(nn.Module):
    """Blocks under their own names. made: gives them, as modules that belong to no other."""

    made: Callable[[], Sequence[nn.Module]]
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array, scope: Scope) -> tuple[Layer, ...]:
        blocks = [block.clone(parent=self) for block in self.made()]
        return run_blocks(blocks, x, scope, self.remat)[0]


def apart(blocks: Sequence[nn.Module], remat: bool) -> Run:
    """Layers of a bound model as a function, which JAX may transform."""
    params = {str(block.name): block.variables["params"] for block in blocks}
    free = [block.clone(parent=None) for block in blocks]
    named = _Named(lambda: free, remat)

    def run(x: jax.Array, scope: Scope) -> tuple[Layer, ...]:
        layers: Any = named.apply({"params": params}, x, scope)
        return tuple(layers)

    return run
