"""Self-Extend (Jin et al. 2024, arXiv 2401.01325): near tokens where they are, far ones in groups.

A cache keeps keys turned to the positions they have. So a query looks twice: once as it is, and
once turned to its position among groups, at keys that are turned to theirs, block by block. Both
looks are one softmax. The turned keys are never kept.
"""

from collections.abc import Sequence

import jax

from jaxllm.config import Rope
from jaxllm.ops.attention import Look, Part, Queries, fold
from jaxllm.ops.entries import dense
from jaxllm.ops.rope import turn


def attend_extended(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    *,
    rope: Rope,
    scale: float,
    window: int | None,
    cap: float | None = None,
    mass: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """As `ops.attend`, with tokens beyond rope.neighbor_window at grouped positions.

    q: turned to position_BT, keys of the parts to theirs, p. With G the group's size and w the
    window, a query sees tokens at distances below w at p, and farther ones, itself at
    `p // G + w - w // G`, at `p // G` (the paper's algorithm 1): the distances that it counts never
    fall as the true ones grow, and those of far tokens are never below w, so none is shared across
    the window's border. G = 1 is `ops.attend`.
    """
    G, w = rope.group_size, rope.neighbor_window
    assert G is not None and w is not None
    H = q_BTNH.shape[-1]
    moved_BT = position_BT // G + (w - w // G) - position_BT
    far_BTNH = turn(q_BTNH, moved_BT, rope, head_dim=H)
    near, far = (
        Queries.of(q, position_BT, parts, scale=scale, window=within, cap=cap)
        for q, within in ((q_BTNH, w if window is None else min(w, window)), (far_BTNH, window))
    )

    def grouped(block: Part, seen_BTS: jax.Array) -> tuple[Part, jax.Array]:
        k_BS = block.position_BS
        far_BTS = seen_BTS & (position_BT[:, :, None] - k_BS[:, None, :] >= w)
        if block.k_BSKH.shape[0] == 1:  # one for all rows, at one position in all that have it
            k_BS = k_BS.max(axis=0, keepdims=True)
        turned = turn(dense(block.k_BSKH), k_BS // G - k_BS, rope, head_dim=H)
        return Part(turned, block.v_BSKH, block.position_BS), far_BTS

    return fold([Look(near), Look(far, grouped)], parts, q_BTNH.dtype, mass=mass)
