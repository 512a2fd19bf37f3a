"""Writes new entries to a cache with sharded slots: each device writes those in its own slots."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.cache.kv import Segment
from jaxllm.cache.slot_update import NO_SLOT, delay_entries, write_at_cursor
from jaxllm.sharding import partition_specs
from jaxllm.sharding.context_parallel.dispatch import AXIS, ContextParallel
from jaxllm.sharding.context_parallel.ring import pass_on
from jaxllm.sharding.mesh_spec import MeshSpec, build_mesh


@dataclasses.dataclass(frozen=True)
class SplitCacheWriter:
    """`cache.slot_update.write_at_cursor` for a tail with S / n slots on each of n devices.

    Split entries rotate over the devices, so that none ever holds all of them.
    """

    axes: MeshSpec

    def __call__(
        self, cursor: jax.Array, tail: Segment, new: Segment, wait_for: tuple[jax.Array, ...]
    ) -> Segment:
        columns, devices = new.position_BS.shape[1], self.axes.sequence
        if tail.position_BS.shape[1] % devices:
            return write_at_cursor(cursor, tail, new, wait_for)
        split = ContextParallel(columns, devices).is_split and columns % devices == 0
        rows, groups = (
            partition_specs.find_row_axes(self.axes, tail.position_BS.shape[0]),
            partition_specs.cache_head_axes(self.axes),
        )
        here, there = (P(rows, axis, groups) for axis in (AXIS, AXIS if split else None))
        write = jax.shard_map(
            partial(_write_local, split),
            mesh=build_mesh(self.axes),
            in_specs=(P(), here, there),
            out_specs=here,
            check_vma=False,
        )
        entries = (new.k, new.v)
        entries = delay_entries(entries, wait_for[0]) if wait_for else entries
        k, v = write(cursor, (tail.k, tail.v), entries)
        old, marks = ((x.position_BS, x.token_BS, x.patched_BS) for x in (tail, new))
        position, token, patched = write_at_cursor(cursor, old, marks, wait_for)
        return Segment(k, v, position, token, patched)


def _write_local(split: bool, cursor: jax.Array, tail: Any, new: Any) -> Any:
    """Write entries to this device's slots, inside `shard_map`."""
    slots = jax.tree.leaves(tail)[0].shape[1]
    columns, here = jax.tree.leaves(new)[0].shape[1], jax.lax.axis_index(AXIS)

    def write_slots(tail: Any, new: Any, number: Any) -> Any:
        slot_T = cursor + number * columns - here * slots + jnp.arange(columns, dtype=jnp.int32)
        slot_T = jnp.where(slot_T < 0, NO_SLOT, slot_T)

        def write_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[:, slot_T].set(new.astype(old.dtype), mode="drop")

        return jax.tree.map(write_leaf, tail, new)

    if not split:
        return write_slots(tail, new, 0)
    devices = jax.lax.axis_size(AXIS)

    def run_round(carry: Any, number: jax.Array) -> tuple[Any, None]:
        tail, new = carry
        return (write_slots(tail, new, (here - number) % devices), pass_on(new, AXIS)), None

    numbers = jnp.arange(devices - 1, dtype=jnp.int32)
    (tail, new), _ = jax.lax.scan(run_round, (tail, new), numbers)
    return write_slots(tail, new, (here + 1) % devices)
