"""What LongNet's dilated attention (Ding et al. 2023) is told of a layer."""

from functools import cache
from typing import Any

import jax

from jaxllm.errors import ConfigError
from jaxllm.longer import LongAttention
from jaxllm.ops.attention import Part
from jaxllm.ops.dilated import attention
from jaxllm.ops.dilated.dilation import Dilation, dense_weights


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

    kind: of this layer, `ModelConfig.long_attention`. The rest: see `layers.attend`. The mass costs
    dense attention's weights. Raises ConfigError for a mask, which says nothing of positions.
    """
    at_BT, once = scope.position_BT, bool(kind.dedupe)
    if scope.mask_BTS is not None:
        raise ConfigError(
            "attention of kind 'dilated' goes by positions and takes no mask: leave mask_BTS out"
        )
    shown = dilations(kind, q_BTNH.shape[2])
    out = attention.attend(
        q_BTNH,
        at_BT,
        parts,
        shown,
        scale=scale,
        cap=cap,
        dedupe=once,
        frozen_mixture=bool(kind.frozen_mixture),
        document_BT=scope.document_BT,
    )
    if not scope.mass or scope.document_BT is not None:
        return out, None
    weight_BNTS = dense_weights(q_BTNH, at_BT, parts, shown, scale=scale, cap=cap, dedupe=once)
    return out, weight_BNTS if scope.mass == "heads" else weight_BNTS.sum(axis=(1, 2))
