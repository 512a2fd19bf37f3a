"""A loss and its gradient by a pipeline schedule: 1F1B, interleaved 1F1B or GPipe.

`jax.grad` of a pipelined model runs all microbatches forward before it goes back, and stores what
each needs until then. Here each stage follows a table, one job per tick, and stores only the inputs
of the microbatches in flight: a backward job recomputes its layers. The loss is an ordinary
function whose gradient is computed with its value (`jax.custom_vjp`).

All stages run one program, so a tick takes as long as its longest job. The first stage looks up
tokens and the last computes logits. The token table and the head are sharded over all stages; once
a step, each stage gathers the part of its devices on `tensor`, and the gradients from both ends are
summed on the way back. Logits stay sharded over `tensor`, except in the exact mode.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxllm.errors import ConfigError
from jaxllm.models.layers import AttentionContext, Trace
from jaxllm.research.pipeline.forward import take_microbatch
from jaxllm.research.pipeline.model import StagedModel
from jaxllm.research.pipeline.schedule import SCHEDULES, Job, Schedule, job_dependencies
from jaxllm.research.pipeline.stage_layers import AXIS, run_places
from jaxllm.sharding.context_parallel import sequence_parallel
from jaxllm.sharding.context_parallel.dispatch import ContextParallel
from jaxllm.sharding.context_parallel.ring import pass_on
from jaxllm.sharding.fsdp import FsdpShard
from jaxllm.sharding.local_params import LocalParams
from jaxllm.sharding.mesh_spec import build_mesh
from jaxllm.sharding.partition_rules import HEAD_AXES, AxisNames
from jaxllm.sharding.partition_specs import find_row_axes
from jaxllm.sharding.sharded_model import local_module
from jaxllm.sharding.tensor_parallel import SequenceSlice, VocabParallel
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.types.base import WeightBase

Ints = Any  # int32, of numpy or JAX
# Sums the loss of logits [B, T, V] and rows. The logits are a device's own if they are sharded over
# the mesh axes of the last argument (`ops.token_logprobs`).
Loss = Callable[[jax.Array, Any, AxisNames], jax.Array]


@dataclasses.dataclass(frozen=True)
class PipelineLoss:
    """A pipelined loss, as a static value."""

    model: StagedModel
    schedule: Schedule
    loss: Loss  # a sum over tokens; must be hashable


def make_pipeline_loss(model: Model, loss: Loss, schedule: str, microbatches: int) -> PipelineLoss:
    """Make a pipelined loss.

    Raises:
        ConfigError: for a model without stages, for ring attention, and as `schedule` does.
    """
    if not isinstance(model, StagedModel):
        raise ConfigError(
            f"schedule {schedule!r} requires pipeline stages. Load the model with stage=2 or more"
        )
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r:.40}")
    if model.axes.sequence > 1 and not model.axes.use_ulysses:
        raise ConfigError(
            f"ring attention (mesh {model.axes}) cannot be combined with a schedule: a ring needs"
            " all devices at once, but stages run different jobs. Use sequence="
            f"{model.axes.sequence}:heads, or train without a schedule"
        )
    table = SCHEDULES[schedule](model.axes.stage, microbatches, model.chunks)
    return PipelineLoss(model, table, loss)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_loss(spec: PipelineLoss, params: Params, rows: Any) -> jax.Array:
    """Return the summed loss of rows: float32.

    Args:
        rows: a pytree of `[B, T]` with `token_BT`, `position_BT` and `document_BT`
            (`train.data.rows.Rows`).

    Raises:
        ConfigError: if rows are not divisible into microbatches, or columns over `sequence`.
    """
    return _loss_and_gradient(spec, (), params, rows)[0]


def _forward(spec: PipelineLoss, params: Any, rows: Any) -> tuple[jax.Array, Any]:
    leaves, form = jax.tree.flatten(params, is_leaf=lambda x: hasattr(x, "perturbed"))
    moving = tuple(
        i
        for i, x in enumerate(leaves)
        if x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating)
    )
    values = jax.tree.unflatten(form, [x.value for x in leaves])
    rows = jax.tree.map(lambda x: x.value, rows, is_leaf=lambda x: hasattr(x, "perturbed"))
    total, gradients = _loss_and_gradient(spec, moving, values, rows)
    leaf_gradients: list[Any] = [None] * len(leaves)
    for i, gradient in zip(moving, gradients, strict=True):
        leaf_gradients[i] = gradient
    return total, jax.tree.unflatten(form, leaf_gradients)


def _backward(spec: PipelineLoss, gradients: Any, cotangent: Any) -> tuple[Any, None]:
    return jax.tree.map(
        lambda g: (g.astype(cotangent.dtype) * cotangent).astype(g.dtype), gradients
    ), None


sum_loss.defvjp(_forward, _backward, symbolic_zeros=True)


class ScheduleArrays(NamedTuple):
    """A schedule as arrays `[ticks, stages]`: the job of each stage, and the buffers that it uses.

    Each stage has numbered buffers for inputs (x) and for gradients (g). Unused entries are the
    last buffer.
    """

    kind: Ints  # 0 idle, 1 forward, 2 backward
    number: Ints  # the microbatch
    chunk: Ints
    x_in: Ints  # where the input that arrives from a neighbor is stored
    x_at: Ints  # where the job's input is
    g_in: Ints  # where the gradient that arrives from a neighbor is stored
    g_at: Ints  # where the job's gradient is


def make_schedule_arrays(schedule: Schedule) -> tuple[ScheduleArrays, int, int]:
    """Return the arrays, and how many buffers a stage needs for inputs and for gradients."""
    p, v, shape = schedule.stages, schedule.chunks, (len(schedule.ticks), schedule.stages)
    done = {
        (stage, job): tick
        for tick, row in enumerate(schedule.ticks)
        for stage, job in enumerate(row)
        if job is not None
    }
    begins = {True: (0, 0), False: (p - 1, v - 1)}  # from tokens, from the loss: nothing arrives
    stays: dict[bool, list[list[Lifetime]]] = {
        kind: [[] for _ in range(p)] for kind in (True, False)
    }
    for stage, job in done:
        if (stage, job.chunk) != begins[job.forward]:
            comes = done[job_dependencies(p, v, stage, job)[-1]] + 1
            until = done[stage, job._replace(forward=False)]
            stays[job.forward][stage].append((comes, until, job))
    buffers = {kind: [_assign_buffers(each) for each in rows] for kind, rows in stays.items()}
    count = {
        kind: max(max(each.values(), default=-1) for each in rows) + 1
        for kind, rows in buffers.items()
    }
    arrays = {name: np.zeros(shape, np.int32) for name in ScheduleArrays._fields}
    for kind, letter in ((True, "x"), (False, "g")):
        arrays[f"{letter}_in"][:] = arrays[f"{letter}_at"][:] = count[kind]
        for stage, each in enumerate(stays[kind]):
            for comes, _, job in each:
                arrays[f"{letter}_in"][comes, stage] = buffers[kind][stage][job]
    for (stage, job), tick in done.items():
        arrays["kind"][tick, stage] = 1 if job.forward else 2
        arrays["number"][tick, stage], arrays["chunk"][tick, stage] = job.microbatch, job.chunk
        x_at = buffers[True][stage].get(job._replace(forward=True))
        g_at = buffers[False][stage].get(job)
        if x_at is not None:
            arrays["x_at"][tick, stage] = x_at
        if g_at is not None:
            arrays["g_at"][tick, stage] = g_at
    return ScheduleArrays(**arrays), count[True], count[False]


Lifetime = tuple[int, int, Job]  # first and last tick in a buffer, and the job that uses it


def _assign_buffers(lifetimes: Sequence[Lifetime]) -> dict[Job, int]:
    """Assign each the first buffer that is free for its lifetime."""
    buffers: dict[Job, int] = {}
    held: dict[int, int] = {}  # buffer -> last tick of its use
    for comes, until, job in sorted(lifetimes):
        place = next(i for i in range(len(held) + 1) if held.get(i, -1) < comes)
        held[place], buffers[job] = until, place
    return buffers


def _loss_and_gradient(
    spec: PipelineLoss, trainable: tuple[int, ...], params: Params, rows: Any
) -> tuple[jax.Array, list[jax.Array]]:
    """Return the loss, and its gradient by the parameter arrays with the indices `trainable`."""
    model, (batch, columns) = spec.model, jax.tree.leaves(rows)[0].shape
    over = find_row_axes(model.axes, batch)
    context_parallel = ContextParallel(columns, model.axes.sequence, use_ulysses=True)
    share = batch // model.axes.num_shards(over or ())
    if share % spec.schedule.microbatches:
        raise ConfigError(
            f"{share} rows per device are not divisible into {spec.schedule.microbatches}"
            " microbatches"
        )
    if context_parallel.is_split and len(context_parallel.column_order) != columns:
        raise ConfigError(
            f"row length must be a multiple of {2 * context_parallel.devices} for"
            f" sequence={context_parallel.devices}, got {columns}. Pad rows to"
            f" {len(context_parallel.column_order)}"
        )
    token_slice = sequence_parallel.make_token_slice(model.axes, context_parallel.local_columns)
    local = model.local_params(params, over, token_slice)
    flat = jax.tree.leaves(local.specs)
    # Replicas compute the same loss; each counts a part of it, as the transpose of psum needs.
    apart = batch // share * (context_parallel.devices if context_parallel.is_split else 1)
    copies = model.axes.num_devices // (model.axes.stage * apart)

    def run(params: Params, rows: Any) -> tuple[jax.Array, list[jax.Array]]:
        total, gradients = _run_stage(
            spec, trainable, 1 / copies, local, context_parallel, params, rows
        )
        summed = [
            jax.lax.psum(g, tuple(n for n in model.axes.names if n not in _spec_axes(flat[i])))
            for i, g in zip(trainable, gradients, strict=True)
        ]
        return jax.lax.psum(total / copies, model.axes.names), summed

    spread = jax.shard_map(
        run,
        mesh=build_mesh(model.axes),
        in_specs=(local.specs, P(over, context_parallel.axis)),
        out_specs=(P(), [flat[i] for i in trainable]),
        check_vma=False,
    )
    result: tuple[jax.Array, list[jax.Array]] = spread(params, rows)
    return result


def _spec_axes(spec: P) -> set[str]:
    """Return the mesh axes that split an array."""
    entries = (() if x is None else (x,) if isinstance(x, str) else x for x in spec)
    return {name for entry in entries for name in entry}


def _run_stage(
    spec: PipelineLoss,
    trainable: tuple[int, ...],
    seed: float,
    local: LocalParams,
    context_parallel: ContextParallel,
    params: Params,
    rows: Any,
) -> tuple[jax.Array, list[jax.Array]]:
    """Return this device's part of loss and gradient. `seed` is the cotangent of the loss."""
    count, stages, chunks = spec.schedule.microbatches, spec.schedule.stages, spec.schedule.chunks
    arrays, form = jax.tree.flatten(params)

    def prepare_params(*moved: jax.Array) -> Any:
        some = dict(zip(trainable, moved, strict=True))
        params = jax.tree.unflatten(form, [some.get(i, x) for i, x in enumerate(arrays)])
        return map_leaves(partial(_prepare_leaf, local, logit_axes(spec.model)), params)

    still, inner = jax.tree.flatten(prepare_params(*(arrays[i] for i in trainable)))

    def select_trainable(*moved: jax.Array) -> list[jax.Array]:
        leaves = jax.tree.leaves(prepare_params(*moved))
        return [leaves[i] for i in trainable]

    moved, back = jax.vjp(select_trainable, *(arrays[i] for i in trainable))
    stage, parts = jax.lax.axis_index(AXIS), _ModelParts(spec, context_parallel, local.token_slice)

    def run_chunk(
        moved: list[jax.Array], x: jax.Array, number: jax.Array, chunk: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        some = dict(zip(trainable, moved, strict=True))
        params = jax.tree.unflatten(inner, [some.get(i, y) for i, y in enumerate(still)])
        batch = jax.tree.map(lambda y: take_microbatch(y, number, count), rows)
        begins, ends = (stage == 0) & (chunk == 0), (stage == stages - 1) & (chunk == chunks - 1)
        x = jax.lax.cond(begins, lambda: parts.embed_tokens(params, batch), lambda: x)
        x = jax.lax.switch(
            chunk, [partial(parts.run_chunk, c) for c in range(chunks)], params, x, batch
        )
        nothing = jnp.zeros((), jnp.float32)
        return x, jax.lax.cond(ends, lambda: parts.compute_loss(params, x, batch), lambda: nothing)

    table, x_places, g_places = make_schedule_arrays(spec.schedule)
    zero = jnp.zeros((), jnp.int32)
    params_of = jax.tree.unflatten(inner, still)
    first = jax.tree.map(lambda y: take_microbatch(y, zero, count), rows)
    form_x = jax.eval_shape(lambda: parts.embed_tokens(params_of, first))
    blank = jnp.zeros(form_x.shape, form_x.dtype)

    def tick(carry: Any, jobs: ScheduleArrays) -> tuple[Any, None]:
        inputs, slopes, x, g, total, gradients = carry
        job = ScheduleArrays(*(row[stage] for row in jobs))
        inputs, slopes = inputs.at[job.x_in].set(x), slopes.at[job.g_in].set(g)
        held, slope = inputs[job.x_at], slopes[job.g_at]
        last = (stage == stages - 1) & (job.chunk == chunks - 1)

        def wait() -> Any:
            return blank, blank, total, gradients

        def run_forward() -> Any:
            y, _ = run_chunk(moved, held, job.number, job.chunk)
            return y, blank, total, gradients

        def run_backward() -> Any:
            (_, loss), pull = jax.vjp(
                lambda moved, x: run_chunk(moved, x, job.number, job.chunk), moved, held
            )
            dy = jnp.where(last, jnp.zeros_like(slope), slope)
            more, dx = pull((dy, jnp.full((), seed, jnp.float32)))
            return blank, dx, total + loss, jax.tree.map(jnp.add, gradients, more)

        y, dx, total, gradients = jax.lax.switch(job.kind, [wait, run_forward, run_backward])
        x, g = pass_on(y, AXIS), pass_on(dx, AXIS, step=-1)
        return (inputs, slopes, x, g, total, gradients), None

    x_buffers, g_buffers = (
        jnp.zeros((count + 1, *blank.shape), blank.dtype) for count in (x_places, g_places)
    )
    none = [jnp.zeros_like(x) for x in moved]
    start = (x_buffers, g_buffers, blank, blank, jnp.zeros((), jnp.float32), none)
    carry, _ = jax.lax.scan(tick, start, ScheduleArrays(*map(jnp.asarray, table)))
    return carry[4], list(back(carry[5]))


class _ModelParts:
    """The parts of a model, each as a function of its parameters and of rows."""

    def __init__(
        self, spec: PipelineLoss, context_parallel: ContextParallel, stream: SequenceSlice | None
    ) -> None:
        self._module, self._loss = local_module(spec.model), spec.loss
        self._size, self._over = spec.model.config.vocab_size, logit_axes(spec.model)
        self._chunks, self._context_parallel, self._table = (
            spec.schedule.chunks,
            context_parallel,
            spec.model.layer_table,
        )
        whole = None if stream is None else stream.gather
        self._hooks = context_parallel.make_hooks()._replace(gather_tokens=whole)

    def embed_tokens(self, params: Params, rows: Any) -> jax.Array:
        """Return the input of the first layer."""
        return self._run(params, rows, lambda blocks, x, context, remat: ((), x)).embeddings

    def run_chunk(self, chunk: int, params: Params, x: jax.Array, rows: Any) -> jax.Array:
        """Return the output of a chunk's layers."""
        outputs = []

        def run_layers(
            blocks: Sequence[nn.Module], _: Any, context: AttentionContext, remat: bool
        ) -> Any:
            each = len(self._table[0]) // self._chunks
            places = range(chunk * each, (chunk + 1) * each)
            outputs.append(run_places(blocks, self._table, places, x, context, remat)[1])
            return (), outputs[0]

        self._run(params, rows, run_layers)
        return outputs[0]

    def compute_loss(self, params: Params, x: jax.Array, rows: Any) -> jax.Array:
        """Return the loss of the last layer's output."""
        trace = self._run(params, rows, lambda blocks, _, context, remat: ((), x))
        if not self._over:
            return self._loss(trace.logits, rows, ())
        logits_BTV = trace.logits
        size = logits_BTV.shape[-1]
        left = self._size - jax.lax.axis_index(self._over) * size  # of the vocabulary
        own_V = jax.lax.iota(jnp.int32, size) < left
        return self._loss(jnp.where(own_V[None, None], logits_BTV, -jnp.inf), rows, self._over)

    def _run(self, params: Params, rows: Any, run_layers: Any) -> Trace:
        position_BT = rows.position_BT
        last_B = position_BT.max(axis=1)
        trace: Any = self._module.clone(runner=run_layers).apply(
            {"params": params},
            jnp.where(position_BT >= 0, rows.token_BT, 0),
            position_BT,
            (
                jax.lax.pmax(last_B, self._context_parallel.axis)
                if self._context_parallel.is_split
                else last_B
            )
            + 1,
            document_BT=rows.document_BT,
            hooks=self._hooks,
        )
        full_trace: Trace = trace
        return full_trace


def logit_axes(model: StagedModel) -> AxisNames:
    """Return the axes that split a stage's logits."""
    return () if model.exact or model.axes.num_shards(HEAD_AXES) == 1 else HEAD_AXES


def _prepare_leaf(local: LocalParams, over: AxisNames, path: str, part: Any) -> Any:
    """Return the module's form of a parameter; tables are gathered from the other stages."""
    rule, axes = local.model.find_rule(path), local.model.axes
    if rule.kind != "vocabulary" or axes.num_shards(rule.axis_names) == 1:
        return local.wrap_leaf(path, part)
    shard = local.local_shard(path, part)
    shard = shard.gather() if isinstance(shard, FsdpShard) else shard
    if isinstance(shard, WeightBase):
        raise ConfigError(
            f"{path} must be unquantized to train with a schedule of microbatches, got"
            f" {shard.format}. Load it unquantized, or train without a schedule"
        )
    table = jax.lax.all_gather(shard, AXIS, axis=0, tiled=True)
    rows = local.model.config.vocab_size
    if axes.num_shards(HEAD_AXES) == 1:
        return table[:rows]
    return VocabParallel(table, HEAD_AXES, rows, local.token_slice, keep_sharded=bool(over))
