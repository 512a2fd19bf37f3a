"""Dilated attention (LongNet, Ding et al. 2023, sections 2.2 to 2.4)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Dilation(NamedTuple):
    """A pair of a segment length and a dilation, and what each head sees of it.

    The text is cut at the multiples of `length`, by positions. Of a segment, head j has the
    positions `offsets[j]` modulo `ratio`, which divides `length`; -1: nothing.
    """

    length: int
    ratio: int
    offsets: tuple[int, ...]


def multiplicity(
    dilations: Sequence[Dilation], q_position_BT: jax.Array, k_position_BS: jax.Array
) -> jax.Array:
    """How many dilations show each key to each query, int32 `[B, N, T, S]`, the future included.

    Mixing dilations by their softmax denominators is one softmax over all keys whose scores have
    the logarithm of this added. All of it is kept at once: this is what tests are held to, and what
    serves masks.
    """
    q_B1T1, k_B11S = q_position_BT[:, None, :, None], k_position_BS[:, None, None, :]
    count: jax.Array | int = 0
    for length, ratio, offsets in dilations:
        offset_N11 = jnp.asarray(np.reshape(offsets, (1, -1, 1, 1)), jnp.int32)
        shown = q_B1T1 // length == k_B11S // length
        shown &= (q_B1T1 % ratio == offset_N11) & (k_B11S % ratio == offset_N11)
        count += (shown & (q_B1T1 >= 0) & (k_B11S >= 0)).astype(jnp.int32)
    return jnp.asarray(count)
