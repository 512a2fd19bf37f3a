"""Attention under an explicit mask, as compilers of static graphs need it: one softmax, no loop.

Elsewhere visibility is a comparison of positions (`ops.attend`); here the caller computes it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllm.ops.attention import Part, soft_cap, visible
from jaxllm.ops.kv_quant import concat_slots, dequantize


def attention_weights(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> jax.Array:
    """Return the softmax weights of `ops.attend`, float32 `[B, N, T, S]` over all slots.

    Zero for slots that a query does not attend to. All B x N x T x S numbers are stored at once.
    """
    B, T, N, _ = q_BTNH.shape
    k_BSKH = concat_slots([dequantize(p.k_BSKH).astype(jnp.float32) for p in parts], B)
    score_BKGTS = soft_cap(_scores(q_BTNH, k_BSKH, scale), cap)
    position_BS = concat_slots([p.position_BS for p in parts], B)
    seen_BKGTS = visible(position_BT, position_BS, window=window)[:, None, None]
    score_BKGTS = jnp.where(seen_BKGTS, score_BKGTS, -jnp.inf)
    weight_BKGTS = jnp.where(seen_BKGTS, jax.nn.softmax(score_BKGTS, axis=-1), 0.0)
    return weight_BKGTS.reshape(B, N, T, -1)


def document_mask(
    position_BT: jax.Array,
    parts: Sequence[Part],
    document_BT: jax.Array,
    *,
    window: int | None,
) -> jax.Array:
    """Return the mask `[B, T, S]` of `ops.attend` for new tokens of several documents.

    New tokens, the last part, attend to new tokens of their own document only, and to all other
    parts.

    Args:
        document_BT: int32; in each document, positions start at 0, or at the end of the cache.
    """
    before = [
        jnp.broadcast_to(p.position_BS, (position_BT.shape[0], p.position_BS.shape[1]))
        for p in parts[:-1]
    ]
    seen = [visible(position_BT, slots, window=window) for slots in before]
    same_document = document_BT[:, :, None] == document_BT[:, None, :]
    new = visible(position_BT, parts[-1].position_BS, window=window) & same_document
    return jnp.concatenate([*seen, new], axis=-1)


def attend_with_mask(
    q_BTNH: jax.Array,
    parts: Sequence[Part],
    mask_BTS: jax.Array,
    *,
    scale: float,
    cap: float | None = None,
) -> jax.Array:
    """Compute softmax attention over the slots of all parts, in order: `[B, T, N, H]` in q's dtype.

    The parts' positions are ignored. Float32 inside.

    Args:
        mask_BTS: bool, True where a query attends to a slot. A query without slots gives zeros, and
            slots without queries may hold anything. Or floats, added to the scores: masked slots
            then must hold finite numbers, and their weights are zero only as far as the mask
            dominates the scores.
    """
    B, T, N, H = q_BTNH.shape
    k_BSKH = concat_slots([dequantize(p.k_BSKH).astype(jnp.float32) for p in parts], B)
    score_BKGTS = soft_cap(_scores(q_BTNH, k_BSKH, scale), cap)
    v_BSKH = concat_slots([dequantize(p.v_BSKH).astype(jnp.float32) for p in parts], B)
    mask_BKGTS = mask_BTS[:, None, None]
    if mask_BTS.dtype == jnp.bool_:
        unseen_BS = ~mask_BTS.any(axis=1)
        v_BSKH = jnp.where(unseen_BS[:, :, None, None], 0.0, v_BSKH)  # zero times NaN is NaN
        weight_BKGTS = jax.nn.softmax(jnp.where(mask_BKGTS, score_BKGTS, -jnp.inf), axis=-1)
        weight_BKGTS = jnp.where(mask_BKGTS, weight_BKGTS, 0.0)  # a query that sees nothing
    else:
        weight_BKGTS = jax.nn.softmax(score_BKGTS + mask_BKGTS.astype(jnp.float32), axis=-1)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, v_BSKH)
    return out_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype)


def _scores(q_BTNH: jax.Array, k_BSKH: jax.Array, scale: float) -> jax.Array:
    """Return the scores of all keys, float32 `[B, K, G, T, S]`."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H).astype(jnp.float32)
    return scale * jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH)
