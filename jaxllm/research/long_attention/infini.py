"""Infini-attention (Munkhdalai et al. 2024): softmax within a segment, memory of earlier ones.

A token's segment is `position // segment_length`. Local softmax attends only to new tokens and
slots of the query's own segment, so keys and values of finished segments may leave the cache.
Rotary angles use the place within the segment, so they stay exact at any position.

The gate applies only where the memory is not empty. With the paper's formula, the first segment
would also lose a share sigmoid(beta) to an empty memory, which would change a trained model there.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxllm import ops
from jaxllm.config.model import Rope
from jaxllm.errors import ConfigError
from jaxllm.models.layers import Unrotated
from jaxllm.ops.buckets import Buckets, make_buckets
from jaxllm.ops.kv_quant import concat_slots, dequantize
from jaxllm.ops.rope import inverse_frequencies, rerotate
from jaxllm.research.long_attention.memory import (
    Memory,
    Update,
    discard_segment,
    empty_memory,
    run_segments,
    write,
)

if TYPE_CHECKING:
    from jaxllm.research.long_attention.settings import LongAttention


def attend(
    kind: "LongAttention",
    context: Any,
    site: Any,
    q_BTNH: jax.Array,
    parts: Sequence[ops.Part],
    unrotated: Unrotated,
    *,
    scale: float,
    cap: float | None,
) -> tuple[jax.Array, None, Memory]:
    """Infini-attention; see `AttentionKind.attend`. The new tokens of each row must be consecutive.

    Raises ConfigError for masks, documents that share a row, and attention mass.
    """
    requested = {
        "an attention mask": context.mask_BTS is not None,
        "several documents in one row (train with --no-pack)": context.document_BT is not None,
        "attention mass or weights": context.mass or site.touches("attn.scores", "attn.pattern"),
    }
    if len(parts) > 1 and unrotated.state is None:
        raise ConfigError(
            "attention of kind 'infini' continues a cache with its memory, which fixed shapes and"
            " exports do not support"
        )
    for what, is_asked in requested.items():
        if is_asked:
            raise ConfigError(f"attention of kind 'infini' does not support {what}")
    assert kind.segment_length is not None
    update, length = kind.update or "linear", kind.segment_length
    B, _, K, H = unrotated.k.shape
    memory = empty_memory(B, K, H, update) if unrotated.state is None else unrotated.state
    buckets = make_buckets(context.position_BT, length)
    local = buckets.join(_attend_local(buckets, length, q_BTNH, parts, scale, cap)).astype(
        jnp.float32
    )
    retrieved, has_memory_BTN, memory = run_segments(
        memory, unrotated.q, unrotated.k, unrotated.v, buckets, update
    )
    gate_N = unrotated.params["memory_gate"]  # beta; its sigmoid is the memory's share
    share_N1 = jax.nn.sigmoid(gate_N.astype(jnp.float32))[None, None, :, None]
    mixed = share_N1 * retrieved + (1 - share_N1) * local
    return jnp.where(has_memory_BTN[..., None], mixed, local).astype(q_BTNH.dtype), None, memory


def _attend_local(
    buckets: Buckets,
    length: int,
    q_BTNH: jax.Array,
    parts: Sequence[ops.Part],
    scale: float,
    cap: float | None,
) -> jax.Array:
    """Compute softmax attention within segments, by buckets `[n, B, W, N, H]`.

    Only the first bucket can have slots of its segment in the cache.
    """
    *cached, new = parts
    q, (k, v) = buckets.split(q_BTNH), jax.tree.map(buckets.split, (new.k_BSKH, new.v_BSKH))
    at = buckets.position_nBW
    n, B, W = at.shape
    begin_B1 = buckets.segment_nB[0][:, None] * length
    own = [
        part._replace(position_BS=jnp.where(part.position_BS >= begin_B1, part.position_BS, -1))
        for part in cached
    ]
    first = 1 if cached else n
    heads = []
    for some, before in ((slice(0, first), own), (slice(first, n), [])):
        q_XWNH, k_XWKH, v_XWKH, at_XW = jax.tree.map(
            lambda x, some=some: x[some].reshape(-1, W, *x.shape[3:]), (q, k, v, at)
        )
        if at_XW.shape[0]:
            last = ops.Part(k_XWKH, v_XWKH, at_XW)
            out, _ = ops.attend(q_XWNH, at_XW, [*before, last], scale=scale, window=None, cap=cap)
            heads.append(out.reshape(-1, B, *out.shape[1:]))
    return jnp.concatenate(heads) if len(heads) > 1 else heads[0]


@partial(jax.jit, static_argnums=(4, 5, 6))
def recompute_segment(
    memory: Memory,
    entries: list[Any],
    next_B: jax.Array,
    now_B: jax.Array,
    length: int,
    update: Update,
    rope: Rope | None,
) -> Memory:
    """Recompute a layer's memory with the current segment up to `next_B`; no-op for other rows."""
    rows = next_B.shape[0]
    k_BSKH, v_BSKH, position_BS = (
        concat_slots([dequantize(x) for x in each], rows) for each in zip(*entries, strict=True)
    )
    begin_B1 = (memory.segment_B * length)[:, None]
    stays_BS = (position_BS >= begin_B1) & (position_BS < next_B[:, None])
    if rope is not None:
        k_BSKH = _unrotate_keys(k_BSKH, position_BS % length, rope)
    summed = write(discard_segment(memory), k_BSKH, v_BSKH, stays_BS, update)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        undone_B = (next_B < now_B).reshape((rows,) + (1,) * (new.ndim - 1))
        return jnp.where(undone_B, new, old)

    chosen: Memory = jax.tree.map(choose, summed, memory)
    return chosen


def _unrotate_keys(k_BSKH: jax.Array, position_BS: jax.Array, rope: Rope) -> jax.Array:
    """Undo the rotation of keys by their places in the segment; float32."""
    head_dim = k_BSKH.shape[-1]
    width, magnitude = rope.rotary_dim(head_dim), inverse_frequencies(rope, head_dim=head_dim)[1]
    k_BSKH = rerotate(k_BSKH, -position_BS, rope, head_dim=head_dim)
    if magnitude == 1.0:
        return k_BSKH
    return jnp.concatenate([k_BSKH[..., :width] / magnitude, k_BSKH[..., width:]], axis=-1)
