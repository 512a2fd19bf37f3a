"""Queries that all devices have, over a cache whose slots are split among them: for decoding.

Each device attends to its own slots, and the softmaxes are merged by their largest scores and their
denominators: two small reductions, however long the text is.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllm.ops.attention import Look, Part, Queries, Softmax, finite, finished, softmax


def attend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    own: Part,
    *,
    axis: str,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> jax.Array:
    """`ops.attend` over the slots of all devices, `[B, T, N, H]` alike on all of them.

    Inside `shard_map`. parts: this device's share of slots. own: the new tokens, which all have, as
    they have the queries.
    """
    B, T, N, H = q_BTNH.shape
    K = own.k_BSKH.shape[2]
    queries = Queries(q_BTNH.reshape(B, T, K, N // K, H), position_BT, scale, window, cap)
    first = jax.lax.axis_index(axis) == 0  # of new tokens, which count once
    once = Part(own.k_BSKH, own.v_BSKH, jnp.where(first, own.position_BS, -1))
    return finished(merged(softmax([Look(queries)], [*parts, once]), axis), q_BTNH.dtype)


def merged(state: Softmax, axis: str) -> Softmax:
    """One softmax of those that devices have of the same queries, over slots of their own."""
    top_BKGT = jax.lax.pmax(state.top_BKGT, axis)
    shrink_BKGT1 = jnp.exp(state.top_BKGT - finite(top_BKGT))[..., None]
    sums = jnp.concatenate([state.total_BKGT[..., None], state.value_BKGTH], axis=-1)
    sums = jax.lax.psum(sums * shrink_BKGT1, axis)
    return Softmax(top_BKGT, sums[..., 0], sums[..., 1:])
