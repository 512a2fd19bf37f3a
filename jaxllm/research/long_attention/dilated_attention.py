"""Dilated attention (LongNet, Ding et al. 2023, sections 2.2 to 2.4), by gathering keys.

In a dilation (w, r), a head has every r-th position of a segment of length w, from its offset on,
and attends causally within each segment. Outputs of the dilations are mixed by their softmax
denominators, in log space. No array has tokens times tokens entries, in either pass, and time is
proportional to tokens times the sum of w / r^2. Positions are looked up, so slots may hold the
tokens in any order, with gaps.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllm.ops.attention import Part, soft_cap, visible
from jaxllm.ops.kv_quant import concat_slots, dequantize
from jaxllm.ops.products import einsum
from jaxllm.research.long_attention.dilated_blocks import attend_blocks
from jaxllm.research.long_attention.dilated_gathered import (
    attend_documents,
    attend_tokens,
    gather_and_attend,
)
from jaxllm.research.long_attention.dilation_pattern import (
    Dilation,
    DilationPattern,
    first_position,
)


def attend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    pattern: DilationPattern,
    *,
    document_BT: jax.Array | None = None,
) -> jax.Array:
    """Compute dilated attention of new tokens over all parts, the last of which are the new tokens.

    Scores, softmax and sums are float32. A token that attends to nothing gives zeros. Positions
    must be distinct within a row, or within a document. New tokens that are not consecutive, and
    rows of several documents, are processed one token at a time, with the same results.

    Args:
        document_BT: int32, the document of each new token, which attends to new tokens of the same
            document only. A document's tokens must be adjacent and in order.

    Returns:
        `[B, T, N, H]` in q's dtype.
    """
    T = q_BTNH.shape[1]
    if T == 1:
        return gather_and_attend(pattern, q_BTNH, position_BT, tuple(parts))
    real_BT = position_BT >= 0
    last_B = position_BT.max(axis=1)
    together = (last_B < first_position(position_BT) + T).all()
    if document_BT is not None:
        own_B = jnp.where(real_BT, document_BT, -1).max(axis=1)
        together &= (~real_BT | (document_BT == own_B[:, None])).all()

    def blocks(q: jax.Array, position: jax.Array, parts: tuple[Part, ...]) -> jax.Array:
        return attend_blocks(pattern, q, position, parts)

    def gather_tokens(q: jax.Array, position: jax.Array, parts: tuple[Part, ...]) -> jax.Array:
        if document_BT is None:
            return attend_tokens(pattern, q, position, parts)
        return attend_documents(pattern, q, position, parts, document_BT)

    # Gradients allocate residuals of both branches, so recompute those of the rare one.
    gather_again = jax.checkpoint(gather_tokens)
    return jax.lax.cond(together, blocks, gather_again, q_BTNH, position_BT, tuple(parts))


def multiplicity(
    dilations: Sequence[Dilation], q_position_BT: jax.Array, k_position_BS: jax.Array
) -> jax.Array:
    """Return how many dilations contain each key for each query, int32 `[B, N, T, S]`; causal.

    Mixing dilations by their softmax denominators s_i equals one softmax over all keys, with the
    logarithm of this number added to the scores: `sum_i s_i O_i / sum_i s_i` is a sum over all
    pairs of a dilation and a key in it, weighted by exp(score).
    """
    count_BNTS: jax.Array = jnp.zeros((1, 1, 1, 1), jnp.int32)
    for d in dilations:
        q_BNT, k_BNS = (jnp.moveaxis(d.head_mask(x), 2, 1) for x in (q_position_BT, k_position_BS))
        q_BT, k_BS = (x // d.length for x in (q_position_BT, k_position_BS))
        together_BTS = q_BT[:, :, None] == k_BS[:, None]
        both_BNTS = together_BTS[:, None] & q_BNT[..., None] & k_BNS[:, :, None]
        count_BNTS += both_BNTS.astype(jnp.int32)
    seen_BTS = visible(q_position_BT, k_position_BS, window=None)
    return jnp.where(seen_BTS[:, None], count_BNTS, 0)


def dense_weights(
    q_BTNH: jax.Array, position_BT: jax.Array, parts: Sequence[Part], pattern: DilationPattern
) -> jax.Array:
    """Return the weights of `attend`, float32 `[B, N, T, S]` over the slots of all parts."""
    B, T, N, H = q_BTNH.shape
    k_BSKH = concat_slots([dequantize(p.k_BSKH).astype(jnp.float32) for p in parts], B)
    q_BTKGH = q_BTNH.reshape(B, T, k_BSKH.shape[2], -1, H).astype(jnp.float32)
    product = einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH).reshape(B, N, T, -1)
    count = multiplicity(
        pattern.dilations, position_BT, concat_slots([p.position_BS for p in parts], B)
    )
    count = jnp.minimum(count, 1) if pattern.dedupe else count
    bias = jnp.log(jnp.maximum(count, 1).astype(jnp.float32))
    score = jnp.where(count > 0, soft_cap(pattern.scale * product, pattern.cap) + bias, -jnp.inf)
    seen = (count > 0).any(axis=-1, keepdims=True)
    return jnp.where(seen, jax.nn.softmax(jnp.where(seen, score, 0.0), axis=-1), 0.0)
