"""Attention under an explicit mask, as compilers of static graphs need it: one softmax, no loop.

Elsewhere visibility is a comparison of positions (`ops.attend`); here the caller computes it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.ops.attention import Part, soft_cap, visible
from jaxllm.ops.kv_quant import concat_slots, dequantize
from jaxllm.ops.products import einsum


def attention_scores(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    mask_BTS: jax.Array | None = None,
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> jax.Array:
    """Return the scores of `ops.attend`, scaled and soft-capped, float32 `[B, N, T, S]`.

    -inf for slots that a query does not attend to. All B x N x T x S numbers are stored at once.

    Args:
        mask_BTS: bool, in place of positions and window.
    """
    B, T, N, _ = q_BTNH.shape
    k_BSKH = concat_slots([dequantize(p.k_BSKH).astype(jnp.float32) for p in parts], B)
    score_BKGTS = soft_cap(_scores(q_BTNH, k_BSKH, scale), cap)
    if mask_BTS is None:
        position_BS = concat_slots([p.position_BS for p in parts], B)
        mask_BTS = visible(position_BT, position_BS, window=window)
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, -jnp.inf)
    return score_BKGTS.reshape(B, N, T, -1)


def softmax_weights(score_BNTS: jax.Array, sink_N: jax.Array | None = None) -> jax.Array:
    """Return the softmax over slots; zeros, never NaN, for a query whose scores are all -inf.

    sink_N: As for `ops.attend`; the sink's own weight is dropped.
    """
    if sink_N is not None:
        return softmax_weights(_append_sink(score_BNTS, sink_N))[..., :-1]
    return jnp.where(jnp.isneginf(score_BNTS), 0.0, jax.nn.softmax(score_BNTS, axis=-1))


def weigh_values(weight_BNTS: jax.Array, parts: Sequence[Part], dtype: jnp.dtype) -> jax.Array:
    """Return the weighted sums of the values of all parts, `[B, T, N, H]` in `dtype`."""
    B, N, T, S = weight_BNTS.shape
    v_BSKH = concat_slots([dequantize(p.v_BSKH).astype(jnp.float32) for p in parts], B)
    used_BS = concat_slots([p.position_BS for p in parts], B) >= 0
    v_BSKH = jnp.where(used_BS[:, :, None, None], v_BSKH, 0.0)  # zero times NaN is NaN
    weight_BKGTS = weight_BNTS.reshape(B, v_BSKH.shape[2], -1, T, S)
    return einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, v_BSKH).reshape(B, T, N, -1).astype(dtype)


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
    sink_N: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax attention over the slots of all parts, in order: `[B, T, N, H]` in q's dtype.

    The parts' positions are ignored. Float32 inside.

    Args:
        mask_BTS: bool, True where a query attends to a slot. A query without slots gives zeros, and
            slots without queries may hold anything. Or floats, added to the scores: masked slots
            then must hold finite numbers, and their weights are zero only as far as the mask
            dominates the scores.
        sink_N: As for `ops.attend`.
    """
    B, T, N, H = q_BTNH.shape
    k_BSKH = concat_slots([dequantize(p.k_BSKH).astype(jnp.float32) for p in parts], B)
    score_BKGTS = soft_cap(_scores(q_BTNH, k_BSKH, scale), cap)
    v_BSKH = concat_slots([dequantize(p.v_BSKH).astype(jnp.float32) for p in parts], B)
    mask_BKGTS = mask_BTS[:, None, None]
    if mask_BTS.dtype == jnp.bool_:
        unseen_BS = ~mask_BTS.any(axis=1)
        v_BSKH = jnp.where(unseen_BS[:, :, None, None], 0.0, v_BSKH)  # zero times NaN is NaN
        score_BKGTS = jnp.where(mask_BKGTS, score_BKGTS, -jnp.inf)
    else:
        score_BKGTS = score_BKGTS + mask_BKGTS.astype(jnp.float32)
    if sink_N is not None:  # one more slot, whose value is 0
        score_BKGTS = _append_sink(score_BKGTS, sink_N)
        v_BSKH = jnp.pad(v_BSKH, ((0, 0), (0, 1), (0, 0), (0, 0)))
    out_BKGTH = _attend_by_scores(score_BKGTS, v_BSKH)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _append_sink(score: jax.Array, sink_N: jax.Array) -> jax.Array:
    """Append the score of each head's sink to scores `[B, N, T, S]` or `[B, K, G, T, S]`."""
    sink = sink_N.astype(jnp.float32).reshape(1, *score.shape[1:-2], 1, 1)
    return jnp.concatenate([score, jnp.broadcast_to(sink, (*score.shape[:-1], 1))], axis=-1)


@jax.custom_jvp
def _attend_by_scores(score_BKGTS: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    return _weigh(softmax_weights(score_BKGTS), v_BSKH)


@_attend_by_scores.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The backward pass of FlashAttention (Dao et al. 2022, appendix B.2), on whole arrays.

    The slope of the softmax needs sums over outputs only. Values are the first factor of the second
    product: otherwise its transpose would transpose the weights.
    """
    (score_BKGTS, v_BSKH), (score_slope, v_slope) = primals, tangents
    weight_BKGTS = softmax_weights(score_BKGTS)
    out_BKGTH = _weigh(weight_BKGTS, v_BSKH)
    moved_BKGTS = weight_BKGTS * score_slope
    by_scores = _weigh(moved_BKGTS, v_BSKH) - moved_BKGTS.sum(axis=-1, keepdims=True) * out_BKGTH
    by_values = einsum("BSKH,BKGTS->BKHGT", v_slope, weight_BKGTS)
    return out_BKGTH, by_scores + by_values.transpose(0, 1, 3, 4, 2)


def _weigh(weight_BKGTS: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    return einsum("BKGTS,BSKH->BKGTH", weight_BKGTS, v_BSKH)


def _scores(q_BTNH: jax.Array, k_BSKH: jax.Array, scale: float) -> jax.Array:
    """Return the scores of all keys, float32 `[B, K, G, T, S]`."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H).astype(jnp.float32)
    # Queries are transposed, since scores, of which there are more, would be otherwise.
    return scale * einsum("BKGTH,BSKH->BKGTS", q_BTKGH.transpose(0, 2, 3, 1, 4), k_BSKH)
