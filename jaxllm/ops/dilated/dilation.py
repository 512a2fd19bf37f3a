"""What a dilation shows (LongNet, Ding et al. 2023), and attention by it with all scores at once.

Dense, so slow and large: what `dilated` is held to, and what says each slot's share.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops.attention import Part, capped, visible
from jaxllm.ops.entries import dense, side_by_side


class Dilation(NamedTuple):
    """A pair of a segment length and a dilation, and what each head sees of it.

    The text is cut at the multiples of `length`, by positions. Of a segment, head j has the
    positions `offsets[j]` modulo `ratio`, which divides `length`; -1: nothing.
    """

    length: int
    ratio: int
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many positions of a segment a head has."""
        return self.length // self.ratio


def multiplicity(
    dilations: Sequence[Dilation], q_position_BT: jax.Array, k_position_BS: jax.Array
) -> jax.Array:
    """How many dilations show each key to each query, int32 `[B, N, T, S]`; none shows the future.

    Mixing dilations by their softmax denominators is one softmax over all keys whose scores have
    the logarithm of this added: with denominators s_i, `sum_i s_i O_i / sum_i s_i` is the sum over
    all pairs of a dilation and a key it shows, each weighed by exp(score).
    """
    q_B1T1, k_B11S = q_position_BT[:, None, :, None], k_position_BS[:, None, None, :]
    count_BNTS: jax.Array = jnp.zeros((1, 1, 1, 1), jnp.int32)
    for length, ratio, offsets in dilations:
        offset_1N11 = jnp.asarray(np.reshape(offsets, (1, -1, 1, 1)), jnp.int32)
        shown = (q_B1T1 // length == k_B11S // length) & (q_B1T1 % ratio == offset_1N11)
        count_BNTS += (shown & (k_B11S % ratio == offset_1N11)).astype(jnp.int32)
    seen_BTS = visible(q_position_BT, k_position_BS, window=None)
    return jnp.where(seen_BTS[:, None], count_BNTS, 0)


def dense_weights(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    dilations: Sequence[Dilation],
    *,
    scale: float,
    cap: float | None = None,
    dedupe: bool = False,
) -> jax.Array:
    """The weights of `dilated.attend`, float32 `[B, N, T, S]` over the slots of all parts."""
    B, T, N, H = q_BTNH.shape
    k_BSKH = side_by_side([dense(p.k_BSKH).astype(jnp.float32) for p in parts], B)
    q_BTKGH = q_BTNH.reshape(B, T, k_BSKH.shape[2], -1, H).astype(jnp.float32)
    product = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH).reshape(B, N, T, -1)
    count = multiplicity(dilations, position_BT, side_by_side([p.position_BS for p in parts], B))
    count = jnp.minimum(count, 1) if dedupe else count
    bias = jnp.log(jnp.maximum(count, 1).astype(jnp.float32))
    score = jnp.where(count > 0, capped(scale * product, cap) + bias, -jnp.inf)
    seen = (count > 0).any(axis=-1, keepdims=True)
    return jnp.where(seen, jax.nn.softmax(jnp.where(seen, score, 0.0), axis=-1), 0.0)


def dense_attend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    dilations: Sequence[Dilation],
    *,
    scale: float,
    cap: float | None = None,
    dedupe: bool = False,
) -> jax.Array:
    """`dilated.attend` as one softmax under the logarithm of `multiplicity`, `[B, T, N, H]`."""
    B, T, N, H = q_BTNH.shape
    weight_BNTS = dense_weights(
        q_BTNH, position_BT, parts, dilations, scale=scale, cap=cap, dedupe=dedupe
    )
    v_BSKH = side_by_side([dense(p.v_BSKH).astype(jnp.float32) for p in parts], B)
    position_BS = side_by_side([p.position_BS for p in parts], B)
    v_BSKH = jnp.where(position_BS[:, :, None, None] >= 0, v_BSKH, 0.0)  # zero times NaN is NaN
    weight_BKGTS = weight_BNTS.reshape(B, v_BSKH.shape[2], -1, T, v_BSKH.shape[1])
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, v_BSKH)
    return out_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype)
