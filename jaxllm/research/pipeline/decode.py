"""One tick of pipelined decoding: each stage runs one token of a different group of rows.

A token depends on the previous one, which comes from the last stage. So the rows are divided into
as many groups as there are stages, which follow one another: while a group's token is sampled, the
other groups are in the pipeline. At tick t, stage s runs group (t - s) mod p, for token
number (t - s) / p.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.cache.kv import Segment
from jaxllm.models.layers import AttentionContext
from jaxllm.ops.kv_quant import cast
from jaxllm.research.pipeline.stage_layers import AXIS, run_places
from jaxllm.sharding import partition_specs
from jaxllm.sharding.context_parallel.dispatch import AXIS as SEQUENCE, ContextParallel
from jaxllm.sharding.context_parallel.ring import pass_on
from jaxllm.sharding.mesh_spec import build_mesh
from jaxllm.weights.paths import Params

if TYPE_CHECKING:
    from jaxllm.research.pipeline.model import StagedModel


def run_tick(
    model: "StagedModel",
    module: nn.Module,
    params: Params,
    segments: tuple[Segment, ...],
    in_flight: jax.Array,
    number: jax.Array,
    start: jax.Array,
    token_B: jax.Array,
    position_B: jax.Array,
) -> tuple[jax.Array, jax.Array, Segment]:
    """Run each stage's layers on its group, at tick `number`.

    Args:
        module: what one device runs.
        in_flight: the activations between stages.
        start: the slot of each row's first token.
        token_B: the newest tokens; those of the group that enters are used.
        position_B: position of each row's token in the pipeline; -1: none.

    Returns:
        Logits `[B, V]`, valid for the group that leaves the last stage; the activations between
        stages; the last segment with the new keys and values.
    """
    batch, stages = token_B.shape[0], model.axes.stage
    rows = partition_specs.find_row_axes(model.axes, batch)
    local = model.local_params(params, rows)
    context_parallel = ContextParallel(1, model.axes.sequence, model.axes.use_ulysses)
    whole = [
        partition_specs.slot_axis(model.axes, x.position_BS.shape[1]) is None for x in segments
    ]

    def run(
        params: Params, segments: Any, flight: Any, by_row: Any, number: Any, start: Any
    ) -> tuple[jax.Array, jax.Array, tuple[Any, Any]]:
        token_B, position_B = by_row
        stage, size = jax.lax.axis_index(AXIS), token_B.shape[0] // stages
        group, turn = (number - stage) % stages, (number - stage) // stages
        slots = segments[-1].position_BS.shape[1]
        slot = start + turn - (0 if whole[-1] else jax.lax.axis_index(SEQUENCE) * slots)

        def take_group(x: jax.Array, group: jax.Array) -> jax.Array:
            if x.shape[0] == 1 and token_B.shape[0] > 1:
                return x  # shared by all rows
            return jax.lax.dynamic_slice_in_dim(x, group * size, size, axis=0)

        past = [jax.tree.map(lambda x: take_group(x, group), segment) for segment in segments]
        tail = past[-1]
        # The tail already marks the token's slot, but later stages have not filled it yet.
        before_S = jnp.arange(slots) < slot
        past[-1] = tail.replace(position_BS=jnp.where(before_S[None], tail.position_BS, -1))
        read: list[jax.Array] = []

        def run_stage(
            blocks: Sequence[nn.Module], x: jax.Array, context: AttentionContext, remat: bool
        ) -> Any:
            read_x = jnp.where(stage == 0, x, flight)
            table = model.layer_table
            layers, y = run_places(blocks, table, range(len(table[0])), read_x, context, remat)
            read.append(y)
            return layers, jax.lax.psum(jnp.where(stage == stages - 1, y, 0), AXIS)

        # All stages look up the entering tokens: the table is sharded over them.
        position_G1 = take_group(position_B, group)[:, None]
        apply = partial(module.clone(runner=run_stage).apply, {"params": local(params)})
        by_row = {
            "token_BT": take_group(token_B, number % stages)[:, None],
            "position_BT": position_G1,
            "length_B": position_G1[:, 0] + 1,
        }
        trace: Any = context_parallel.run(partial(apply, segments=tuple(past)), by_row, whole, None)
        # A group that has not entered yet, and rows that have ended, have no token in the pipeline
        # and write nothing. Their slot may not exist, or be on another device.
        busy_G = (position_G1[:, 0] >= 0) & (slot >= 0) & (slot < slots)

        def write_entries(old: Any, new: Any) -> Any:
            def put(old: jax.Array, new: jax.Array) -> jax.Array:
                at = (group * size, slot) + (0,) * (old.ndim - 2)
                current = jax.lax.dynamic_slice(old, at, new.shape)
                busy = busy_G.reshape(-1, *[1] * (new.ndim - 1))
                return jax.lax.dynamic_update_slice(old, jnp.where(busy, new, current), at)

            return jax.tree.map(put, old, cast(new, old.dtype))

        last = segments[-1]
        k = tuple(write_entries(old, new) for old, new in zip(last.k, trace.k, strict=True))
        v = tuple(write_entries(old, new) for old, new in zip(last.v, trace.v, strict=True))
        leaving = ((number + 1) % stages) * size
        logits_BV = jnp.zeros((token_B.shape[0], trace.logits.shape[-1]), trace.logits.dtype)
        logits_BV = jax.lax.dynamic_update_slice(logits_BV, trace.logits[:, 0], (leaving, 0))
        return logits_BV, pass_on(read[0], AXIS), (k, v)

    in_segments = tuple(
        partition_specs.segment_specs(segment, batch, rows, model.axes) for segment in segments
    )
    run_sharded = jax.shard_map(
        run,
        mesh=build_mesh(model.axes),
        in_specs=(local.specs, in_segments, P(rows, None, AXIS), P(rows), P(), P()),
        out_specs=(P(rows), P(rows, None, AXIS), (in_segments[-1].k, in_segments[-1].v)),
        check_vma=False,
    )
    by_row = tuple(partition_specs.replicate_for_host(x, model.axes) for x in (token_B, position_B))
    logits_BV, in_flight, (k, v) = run_sharded(params, segments, in_flight, by_row, number, start)
    return (
        partition_specs.replicate_for_host(logits_BV, model.axes),
        in_flight,
        segments[-1].replace(k=k, v=v),
    )
