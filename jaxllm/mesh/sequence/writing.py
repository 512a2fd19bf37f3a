"""Writes new entries to a cache with sharded slots: each device writes those in its own slots."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.cache.kv import Segment
from jaxllm.cache.write import NOWHERE, at_cursor, waiting
from jaxllm.mesh import specs
from jaxllm.mesh.axes import Axes, mesh_of
from jaxllm.mesh.sequence.ring import passed_on
from jaxllm.mesh.sequence.ways import AXIS, Way


@dataclasses.dataclass(frozen=True)
class SplitSlots:
    """Works as `cache.write.at_cursor`, for a tail with S / n slots on each of n devices.

    Split entries rotate over the devices, so that none ever holds all of them.
    """

    axes: Axes

    def __call__(
        self, cursor: jax.Array, tail: Segment, new: Segment, after: tuple[jax.Array, ...]
    ) -> Segment:
        columns, devices = new.position_BS.shape[1], self.axes.sequence
        if tail.position_BS.shape[1] % devices:
            return at_cursor(cursor, tail, new, after)
        split = Way(columns, devices).split and columns % devices == 0
        rows, groups = (
            specs.rows_over(self.axes, tail.position_BS.shape[0]),
            specs.groups(self.axes),
        )
        here, there = (P(rows, axis, groups) for axis in (AXIS, AXIS if split else None))
        write = jax.shard_map(
            partial(_write, split),
            mesh=mesh_of(self.axes),
            in_specs=(P(), here, there),
            out_specs=here,
            check_vma=False,
        )
        entries = (new.k, new.v)
        entries = waiting(entries, after[0]) if after else entries
        k, v = write(cursor, (tail.k, tail.v), entries)
        old, marks = ((x.position_BS, x.token_BS, x.patched_BS) for x in (tail, new))
        position, token, patched = at_cursor(cursor, old, marks, after)
        return Segment(k, v, position, token, patched)


def _write(split: bool, cursor: jax.Array, tail: Any, new: Any) -> Any:
    """Write entries to this device's slots, inside `shard_map`."""
    slots = jax.tree.leaves(tail)[0].shape[1]
    columns, here = jax.tree.leaves(new)[0].shape[1], jax.lax.axis_index(AXIS)

    def put(tail: Any, new: Any, number: Any) -> Any:
        slot_T = cursor + number * columns - here * slots + jnp.arange(columns, dtype=jnp.int32)
        slot_T = jnp.where(slot_T < 0, NOWHERE, slot_T)

        def each(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[:, slot_T].set(new.astype(old.dtype), mode="drop")

        return jax.tree.map(each, tail, new)

    if not split:
        return put(tail, new, 0)
    devices = jax.lax.axis_size(AXIS)

    def turn(carry: Any, number: jax.Array) -> tuple[Any, None]:
        tail, new = carry
        return (put(tail, new, (here - number) % devices), passed_on(new, AXIS)), None

    numbers = jnp.arange(devices - 1, dtype=jnp.int32)
    (tail, new), _ = jax.lax.scan(turn, (tail, new), numbers)
    return put(tail, new, (here + 1) % devices)
