"""Expert parallelism: each device of a mesh axis owns some whole experts.

It is used inside `jax.shard_map`, in place of a mixture's expert stacks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.weights.types.base import LocalExperts
from jaxllm.weights.types.wrapper import WeightWrapper

BUFFER_FACTOR = 1.5  # size of the smaller buffer, as a multiple of an even share of rows


class ExpertParallel(WeightWrapper, struct.PyTreeNode):
    """Some experts of a stack `[E, O, I]`, the same number on each device along `axis_name`, in
    order.

    Every row gets exactly its expert's output; none is dropped.
    """

    format_prefix = "owned/"

    weight: Any
    axis_name: str = struct.field(pytree_node=False)
    # Each device has rows of its own, which are sent to their experts and back (all-to-all).
    # Otherwise all have the same rows, run their own experts, and sum the results.
    rows_sharded: bool = struct.field(pytree_node=False)

    def local_experts(self) -> LocalExperts:
        return self.inner.local_experts()._replace(run=self.run_experts)

    def run_experts(
        self, x_AD: jax.Array, expert_A: jax.Array, run: Callable[..., jax.Array]
    ) -> jax.Array:
        """Run each row's expert, on the device that owns it: float32 `[A, D]`.

        Args:
            expert_A: expert numbers among all; -1: none, and the result is 0.
            run: runs the local experts, by local numbers.
        """
        count = self.inner.shape[0]
        if not self.rows_sharded:
            local_A = expert_A - jax.lax.axis_index(self.axis_name) * count
            local_A = jnp.where((local_A >= 0) & (local_A < count), local_A, -1)
            return jax.lax.psum(run(x_AD, local_A), self.axis_name)
        devices, rows = jax.lax.axis_size(self.axis_name), x_AD.shape[0]
        to_A = jnp.where(expert_A >= 0, expert_A // count, devices)
        sent_An = (to_A[:, None] == jnp.arange(devices)[None]).astype(jnp.int32)
        place_A = ((jnp.cumsum(sent_An, axis=0) - 1) * sent_An).sum(axis=1)
        # All devices use one buffer size: the first that fits the fullest device.
        ample = min(rows, -(-int(BUFFER_FACTOR * rows) // devices))
        sizes = [ample, rows] if ample < rows else [rows]

        def exchange_rows(size: int) -> jax.Array:
            slot_A = jnp.where(to_A < devices, to_A * size + place_A, devices * size)

            def send_rows(x: jax.Array, blank: int) -> jax.Array:
                buffer = jnp.full((devices * size, *x.shape[1:]), blank, x.dtype)
                return _all_to_all(buffer.at[slot_A].set(x, mode="drop"), self.axis_name)

            x_SD, expert_S = send_rows(x_AD, 0), send_rows(expert_A % count, -1)
            order_S = jnp.argsort(expert_S, stable=True)  # an expert's rows together
            y_SD = run(x_SD[order_S], expert_S[order_S])[jnp.argsort(order_S)]
            back = _all_to_all(y_SD, self.axis_name)
            return back.at[slot_A].get(mode="fill", fill_value=0)

        most = jax.lax.pmax(sent_An.sum(axis=0).max(), self.axis_name)
        which = sum((most > size).astype(jnp.int32) for size in sizes[:-1])
        if len(sizes) == 1:
            return exchange_rows(rows)
        branches = [lambda size=size: exchange_rows(size) for size in sizes]
        y_AD: jax.Array = jax.lax.switch(which, branches)
        return y_AD


def _all_to_all(buffer: jax.Array, axis_name: str) -> jax.Array:
    """Send each part of `[devices * size, ...]` to its device, and return those received."""
    return jax.lax.all_to_all(buffer, axis_name, split_axis=0, concat_axis=0, tiled=True)
