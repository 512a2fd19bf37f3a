"""Experts of which each device of a mesh has some, whole ones: rows go to them, or all see all.

It stands inside `jax.shard_map`, in place of the stacks of a mixture's experts; here rather than in
`mesh`, since models know their leaves and no meshes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.weights.leaves.wrapped import Wrapped

Run = Callable[[jax.Array, jax.Array], jax.Array]  # of rows [A, D] and their experts [A]: [A, D]

AMPLE = 1.5  # times an even share of rows: what a device has room for before it has room for all


class Owned(Wrapped, struct.PyTreeNode):
    """Some experts of a stack `[E, O, I]`, as many on each device along `over`, in their order.

    apart: whether each device has rows of its own, which are then sent to where their experts are
    (all-to-all) and back; otherwise all have the same rows, run those of their own experts and add
    up what comes of them. Both give each row the number of its expert, and no row is lost.
    """

    kind = "owned/"

    weight: Any
    over: str = struct.field(pytree_node=False)
    apart: bool = struct.field(pytree_node=False)

    def run(self, x_AD: jax.Array, expert_A: jax.Array, run: Run) -> jax.Array:
        """What `run` of each device's own experts makes of rows, float32 `[A, D]`; expert_A: by
        their numbers among all; zeros where there is none (-1).
        """
        mine = self.stored.shape[0]
        if not self.apart:
            own_A = expert_A - jax.lax.axis_index(self.over) * mine
            own_A = jnp.where((own_A >= 0) & (own_A < mine), own_A, -1)
            return jax.lax.psum(run(x_AD, own_A), self.over)
        devices, rows = jax.lax.axis_size(self.over), x_AD.shape[0]
        to_A = jnp.where(expert_A >= 0, expert_A // mine, devices)
        sent_An = (to_A[:, None] == jnp.arange(devices)[None]).astype(jnp.int32)
        place_A = ((jnp.cumsum(sent_An, axis=0) - 1) * sent_An).sum(axis=1)
        # Buffers have one size for all: the first that has room for what the fullest must take.
        ample = min(rows, -(-int(AMPLE * rows) // devices))
        sizes = [ample, rows] if ample < rows else [rows]

        def exchanged(size: int) -> jax.Array:
            slot_A = jnp.where(to_A < devices, to_A * size + place_A, devices * size)

            def sent(x: jax.Array, blank: int) -> jax.Array:
                buffer = jnp.full((devices * size, *x.shape[1:]), blank, x.dtype)
                return _swapped(buffer.at[slot_A].set(x, mode="drop"), self.over)

            x_SD, expert_S = sent(x_AD, 0), sent(expert_A % mine, -1)
            order_S = jnp.argsort(expert_S, stable=True)  # an expert's rows together
            y_SD = run(x_SD[order_S], expert_S[order_S])[jnp.argsort(order_S)]
            back = _swapped(y_SD, self.over)
            return back.at[slot_A].get(mode="fill", fill_value=0)

        most = jax.lax.pmax(sent_An.sum(axis=0).max(), self.over)
        which = sum((most > size).astype(jnp.int32) for size in sizes[:-1])
        if len(sizes) == 1:
            return exchanged(rows)
        found: jax.Array = jax.lax.switch(
            which, [lambda size=size: exchanged(size) for size in sizes]
        )
        return found


def _swapped(buffer: jax.Array, over: str) -> jax.Array:
    """Each part of `[devices * size, ...]` to its device, and what they send in their order."""
    return jax.lax.all_to_all(buffer, over, split_axis=0, concat_axis=0, tiled=True)
