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

from jaxllm.ops.attention import Part
from jaxllm.ops.dilated.blocks import attend_blocks
from jaxllm.ops.dilated.gathered import attend_documents, attend_tokens, gather_and_attend
from jaxllm.ops.dilated.pattern import DilationPattern, first_position


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
