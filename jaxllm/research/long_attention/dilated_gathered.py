"""Dilated attention of tokens at arbitrary positions: each token gathers its own keys."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops.attention import Part
from jaxllm.ops.kv_quant import dequantize
from jaxllm.ops.products import match_dtypes
from jaxllm.research.long_attention.dilation_pattern import (
    MAX_SCORES,
    Dilation,
    DilationPattern,
    FindSlots,
    first_position,
    gather_kv,
    make_finder,
    take_tokens,
)


def gather_and_attend(
    pattern: DilationPattern,
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: tuple[Part, ...],
    finders: Sequence[FindSlots] | None = None,
) -> jax.Array:
    """Compute dilated attention with keys gathered per token, for heads with any key only."""
    B, T, N, _ = q_BTNH.shape
    K = parts[0].k_BSKH.shape[2]
    itself = None
    if finders is None:  # a single token
        first_B = position_BT[:, 0] - pattern.reach + 1
        if len(parts) > 1 and parts[-1].position_BS.shape == (B, 1):  # its own key needs no lookup
            *rest, itself = parts
            parts = tuple(rest)
        finders = [make_finder(p.position_BS, first_B, pattern.reach) for p in parts]
    outputs = []
    for number, d in enumerate(pattern.dilations):
        heads, rank_N, share = _heads_by_residue(d, K, share=not (pattern.dedupe and number))
        residue_BT = d.residue(position_BT)
        head_BTE = jnp.asarray(heads)[residue_BT]
        row_11M = np.arange(d.max_positions, dtype=np.int32).reshape(1, 1, -1) * d.ratio
        k_at = (position_BT // d.length * d.length + residue_BT)[..., None] + row_11M  # [B, T, M]
        # Positions as `gather_kv` takes them: `[1, B, T x E, M]`.
        E = head_BTE.shape[-1]
        at = jnp.broadcast_to(k_at[:, :, None], (B, T, E, d.max_positions)).reshape(
            1, B, T * E, d.max_positions
        )
        kv = (jnp.maximum(head_BTE, 0) // (N // K)).reshape(1, B, T * E, 1)
        k, v, valid = (x.reshape(B, T, E, *x.shape[3:]) for x in gather_kv(parts, finders, at, kv))
        if itself is not None:
            index_BTE1 = kv.reshape(B, T, E, 1)
            own_kv = (
                jnp.take_along_axis(dequantize(x), index_BTE1, axis=2)[:, :, :, None]
                for x in (itself.k_BSKH, itself.v_BSKH)
            )
            k, v = (
                jnp.concatenate(match_dtypes(x, new), axis=3)
                for x, new in zip((k, v), own_kv, strict=True)
            )
            valid = jnp.concatenate([valid, jnp.ones_like(valid[..., :1])], axis=-1)
            k_at = jnp.concatenate([k_at, position_BT[..., None]], axis=-1)
        G = N // K if share else 1
        q_BTEGH = q_BTNH.reshape(B, T, -1, G, q_BTNH.shape[-1])
        picked = jnp.maximum(head_BTE, 0) // G
        q = jnp.take_along_axis(q_BTEGH, picked[..., None, None], axis=2)[:, :, :, None]
        q_at = position_BT[:, :, None, None]
        head = jnp.maximum(head_BTE, 0)[..., None, None]
        seen = pattern.key_mask(number, head, q_at, k_at[:, :, None])
        real = (q_at >= 0) & (head_BTE >= 0)[..., None]
        out, total = pattern.softmax(q, k, v, seen & valid[..., None, :] & real[..., None])
        index = (
            np.arange(B).reshape(B, 1, 1),
            np.arange(T).reshape(1, T, 1),
            rank_N.reshape(1, 1, N),
            0,
            np.arange(N).reshape(1, 1, N) % G,
        )
        outputs.append(take_tokens((out, total), index, d.head_mask(position_BT)))
    return pattern.mix(outputs, q_BTNH.dtype)


def _heads_by_residue(
    d: Dilation, kv_heads: int, share: bool
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return the heads per residue, `[ratio, E]` (-1: none), each head's index there, and a flag.

    The flag is True if all heads of a key head are grouped as one.
    """
    N = len(d.offsets)
    if share and d.ratio == 1 and min(d.offsets) >= 0:
        group = N // kv_heads
        return (np.arange(kv_heads, dtype=np.int32) * group)[None], np.arange(N) // group, True
    heads_by_offset = [[j for j in range(N) if d.offsets[j] == o] for o in range(d.ratio)]
    heads = np.full((d.ratio, max(map(len, heads_by_offset))), -1, np.int32)
    rank_N = np.zeros(N, int)
    for o, indices in enumerate(heads_by_offset):
        heads[o, : len(indices)] = indices
        rank_N[indices] = range(len(indices))
    return heads, rank_N, False


def attend_tokens(
    pattern: DilationPattern, q_BTNH: jax.Array, position_BT: jax.Array, parts: tuple[Part, ...]
) -> jax.Array:
    """Compute dilated attention one new token at a time, at any positions."""

    def one(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_BNH, position_B = inputs
        return gather_and_attend(pattern, q_BNH[:, None], position_B[:, None], parts)[:, 0]

    out = jax.lax.map(one, (jnp.moveaxis(q_BTNH, 1, 0), position_BT.T))
    return jnp.moveaxis(out, 0, 1)


def attend_documents(
    pattern: DilationPattern,
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: tuple[Part, ...],
    document_BT: jax.Array,
) -> jax.Array:
    """Compute dilated attention of new tokens that attend to their own document only."""
    B, T, N, H = q_BTNH.shape
    rows = max(d.max_positions for d in pattern.dilations)
    width = max(1, min(T, MAX_SCORES // (B * N * rows * H)))  # columns at a time
    first_B, count = first_position(position_BT) - pattern.reach + 1, T + pattern.reach - 1
    cached = [make_finder(p.position_BS, first_B, count) for p in parts[:-1]]
    row = jnp.arange(B)[None, :, None, None, None]

    def attend_columns(inputs: tuple[jax.Array, ...]) -> jax.Array:
        q, at_BW, column_BW, own_BW = inputs

        def find(position: jax.Array) -> jax.Array:
            """Look up the last part: the distance in columns equals that in positions."""
            wanted = position.reshape(1, B, at_BW.shape[1], -1, position.shape[-1])
            column = (column_BW - at_BW)[None, :, :, None, None] + wanted
            inside = (column >= 0) & (column < T) & (wanted >= 0)
            index = row, jnp.clip(column, 0, T - 1)
            inside &= (position_BT[index] == wanted) & (
                document_BT[index] == own_BW[None, :, :, None, None]
            )
            return jnp.where(inside, column, -1).reshape(position.shape)

        return gather_and_attend(pattern, q, at_BW, parts, [*cached, find])

    def split_columns(x: jax.Array, blank: int) -> jax.Array:
        pad = [(0, 0), (0, -T % width), *[(0, 0)] * (x.ndim - 2)]
        padded = jnp.pad(x, pad, constant_values=blank)
        return jnp.moveaxis(padded.reshape(B, -1, width, *x.shape[2:]), 1, 0)

    column_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    inputs = (
        split_columns(q_BTNH, 0),
        split_columns(position_BT, -1),
        split_columns(column_BT, 0),
        split_columns(document_BT, -1),
    )
    out = jax.lax.map(attend_columns, inputs)
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, N, H)[:, :T]
