"""Dilated attention (LongNet, Ding et al. 2023, sections 2.2 to 2.4) by gathering what it shows.

Of a dilation (w, r) a head has every r-th position of a segment of w, from its offset on: each
dilation is causal attention within blocks of them. What it gives is mixed with the others
by softmax denominators, through the logarithms of these. Nothing is as large as tokens times
tokens, forwards or backwards, and time grows with the tokens times the sum of w / r^2. Where a
position lies is looked up, so that slots may hold the tokens in any order, or not at all.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllm.ops.attention import Part
from jaxllm.ops.dilated.blocks import in_blocks
from jaxllm.ops.dilated.gathered import by_documents, each_gathers, one_by_one
from jaxllm.ops.dilated.sight import Sight, first


def attend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    sight: Sight,
    *,
    document_BT: jax.Array | None = None,
) -> jax.Array:
    """Dilated attention of new tokens over all parts, of which the last are themselves.

    `[B, T, N, H]` in q's dtype; scores, softmax and sums are float32. A token with nothing to see
    gives zeros. No two tokens of a row are at one position, or of a document. document_BT: int32,
    which document each new token is of: it sees of the last part its own alone, whose tokens stand
    side by side and in order.

    New tokens that stand apart, and rows of several documents, go one by one: the same numbers, for
    the time of a gather for each.
    """
    T = q_BTNH.shape[1]
    if T == 1:
        return each_gathers(sight, q_BTNH, position_BT, tuple(parts))
    real_BT = position_BT >= 0
    last_B = position_BT.max(axis=1)
    together = (last_B < first(position_BT) + T).all()
    if document_BT is not None:
        own_B = jnp.where(real_BT, document_BT, -1).max(axis=1)
        together &= (~real_BT | (document_BT == own_B[:, None])).all()

    def blocks(q: jax.Array, position: jax.Array, parts: tuple[Part, ...]) -> jax.Array:
        return in_blocks(sight, q, position, parts)

    def each(q: jax.Array, position: jax.Array, parts: tuple[Part, ...]) -> jax.Array:
        if document_BT is None:
            return one_by_one(sight, q, position, parts)
        return by_documents(sight, q, position, parts, document_BT)

    # A gradient makes room for what either branch keeps, taken or not: this one keeps its inputs.
    apart = jax.checkpoint(each)
    return jax.lax.cond(together, blocks, apart, q_BTNH, position_BT, tuple(parts))
