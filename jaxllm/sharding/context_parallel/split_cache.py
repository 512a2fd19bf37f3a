"""Attention over a cache whose slots are sharded.

A few queries are replicated: each device attends to its own slots, and the softmaxes are merged by
two small reductions, however long the text is. Many queries are split over devices and rotate with
their softmax states (Yang et al. 2024, arXiv 2411.01783, "pass-Q").
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.ops.attention import (
    KeyView,
    Part,
    Queries,
    Softmax,
    absorb_parts,
    add_sink,
    empty_softmax,
    finite_or_zero,
    normalize_output,
    softmax,
)
from jaxllm.ops.varying_axes import match_varying
from jaxllm.sharding.context_parallel.ring import pass_on


def attend(
    queries: Queries, parts: Sequence[Part], axis: str, sink_N: jax.Array | None = None
) -> jax.Array:
    """Attend with replicated queries to the slots of all devices: `[B, T, N, H]`.

    Runs inside `shard_map`.

    Args:
        parts: this device's slots. Replicated parts must be seen by one device only: see
            `keep_on_first`.
        sink_N: as for `ops.attend`.
    """
    state = merge_softmax(softmax([KeyView(queries)], parts), axis)
    return normalize_output(add_sink(state, sink_N), queries.q_BTKGH.dtype)


def attend_pass_q(
    queries: Queries, parts: Sequence[Part], axis: str
) -> tuple[jax.Array, jax.Array]:
    """Attend with split queries, the same number on each device, to the slots of all devices.

    Queries rotate with their softmax states until they are home. Returns what `ring.attend` does.
    """
    B, T, K, G, _ = queries.q_BTKGH.shape
    rotating = (queries.q_BTKGH, queries.position_BT)
    rotating, state = match_varying((rotating, empty_softmax(queries)), rotating, *parts)

    def run_round(carry: Any, _: None) -> tuple[Any, None]:
        (q, at), state = carry
        local_queries = queries._replace(q_BTKGH=q, position_BT=at)
        return pass_on(((q, at), absorb_parts(state, [KeyView(local_queries)], parts)), axis), None

    (_, state), _ = jax.lax.scan(run_round, (rotating, state), length=jax.lax.axis_size(axis))
    log_BTN = jnp.moveaxis(state.lse_BKGT, 3, 1).reshape(B, T, K * G)
    return normalize_output(state, jnp.float32), log_BTN


def keep_on_first(part: Part, axis: str) -> Part:
    """Hide a replicated part on all devices but the first."""
    first = jax.lax.axis_index(axis) == 0
    return part._replace(position_BS=jnp.where(first, part.position_BS, -1))


def combine_outputs(outputs: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Combine the outputs of attention over disjoint slots.

    Each is an output `[B, T, N, H]` with the log of its softmax denominator `[B, T, N]`.
    """
    log_XBTN = jnp.stack([log for _, log in outputs])
    weight_XBTN = jnp.exp(log_XBTN - finite_or_zero(log_XBTN.max(axis=0))[None])
    total_BTN = weight_XBTN.sum(axis=0)
    share_XBTN = weight_XBTN / jnp.where(total_BTN == 0, 1.0, total_BTN)[None]
    return (jnp.stack([out for out, _ in outputs]) * share_XBTN[..., None]).sum(axis=0)


def merge_softmax(state: Softmax, axis: str) -> Softmax:
    """Merge the devices' softmax states of the same queries over disjoint slots."""
    top_BKGT = jax.lax.pmax(state.top_BKGT, axis)
    shrink_BKGT1 = jnp.exp(state.top_BKGT - finite_or_zero(top_BKGT))[..., None]
    sums = jnp.concatenate([state.total_BKGT[..., None], state.value_BKGTH], axis=-1)
    sums = jax.lax.psum(sums * shrink_BKGT1, axis)
    return Softmax(top_BKGT, sums[..., 0], sums[..., 1:])
