"""Attention over a cache whose slots are split among devices: queries come to them.

For a few queries, which all devices have, each attends to its own slots, and the softmaxes are
merged: two small reductions, however long the text is. Many queries, of which each device has its
share, go round with their softmaxes (Yang et al. 2024, arXiv 2411.01783, "pass-Q").
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.mesh.sequence.ring import passed_on
from jaxllm.ops.attention import (
    Look,
    Part,
    Queries,
    Softmax,
    finished,
    finite,
    looked,
    softmax,
    unseen,
)
from jaxllm.ops.varying import varying_as


def attend(queries: Queries, parts: Sequence[Part], axis: str) -> jax.Array:
    """`ops.attend` of queries that all devices have, over the slots of all: `[B, T, N, H]`.

    Inside `shard_map`. parts: what this device has. What several have must be seen on one of them:
    see `once`.
    """
    return finished(merged(softmax([Look(queries)], parts), axis), queries.q_BTKGH.dtype)


def attend_round(queries: Queries, parts: Sequence[Part], axis: str) -> tuple[jax.Array, jax.Array]:
    """The same of queries of which each device has as many of its own: see `ring.attend` for what
    is returned. They go round all devices with what they have seen, and come home.
    """
    B, T, K, G, _ = queries.q_BTKGH.shape
    asking = (queries.q_BTKGH, queries.position_BT)
    asking, state = varying_as((asking, unseen(queries)), asking, *parts)

    def turn(carry: Any, _: None) -> tuple[Any, None]:
        (q, at), state = carry
        here = queries._replace(q_BTKGH=q, position_BT=at)
        return passed_on(((q, at), looked(state, [Look(here)], parts)), axis), None

    (_, state), _ = jax.lax.scan(turn, (asking, state), length=jax.lax.axis_size(axis))
    log_BTN = jnp.moveaxis(state.log_BKGT, 3, 1).reshape(B, T, K * G)
    return finished(state, jnp.float32), log_BTN


def once(part: Part, axis: str) -> Part:
    """A part that all devices have, seen on the first alone."""
    first = jax.lax.axis_index(axis) == 0
    return part._replace(position_BS=jnp.where(first, part.position_BS, -1))


def mixed(found: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """One softmax of several over slots of their own: outputs `[B, T, N, H]` by the logarithms of
    their denominators `[B, T, N]`.
    """
    log_XBTN = jnp.stack([log for _, log in found])
    weight_XBTN = jnp.exp(log_XBTN - finite(log_XBTN.max(axis=0))[None])
    total_BTN = weight_XBTN.sum(axis=0)
    share_XBTN = weight_XBTN / jnp.where(total_BTN == 0, 1.0, total_BTN)[None]
    return (jnp.stack([out for out, _ in found]) * share_XBTN[..., None]).sum(axis=0)


def merged(state: Softmax, axis: str) -> Softmax:
    """One softmax of those that devices have of the same queries, over slots of their own."""
    top_BKGT = jax.lax.pmax(state.top_BKGT, axis)
    shrink_BKGT1 = jnp.exp(state.top_BKGT - finite(top_BKGT))[..., None]
    sums = jnp.concatenate([state.total_BKGT[..., None], state.value_BKGTH], axis=-1)
    sums = jax.lax.psum(sums * shrink_BKGT1, axis)
    return Softmax(top_BKGT, sums[..., 0], sums[..., 1:])
