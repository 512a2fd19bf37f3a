"""Attention as a fold: an online softmax that absorbs keys and values part by part, block by block.

Nothing is concatenated and no score matrix is kept, so reading a cache costs memory that does not
grow with its capacity, and blocks that nobody can see are skipped (Milakov & Gimelshein 2018;
Rabe & Staats 2021). What a query sees is decided by positions alone, never by slot numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 256  # slots absorbed at a time: small enough to skip what is empty, large enough to be fast


class Part(NamedTuple):
    """Some keys and values: one cache segment, or the new tokens themselves.

    k, v: `[B or 1, S, K, H]`; a part of one row is shared by all rows and never repeated.
    position_BS: int32 `[B or 1, S]`, -1 where the slot is empty; empty slots may hold anything.
    """

    k_BSKH: jax.Array
    v_BSKH: jax.Array
    position_BS: jax.Array


class _Softmax(NamedTuple):
    """The running softmax of each query: largest score, sum of weights, weighted sum of values."""

    top_BKGT: jax.Array
    total_BKGT: jax.Array
    value_BKGTH: jax.Array


def attend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    """Softmax attention of new tokens over all parts; `[B, T, N, H]` in q's dtype.

    A query at position p sees the slots with `0 <= position <= p`, and with a window only those
    with `p - position < window`. Scores, softmax and sums are float32. A query that sees nothing
    gives zeros, never NaN. N is a multiple of the parts' K heads (grouped-query attention,
    Ainslie et al. 2023).
    """
    B, T, N, H = q_BTNH.shape
    K = parts[0].k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    state = _Softmax(
        jnp.full((B, K, N // K, T), -jnp.inf, jnp.float32),
        jnp.zeros((B, K, N // K, T), jnp.float32),
        jnp.zeros((B, K, N // K, T, H), jnp.float32),
    )
    for part in parts:
        state = _absorb_part(state, q_BTKGH, position_BT, part, scale, window)
    total = jnp.where(state.total_BKGT == 0, 1.0, state.total_BKGT)
    out_BKGTH = state.value_BKGTH / total[..., None]
    return jnp.moveaxis(out_BKGTH, 3, 1).reshape(B, T, N, H).astype(q_BTNH.dtype)


def visible(q_position_BT: jax.Array, k_position_BS: jax.Array, *, window: int | None) -> jax.Array:
    """Which slots each query sees, bool `[B, T, S]`: the one formula behind every mask."""
    q, k = q_position_BT[:, :, None], k_position_BS[:, None, :]
    seen = (k >= 0) & (k <= q)
    return seen if window is None else seen & (q - k < window)


def _absorb_part(
    state: _Softmax,
    q_BTKGH: jax.Array,
    position_BT: jax.Array,
    part: Part,
    scale: float,
    window: int | None,
) -> _Softmax:
    slots = part.position_BS.shape[1]
    whole = slots // BLOCK

    if whole > 1:

        def step(state: _Softmax, i: jax.Array) -> tuple[_Softmax, None]:
            at = i * BLOCK
            block = Part(*(jax.lax.dynamic_slice_in_dim(x, at, BLOCK, axis=1) for x in part))
            seen_BTS = visible(position_BT, block.position_BS, window=window)
            return jax.lax.cond(
                seen_BTS.any(),
                lambda state: _absorb_block(state, q_BTKGH, block, seen_BTS, scale),
                lambda state: state,
                state,
            ), None

        state, _ = jax.lax.scan(step, state, jnp.arange(whole))
        part = Part(*(x[:, whole * BLOCK :] for x in part))
    if part.position_BS.shape[1] == 0:
        return state
    seen_BTS = visible(position_BT, part.position_BS, window=window)
    return _absorb_block(state, q_BTKGH, part, seen_BTS, scale)


def _absorb_block(
    state: _Softmax, q_BTKGH: jax.Array, block: Part, seen_BTS: jax.Array, scale: float
) -> _Softmax:
    # Zero times NaN is NaN: what an empty slot holds must not reach the sum.
    used_BS = block.position_BS >= 0
    if block.v_BSKH.shape[0] == 1:  # a slot that some row still uses holds a token
        used_BS = used_BS.any(axis=0, keepdims=True)
    used = used_BS[:, :, None, None]
    v_BSKH = jnp.where(used, block.v_BSKH, jnp.zeros_like(block.v_BSKH))
    score_BKGTS = scale * _scores(q_BTKGH, block.k_BSKH)
    score_BKGTS = jnp.where(seen_BTS[:, None, None, :, :], score_BKGTS, -jnp.inf)
    top = jnp.maximum(state.top_BKGT, jax.lax.stop_gradient(score_BKGTS.max(axis=-1)))
    base = jnp.where(jnp.isneginf(top), 0.0, top)  # a query that has seen nothing yet
    weight_BKGTS = jnp.exp(score_BKGTS - base[..., None])
    shrink = jnp.exp(state.top_BKGT - base)
    return _Softmax(
        top,
        state.total_BKGT * shrink + weight_BKGTS.sum(axis=-1),
        state.value_BKGTH * shrink[..., None] + _weighted_sum(weight_BKGTS, v_BSKH, q_BTKGH.dtype),
    )


def _scores(q_BTKGH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
    q, k = _same_dtype(q_BTKGH, k_BSKH)
    if k.shape[0] == 1:
        return _product("BTKGH,SKH->BKGTS", q, k[0])
    return _product("BTKGH,BSKH->BKGTS", q, k)


def _weighted_sum(weight_BKGTS: jax.Array, v_BSKH: jax.Array, dtype: jnp.dtype) -> jax.Array:
    w, v = _same_dtype(weight_BKGTS.astype(dtype), v_BSKH)
    if v.shape[0] == 1:
        return _product("BKGTS,SKH->BKGTH", w, v[0])
    return _product("BKGTS,BSKH->BKGTH", w, v)


def _same_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are if they agree, else both in float32: precision is never lost by mixing."""
    if a.dtype == b.dtype:
        return a, b
    return a.astype(jnp.float32), b.astype(jnp.float32)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
