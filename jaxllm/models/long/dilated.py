"""What LongNet's dilated attention (Ding et al. 2023) is told, and masks for it."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import LongAttention
from jaxllm.ops.attention import Part, visible
from jaxllm.ops.dilated import Dilation, multiplicity
from jaxllm.ops.entries import side_by_side
from jaxllm.ops.masked import attend_masked


@cache
def dilations(kind: LongAttention, heads: int) -> tuple[Dilation, ...]:
    """The pairs of one layer and what each of its heads sees of them.

    With "pairs" and "layers" head j begins at `j % ratio` (equation 8). With "heads" it is the
    `j // count`-th head of its pair, and begins at that modulo the ratio.
    """
    count, found = len(kind.pairs), []
    for i, (length, ratio) in enumerate(kind.pairs):
        if kind.by == "heads":
            offsets = [j // count % ratio if j % count == i else -1 for j in range(heads)]
        else:
            offsets = [j % ratio for j in range(heads)]
        found.append(Dilation(length, ratio, tuple(offsets)))
    return tuple(found)


def attend(
    kind: LongAttention,
    scope: Any,
    q_BTNH: jax.Array,
    parts: list[Part],
    *,
    scale: float,
    cap: float | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of new tokens over all parts, `[B, T, N, H]`, and the mass where it is asked for.

    kind: of this layer, `ModelConfig.long_attention`. The rest: see `layers.attend`.
    """
    position_BS = side_by_side([p.position_BS for p in parts], q_BTNH.shape[0])
    count = multiplicity(dilations(kind, q_BTNH.shape[2]), scope.position_BT, position_BS)
    count = jnp.where(visible(scope.position_BT, position_BS, window=None)[:, None], count, 0)
    bias = jnp.where(count > 0, jnp.log(jnp.maximum(count, 1).astype(jnp.float32)), -1e30)
    outs = [
        attend_masked(q_BTNH, parts, bias[:, j], scale=scale, cap=cap)[:, :, j]
        for j in range(q_BTNH.shape[2])
    ]
    return jnp.stack(outs, axis=2), None
