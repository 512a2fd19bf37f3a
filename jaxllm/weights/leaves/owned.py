"""Expert parallelism: each device of a mesh axis owns some whole experts.

It is used inside `jax.shard_map`, in place of a mixture's expert stacks. It is here and not in
`mesh`, since models import weight types but not meshes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.weights.leaves.wrapped import Wrapped

Run = Callable[[jax.Array, jax.Array], jax.Array]  # rows [A, D] and their experts [A] to [A, D]

AMPLE = 1.5  # size of the smaller buffer, as a multiple of an even share of rows


class Owned(Wrapped, struct.PyTreeNode):
    """Some experts of a stack `[E, O, I]`, the same number on each device along `over`, in order.

    Every row gets exactly its expert's output; none is dropped.
    """

    kind = "owned/"

    weight: Any
    over: str = struct.field(pytree_node=False)
    # Each device has rows of its own, which are sent to their experts and back (all-to-all).
    # Otherwise all have the same rows, run their own experts, and sum the results.
    apart: bool = struct.field(pytree_node=False)

    def run(self, x_AD: jax.Array, expert_A: jax.Array, run: Run) -> jax.Array:
        """Run each row's expert, on the device that owns it: float32 `[A, D]`.

        Args:
            expert_A: expert numbers among all; -1: none, and the result is 0.
            run: runs the local experts, by local numbers.
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
        # All devices use one buffer size: the first that fits the fullest device.
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
    """Send each part of `[devices * size, ...]` to its device, and return those received."""
    return jax.lax.all_to_all(buffer, over, split_axis=0, concat_axis=0, tiled=True)
