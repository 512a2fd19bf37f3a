"""LongNet's dilated attention (Ding et al. 2023) for one layer."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import jax

from jaxllm.errors import ConfigError
from jaxllm.ops.attention import Part
from jaxllm.research.long_attention import dilated_attention
from jaxllm.research.long_attention.dilated_attention import dense_weights
from jaxllm.research.long_attention.dilation_pattern import Dilation, DilationPattern

if TYPE_CHECKING:
    from jaxllm.research.long_attention.settings import LongAttention


@cache
def dilations(kind: "LongAttention", heads: int) -> tuple[Dilation, ...]:
    """Return the dilations of one layer with each head's offsets; -1: the head does not use it.

    With "pairs" and "layers", head j has offset `j % ratio` (equation 8). With "heads", it is the
    `j // count`-th head of its pair, and has that modulo the ratio.
    """
    count, result = len(kind.pairs), list[Dilation]()
    for i, (length, ratio) in enumerate(kind.pairs):
        if kind.by == "heads":
            offsets = [j // count % ratio if j % count == i else -1 for j in range(heads)]
        else:
            offsets = [j % ratio for j in range(heads)]
        result.append(Dilation(length, ratio, tuple(offsets)))
    return tuple(result)


def attend(
    kind: "LongAttention",
    context: Any,
    site: Any,
    q_BTNH: jax.Array,
    parts: Sequence[Part],
    unrotated: Any,
    *,
    scale: float,
    cap: float | None,
) -> tuple[jax.Array, jax.Array | None, None]:
    """Dilated attention; see `AttentionKind.attend`.

    Attention mass and `attn.pattern` cost dense attention weights; mass is None with documents.
    Raises ConfigError for a mask, which has no positions, for `attn.scores`, and for an edit of
    `attn.pattern`.
    """
    if context.mask_BTS is not None:
        raise ConfigError(
            "attention of kind 'dilated' depends on positions and takes no mask: omit mask_BTS"
        )
    if site.touches("attn.scores") or site.edits("attn.pattern"):
        raise ConfigError(
            "attention of kind 'dilated' has several softmaxes, so attn.scores cannot be read, and"
            " attn.pattern can only be read"
        )
    shown, at_BT = dilations(kind, q_BTNH.shape[2]), context.position_BT
    sight = DilationPattern(shown, scale, cap, bool(kind.dedupe), bool(kind.frozen_mixture))
    out = dilated_attention.attend(q_BTNH, at_BT, parts, sight, document_BT=context.document_BT)
    reads = site.reads("attn.pattern")
    if not (context.mass or reads) or context.document_BT is not None:
        return out, None, None
    weight_BNTS = site("attn.pattern", dense_weights(q_BTNH, at_BT, parts, sight))
    return out, weight_BNTS.sum(axis=(1, 2)) if context.mass else None, None
