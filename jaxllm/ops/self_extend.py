"""Self-Extend (Jin et al. 2024, arXiv 2401.01325): grouped positions for far tokens.

Cached keys are rotated to their own positions. So queries attend in two views: unchanged, and
rotated to their grouped position, against keys rotated to theirs, block by block. Both views share
one softmax. The regrouped keys are never stored.
"""

from collections.abc import Sequence

import jax

from jaxllm.config.model import Rope
from jaxllm.ops.attention import KeyView, Part, Queries, fold
from jaxllm.ops.kv_quant import dequantize
from jaxllm.ops.rope import rerotate


def attend_self_extend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    *,
    rope: Rope,
    scale: float,
    window: int | None,
    cap: float | None = None,
    mass: bool = False,
    sink_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute `ops.attend` with grouped positions for tokens beyond rope.neighbor_window.

    With group size G and window w, a query attends to tokens at distances below w at their
    positions p, and to farther ones at `p // G`, itself at `position // G + w - w // G` (the
    paper's algorithm 1). Apparent distances never decrease as true ones grow, and those of far
    tokens are at least w, so no distance is shared across the window's edge. G = 1 is `ops.attend`.

    Args:
        q_BTNH: Rotated to position_BT; the parts' keys to their positions.
    """
    G, w = rope.group_size, rope.neighbor_window
    assert G is not None and w is not None
    H = q_BTNH.shape[-1]
    moved_BT = position_BT // G + (w - w // G) - position_BT
    far_BTNH = rerotate(q_BTNH, moved_BT, rope, head_dim=H)
    near, far = (
        Queries.from_heads(q, position_BT, parts, scale=scale, window=within, cap=cap)
        for q, within in ((q_BTNH, w if window is None else min(w, window)), (far_BTNH, window))
    )

    def group_positions(block: Part, seen_BTS: jax.Array) -> tuple[Part, jax.Array]:
        k_BS = block.position_BS
        far_BTS = seen_BTS & (position_BT[:, :, None] - k_BS[:, None, :] >= w)
        if block.k_BSKH.shape[0] == 1:  # shared: one position in all rows that have it
            k_BS = k_BS.max(axis=0, keepdims=True)
        turned = rerotate(dequantize(block.k_BSKH), k_BS // G - k_BS, rope, head_dim=H)
        return Part(turned, block.v_BSKH, block.position_BS), far_BTS

    views = [KeyView(near), KeyView(far, group_positions)]
    return fold(views, parts, q_BTNH.dtype, mass=mass, sink_N=sink_N)
