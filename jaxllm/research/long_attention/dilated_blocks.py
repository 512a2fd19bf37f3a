"""Dilated attention of consecutive positions: block by block, each within one segment."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops.attention import Part
from jaxllm.research.long_attention.dilation_pattern import (
    MAX_SCORES,
    DilationPattern,
    FindSlots,
    first_position,
    gather_kv,
    head_streams,
    make_finder,
    take_tokens,
)


def attend_blocks(
    pattern: DilationPattern, q_BTNH: jax.Array, position_BT: jax.Array, parts: tuple[Part, ...]
) -> jax.Array:
    """Compute dilated attention of tokens at consecutive positions, block by block."""
    T = q_BTNH.shape[1]
    begin_B = first_position(position_BT)
    first_B, count = begin_B - pattern.reach + 1, T + pattern.reach - 1
    columns = make_finder(position_BT, first_B, count)
    finders = [make_finder(p.position_BS, first_B, count) for p in parts]
    outputs = [
        _attend_dilation(pattern, i, q_BTNH, position_BT, begin_B, columns, parts, finders)
        for i in range(len(pattern.dilations))
    ]
    return pattern.mix(outputs, q_BTNH.dtype)


def _attend_dilation(
    pattern: DilationPattern,
    number: int,
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    begin_B: jax.Array,
    columns: FindSlots,
    parts: tuple[Part, ...],
    finders: Sequence[FindSlots],
) -> tuple[jax.Array, jax.Array]:
    """Return one dilation's heads, `[B, T, N, H]`, and the logarithm of their denominators."""
    d = pattern.dilations[number]
    B, T, N, H = q_BTNH.shape
    K, M, r = parts[0].k_BSKH.shape[2], d.max_positions, d.ratio
    head_E, kv_E, G = head_streams(d, K, share=not (pattern.dedupe and number))
    E = len(head_E)
    head_rows = -(-(T - 1) // r) + 1  # maximum rows of a head in T positions
    Q = min(M, head_rows)
    alone = len(parts) == 1  # no keys before the first of these tokens
    M = Q if alone else M
    row_scores = B * E * G * M  # scores per row of queries
    query_rows = max(1, min(Q, MAX_SCORES // row_scores))  # rows of queries at a time
    turns = -(-Q // query_rows)
    most = (T + d.length - 2) // d.length + 1  # maximum number of segments in T positions
    step = max(1, min(most, MAX_SCORES // (row_scores * query_rows * turns)))  # segments at a time
    steps = -(-most // step)

    X = steps * step
    segment_XB = begin_B[None] // d.length + jnp.arange(X, dtype=jnp.int32)[:, None]
    begin_XB = segment_XB * d.length
    start_XB = jnp.maximum(begin_B[None] - begin_XB, 0) // r  # first row of queries per segment
    offset_11E1 = np.asarray(d.offsets, np.int32)[head_E].reshape(1, 1, E, 1)
    row_111Q = np.arange(turns * query_rows, dtype=np.int32).reshape(1, 1, 1, -1)
    place = r * (start_XB[..., None, None] + row_111Q) + offset_11E1
    q_at = begin_XB[..., None, None] + place
    column = jnp.where((place < d.length) & (row_111Q < Q), columns(q_at), -1)
    row_111M = np.arange(M, dtype=np.int32).reshape(1, 1, 1, -1)
    before = start_XB[..., None, None] if alone else 0
    k_at = begin_XB[..., None, None] + r * (before + row_111M) + offset_11E1
    k, v, valid = gather_kv(parts, finders, k_at, kv_E.reshape(1, 1, E, 1))
    row = np.arange(B).reshape(1, B, 1, 1)
    q_BTEGH = q_BTNH.reshape(B, T, N // G, G, H)
    q = q_BTEGH[row, jnp.maximum(column, 0), head_E.reshape(1, 1, E, 1) // G]

    def attend_rows(
        inputs: tuple[jax.Array, ...], k: jax.Array, v: jax.Array, valid: jax.Array, k_at: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        q, column, q_at = inputs
        seen = pattern.key_mask(number, head_E.reshape(1, 1, E, 1, 1), q_at, k_at)
        seen &= (column >= 0)[..., None] & valid[..., None, :]
        return pattern.softmax(q, k, v, seen)

    def attend_segments(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, column, q_at, *keys = inputs
        one = jax.checkpoint(attend_rows)
        if turns == 1:
            return one((q, column, q_at), *keys)
        split = [
            jnp.moveaxis(x.reshape(*x.shape[:3], turns, query_rows, *x.shape[4:]), 3, 0)
            for x in (q, column, q_at)
        ]
        out, total = jax.lax.map(lambda inputs: one(inputs, *keys), tuple(split))

        def merge_turns(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:])

        return merge_turns(out), merge_turns(total)

    def empty_output(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        shape = inputs[0].shape
        return jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], -jnp.inf, jnp.float32)

    def attend_if_any(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond((inputs[1] >= 0).any(), attend_segments, empty_output, inputs)

    everything = (q, column, q_at, k, v, valid, k_at)
    if steps == 1:
        out, total = attend_if_any(everything)
    else:
        grouped = tuple(x.reshape(steps, step, *x.shape[1:]) for x in everything)
        out, total = (x.reshape(X, *x.shape[2:]) for x in jax.lax.map(attend_if_any, grouped))

    # Select each token's output from its block.
    which_BT = position_BT // d.length - (begin_B // d.length)[:, None]
    which_BT = jnp.clip(which_BT, 0, X - 1)
    row_BT = position_BT % d.length // r - jnp.take_along_axis(start_XB.T, which_BT, axis=1)
    stream_N = np.full(N, 0)
    for e, head in enumerate(head_E):
        stream_N[head : head + G] = e
    index = (
        which_BT[..., None],
        np.arange(B).reshape(B, 1, 1),
        stream_N.reshape(1, 1, N),
        jnp.clip(row_BT, 0, Q - 1)[..., None],
        np.arange(N).reshape(1, 1, N) % G,
    )
    return take_tokens((out, total), index, d.head_mask(position_BT))
