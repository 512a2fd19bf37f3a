"""Attention under an explicit mask, as compilers of static graphs want it: one softmax, no loop.

Elsewhere visibility is a comparison of positions (`ops.attend`); here the caller has made it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllm.ops.attention import Part
from jaxllm.ops.entries import dense


def attend_masked(
    q_BTNH: jax.Array, parts: Sequence[Part], mask_BTS: jax.Array, *, scale: float
) -> jax.Array:
    """Softmax attention over the slots of all parts, in order: `[B, T, N, H]` in q's dtype.

    mask_BTS: bool, True where a query sees a slot; a query that sees nothing gives zeros, and what
    lies in slots that nobody sees is not read. Or floats that are added to the scores: such slots
    are read, so they must hold finite numbers, and a score that lies as far below a masked one as
    the mask reaches loses to it. The parts' positions are not looked at. Float32 inside.
    """
    B, T, N, H = q_BTNH.shape
    k_BSKH = jnp.concatenate([dense(p.k_BSKH).astype(jnp.float32) for p in parts], axis=1)
    v_BSKH = jnp.concatenate([dense(p.v_BSKH).astype(jnp.float32) for p in parts], axis=1)
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H).astype(jnp.float32)
    score_BKGTS = scale * jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH)
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
