"""Dilated attention (LongNet, Ding et al. 2023, sections 2.2 to 2.4) by gathering what it shows.

Of a dilation (w, r) a head has the positions `o + r u`, and the u of one segment are w / r in a
row: each dilation is causal attention within blocks of them. What it gives is mixed with the others
by softmax denominators, through the logarithms of these. Nothing is as large as tokens times
tokens, forwards or backwards, and time grows with the tokens times the sum of w / r^2. Where a
position lies is looked up, so that slots may hold the tokens in any order, or not at all.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops.attention import Part, capped
from jaxllm.ops.dilation import Dilation
from jaxllm.ops.entries import dense

SCORES = 1 << 22  # that are made at a time: what is larger goes in turns

# Where positions `[X, B, ...]` lie in one part: int32 of the same shape, -1 for nowhere.
Find = Callable[[jax.Array], jax.Array]


class Sight(NamedTuple):
    """What is the same for all queries; dedupe, frozen_mixture: see `attend`."""

    dilations: tuple[Dilation, ...]
    scale: float
    cap: float | None
    dedupe: bool
    frozen_mixture: bool

    @property
    def reach(self) -> int:
        """How far back the longest segment goes, the query's own position included."""
        return max(d.length for d in self.dilations)


class Streams(NamedTuple):
    """Heads that read the same rows together: E streams of G heads each, all constants.

    head_E: the first head of each, the others follow. kv_E: whose keys they read.
    """

    head_E: np.ndarray
    kv_E: np.ndarray
    group: int


def attend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    dilations: Sequence[Dilation],
    *,
    scale: float,
    cap: float | None = None,
    dedupe: bool = False,
    frozen_mixture: bool = False,
    document_BT: jax.Array | None = None,
) -> jax.Array:
    """Dilated attention of new tokens over all parts, of which the last are themselves.

    `[B, T, N, H]` in q's dtype; scores, softmax and sums are float32. A token with nothing to see
    gives zeros. No two tokens of a row are at one position, or of a document. dedupe: a key that
    several dilations show counts once. frozen_mixture: no gradient goes through the mixture.
    document_BT: int32, which document each new token is of: it sees of the last part its own alone,
    whose tokens stand side by side and in order.

    New tokens that stand apart, and rows of several documents, go one by one: the same numbers, for
    the time of a gather for each.
    """
    T = q_BTNH.shape[1]
    sight = Sight(tuple(dilations), scale, cap, dedupe, frozen_mixture)
    if T == 1:
        return _each(sight, q_BTNH, position_BT, tuple(parts))
    real_BT = position_BT >= 0
    last_B = position_BT.max(axis=1)
    together = (last_B < _first(position_BT) + T).all()
    if document_BT is not None:
        own_B = jnp.where(real_BT, document_BT, -1).max(axis=1)
        together &= (~real_BT | (document_BT == own_B[:, None])).all()

    def blocks(q: jax.Array, position: jax.Array, parts: tuple[Part, ...]) -> jax.Array:
        return _in_blocks(sight, q, position, parts)

    def each(q: jax.Array, position: jax.Array, parts: tuple[Part, ...]) -> jax.Array:
        if document_BT is None:
            return _one_by_one(sight, q, position, parts)
        return _by_documents(sight, q, position, parts, document_BT)

    return jax.lax.cond(together, blocks, each, q_BTNH, position_BT, tuple(parts))


def _first(position_BT: jax.Array) -> jax.Array:
    """The first position of each row; 0 for a row of padding."""
    most = jnp.iinfo(jnp.int32).max
    first_B = jnp.where(position_BT >= 0, position_BT, most).min(axis=1)
    return jnp.where(first_B == most, 0, first_B)


def _finder(position_BS: jax.Array, first_B: jax.Array, count: int) -> Find:
    """Where the positions from `first` to before `first + count` lie in a part."""
    B, S = first_B.shape[0], position_BS.shape[1]
    position_BS = jnp.broadcast_to(position_BS, (B, S))
    row_B1, slot_S = jnp.arange(B)[:, None], jnp.arange(S, dtype=jnp.int32)
    live_BS = position_BS >= 0
    at_B1 = live_BS.argmax(axis=1).astype(jnp.int32)[:, None]
    ahead_B1 = at_B1 - jnp.take_along_axis(position_BS, at_B1, axis=1)
    wanted_BP = first_B[:, None] + jnp.arange(count, dtype=jnp.int32)[None]

    def counted() -> jax.Array:
        slot_BP = wanted_BP + ahead_B1
        inside = (slot_BP >= 0) & (slot_BP < S) & (wanted_BP >= 0)
        held_BP = jnp.take_along_axis(position_BS, jnp.clip(slot_BP, 0, S - 1), axis=1)
        return jnp.where(inside & (held_BP == wanted_BP), slot_BP, -1)

    def written() -> jax.Array:
        index_BS = position_BS - first_B[:, None]
        index_BS = jnp.where(live_BS & (index_BS >= 0), index_BS, count)  # beyond: dropped
        nowhere_BP = jnp.full((B, count), -1, jnp.int32)
        return nowhere_BP.at[row_B1, index_BS].set(slot_S[None], mode="drop")

    straight = (~live_BS | (slot_S[None] - position_BS == ahead_B1)).all()
    slot_BP = jax.lax.cond(straight, counted, written)

    def find(position: jax.Array) -> jax.Array:
        column = (1, B) + (1,) * (position.ndim - 2)
        index = position - first_B.reshape(column)
        found = slot_BP[np.arange(B).reshape(column), jnp.clip(index, 0, count - 1)]
        return jnp.where((index >= 0) & (index < count), found, -1)

    return find


def _streams(dilation: Dilation, kv_heads: int, share: bool) -> Streams:
    """The heads of a dilation. share: whether those of one key head may read together."""
    heads = np.flatnonzero(np.asarray(dilation.offsets) >= 0)
    group = len(dilation.offsets) // kv_heads
    if share and dilation.ratio == 1 and len(heads) == len(dilation.offsets):
        kv_E = np.arange(kv_heads)
        return Streams(kv_E * group, kv_E, group)
    return Streams(heads, heads // group, 1)


def _read(
    parts: Sequence[Part], finders: Sequence[Find], position: jax.Array, kv: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values at positions `[X, B, E, M]` of key heads `[..., E, 1]`, and which are there.

    What is not there is zero: what an empty slot holds must not reach a sum.
    """
    k = v = there = None
    for part, find in zip(parts, finders, strict=True):
        slot = find(position)
        rows = part.k_BSKH.shape[0]
        row = jnp.arange(rows).reshape((1, rows) + (1,) * (slot.ndim - 2))
        found = [
            dense(jax.tree.map(lambda x: x[row, jnp.maximum(slot, 0), kv], entries))  # noqa: B023
            for entries in (part.k_BSKH, part.v_BSKH)
        ]
        is_there = slot >= 0
        if k is None or v is None or there is None:
            k, v = (jnp.where(is_there[..., None], x, jnp.zeros_like(x)) for x in found)
            there = is_there
        else:
            (k, new_k), (v, new_v) = _same_dtype(k, found[0]), _same_dtype(v, found[1])
            k = jnp.where(is_there[..., None], new_k, k)
            v = jnp.where(is_there[..., None], new_v, v)
            there |= is_there
    assert k is not None and v is not None and there is not None
    return k, v, there


def _softmax(
    sight: Sight, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention of `[..., Q, G, H]` over `[..., M, H]` where `[..., Q, M]` says so, float32, and
    the logarithm of its denominators `[..., Q, G]`, -inf where nothing is seen.
    """
    score = capped(sight.scale * _product("...qgh,...kh->...qgk", q, k), sight.cap)
    score = jnp.where(seen[..., None, :], score, -jnp.inf)
    top = jax.lax.stop_gradient(score.max(axis=-1))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = jnp.exp(score - top[..., None])
    total = weight.sum(axis=-1)
    some = jnp.where(total == 0, 1.0, total)
    out = _product("...qgk,...kh->...qgh", weight.astype(q.dtype), v) / some[..., None]
    return out, jnp.where(total == 0, -jnp.inf, jnp.log(some) + top)


def _seen(
    sight: Sight, number: int, head: Any, q_position: jax.Array, k_position: jax.Array
) -> jax.Array:
    """Which keys of its segment dilation `number` shows: none after the query and, with dedupe,
    none that a dilation before it has shown. head: `[..., 1, 1]`.
    """
    q, k = q_position[..., :, None], k_position[..., None, :]
    seen = k <= q
    for length, ratio, offsets in sight.dilations[:number] if sight.dedupe else ():
        offset = jnp.asarray(offsets, jnp.int32)[head]
        seen &= (q // length != k // length) | (q % ratio != offset) | (k % ratio != offset)
    return seen


def _mixed(sight: Sight, found: Sequence[tuple[jax.Array, jax.Array]], dtype: Any) -> jax.Array:
    """What the dilations gave, weighed by their denominators (equation 10)."""
    total = jnp.stack([log_total for _, log_total in found])
    if sight.frozen_mixture:
        total = jax.lax.stop_gradient(total)
    top = jax.lax.stop_gradient(total.max(axis=0))
    share = jnp.exp(total - jnp.where(jnp.isneginf(top), 0.0, top)[None])
    whole = share.sum(axis=0)
    share = share / jnp.where(whole == 0, 1.0, whole)[None]
    out = sum(share[i][..., None] * out for i, (out, _) in enumerate(found))
    return jnp.asarray(out).astype(dtype)


def _in_blocks(
    sight: Sight, q_BTNH: jax.Array, position_BT: jax.Array, parts: tuple[Part, ...]
) -> jax.Array:
    """Tokens of a run of positions: block by block, each within one segment."""
    T = q_BTNH.shape[1]
    begin_B = _first(position_BT)
    first_B, count = begin_B - sight.reach + 1, T + sight.reach - 1
    columns = _finder(position_BT, first_B, count)
    finders = [_finder(p.position_BS, first_B, count) for p in parts]
    found = [
        _dilation(sight, i, q_BTNH, position_BT, begin_B, columns, parts, finders)
        for i in range(len(sight.dilations))
    ]
    return _mixed(sight, found, q_BTNH.dtype)


def _dilation(
    sight: Sight,
    number: int,
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    begin_B: jax.Array,
    columns: Find,
    parts: tuple[Part, ...],
    finders: Sequence[Find],
) -> tuple[jax.Array, jax.Array]:
    """What one dilation gives each token, `[B, T, N, H]`, and the logarithm of its denominator."""
    d = sight.dilations[number]
    B, T, N, H = q_BTNH.shape
    K, M, r = parts[0].k_BSKH.shape[2], d.rows, d.ratio
    head_E, kv_E, G = _streams(d, K, share=not (sight.dedupe and number))
    E = len(head_E)
    own = -(-(T - 1) // r) + 1  # rows of a head that T positions have, at most
    Q = min(M, own)
    each = B * E * G * M  # scores of a row of queries
    turn = max(1, min(Q, SCORES // each))  # rows of queries at a time
    turns = -(-Q // turn)
    most = (own + M - 2) // M + 1  # segments that so many rows can be of
    step = max(1, min(most, SCORES // (each * turn * turns)))  # segments at a time
    steps = -(-most // step)

    X = steps * step
    segment_XB = begin_B[None] // d.length + jnp.arange(X, dtype=jnp.int32)[:, None]
    start_XB = jnp.maximum(segment_XB * M, begin_B[None] // r)
    offset_11E1 = np.asarray(d.offsets, np.int32)[head_E].reshape(1, 1, E, 1)
    row_111Q = np.arange(turns * turn, dtype=np.int32).reshape(1, 1, 1, -1)
    u_XB1Q = start_XB[..., None, None] + row_111Q
    q_at = r * u_XB1Q + offset_11E1
    own_XB1Q = (u_XB1Q < (segment_XB[..., None, None] + 1) * M) & (row_111Q < Q)
    column = jnp.where(own_XB1Q, columns(q_at), -1)
    row_111M = np.arange(M, dtype=np.int32).reshape(1, 1, 1, -1)
    k_at = r * (segment_XB[..., None, None] * M + row_111M) + offset_11E1
    k, v, there = _read(parts, finders, k_at, kv_E.reshape(1, 1, E, 1))
    row = np.arange(B).reshape(1, B, 1, 1)
    q_BTEGH = q_BTNH.reshape(B, T, N // G, G, H)
    q = q_BTEGH[row, jnp.maximum(column, 0), head_E.reshape(1, 1, E, 1) // G]

    def rows(
        given: tuple[jax.Array, ...], k: jax.Array, v: jax.Array, there: jax.Array, k_at: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        q, column, q_at = given
        seen = _seen(sight, number, head_E.reshape(1, 1, E, 1, 1), q_at, k_at)
        seen &= (column >= 0)[..., None] & there[..., None, :]
        return _softmax(sight, q, k, v, seen)

    def segments(given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, column, q_at, *keys = given
        one = jax.checkpoint(rows)
        if turns == 1:
            return one((q, column, q_at), *keys)
        split = [
            jnp.moveaxis(x.reshape(*x.shape[:3], turns, turn, *x.shape[4:]), 3, 0)
            for x in (q, column, q_at)
        ]
        out, total = jax.lax.map(lambda given: one(given, *keys), tuple(split))
        return tuple(  # type: ignore[return-value]
            jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:]) for x in (out, total)
        )

    def nothing(given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        shape = given[0].shape
        return jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], -jnp.inf, jnp.float32)

    def some(given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond((given[1] >= 0).any(), segments, nothing, given)

    everything = (q, column, q_at, k, v, there, k_at)
    if steps == 1:
        out, total = some(everything)
    else:
        grouped = tuple(x.reshape(steps, step, *x.shape[1:]) for x in everything)
        out, total = (x.reshape(X, *x.shape[2:]) for x in jax.lax.map(some, grouped))

    # Each token takes what the block that it is in has for it.
    which_BT = position_BT // d.length - (begin_B // d.length)[:, None]
    which_BT = jnp.clip(which_BT, 0, X - 1)
    row_BT = position_BT // r - jnp.take_along_axis(start_XB.T, which_BT, axis=1)
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
    shown = (position_BT >= 0)[..., None] & (
        (position_BT % r)[..., None] == jnp.asarray(d.offsets, jnp.int32)[None, None]
    )
    return (
        jnp.where(shown[..., None], out[index], 0.0),
        jnp.where(shown, total[index], -jnp.inf),
    )


def _each(
    sight: Sight,
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: tuple[Part, ...],
    finders: Sequence[Find] | None = None,
) -> jax.Array:
    """Tokens that each gather what they see: only the heads to which a dilation shows something."""
    B, T, N, _ = q_BTNH.shape
    K = parts[0].k_BSKH.shape[2]
    itself = None
    if finders is None:  # of one token
        first_B = position_BT[:, 0] - sight.reach + 1
        if len(parts) > 1 and parts[-1].position_BS.shape == (B, 1):  # it sees itself: no search
            *rest, itself = parts
            parts = tuple(rest)
        finders = [_finder(p.position_BS, first_B, sight.reach) for p in parts]
    found = []
    for number, d in enumerate(sight.dilations):
        heads, rank_N, share = _heads_of(d, K, share=not (sight.dedupe and number))
        residue_BT = position_BT % d.ratio
        head_BTE = jnp.asarray(heads)[residue_BT]
        row_11M = np.arange(d.rows, dtype=np.int32).reshape(1, 1, -1) * d.ratio
        k_at = (position_BT // d.length * d.length + residue_BT)[..., None] + row_11M  # [B, T, M]
        # As `_read` has it: one part of positions `[1, B, T x E, M]`.
        E = head_BTE.shape[-1]
        at = jnp.broadcast_to(k_at[:, :, None], (B, T, E, d.rows)).reshape(1, B, T * E, d.rows)
        kv = (jnp.maximum(head_BTE, 0) // (N // K)).reshape(1, B, T * E, 1)
        k, v, there = (x.reshape(B, T, E, *x.shape[3:]) for x in _read(parts, finders, at, kv))
        if itself is not None:
            index_BTE1 = kv.reshape(B, T, E, 1)
            own = (
                jnp.take_along_axis(dense(x), index_BTE1, axis=2)[:, :, :, None]
                for x in (itself.k_BSKH, itself.v_BSKH)
            )
            k, v = (
                jnp.concatenate(_same_dtype(x, new), axis=3)
                for x, new in zip((k, v), own, strict=True)
            )
            there = jnp.concatenate([there, jnp.ones_like(there[..., :1])], axis=-1)
            k_at = jnp.concatenate([k_at, position_BT[..., None]], axis=-1)
        G = N // K if share else 1
        q_BTEGH = q_BTNH.reshape(B, T, -1, G, q_BTNH.shape[-1])
        picked = jnp.maximum(head_BTE, 0) // G
        q = jnp.take_along_axis(q_BTEGH, picked[..., None, None], axis=2)[:, :, :, None]
        q_at = position_BT[:, :, None, None]
        seen = _seen(
            sight, number, jnp.maximum(head_BTE, 0)[..., None, None], q_at, k_at[:, :, None]
        )
        real = (q_at >= 0) & (head_BTE >= 0)[..., None]
        out, total = _softmax(sight, q, k, v, seen & there[..., None, :] & real[..., None])
        index = (
            np.arange(B).reshape(B, 1, 1),
            np.arange(T).reshape(1, T, 1),
            rank_N.reshape(1, 1, N),
            0,
            np.arange(N).reshape(1, 1, N) % G,
        )
        shown = residue_BT[..., None] == jnp.asarray(d.offsets, jnp.int32)[None, None]
        shown &= (position_BT >= 0)[..., None]
        found.append(
            (
                jnp.where(shown[..., None], out[index], 0.0),
                jnp.where(shown, total[index], -jnp.inf),
            )
        )
    return _mixed(sight, found, q_BTNH.dtype)


def _heads_of(d: Dilation, kv_heads: int, share: bool) -> tuple[np.ndarray, np.ndarray, bool]:
    """The heads that see each residue, `[ratio, E]` and -1 for none; each head's place there; and
    whether all heads of a key head stand there as one.
    """
    N = len(d.offsets)
    if share and d.ratio == 1 and min(d.offsets) >= 0:
        group = N // kv_heads
        return (np.arange(kv_heads, dtype=np.int32) * group)[None], np.arange(N) // group, True
    each = [[j for j in range(N) if d.offsets[j] == o] for o in range(d.ratio)]
    heads = np.full((d.ratio, max(map(len, each))), -1, np.int32)
    rank_N = np.zeros(N, int)
    for o, found in enumerate(each):
        heads[o, : len(found)] = found
        rank_N[found] = range(len(found))
    return heads, rank_N, False


def _one_by_one(
    sight: Sight, q_BTNH: jax.Array, position_BT: jax.Array, parts: tuple[Part, ...]
) -> jax.Array:
    """New tokens wherever they stand."""

    def one(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_BNH, position_B = given
        return _each(sight, q_BNH[:, None], position_B[:, None], parts)[:, 0]

    out = jax.lax.map(one, (jnp.moveaxis(q_BTNH, 1, 0), position_BT.T))
    return jnp.moveaxis(out, 0, 1)


def _by_documents(
    sight: Sight,
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: tuple[Part, ...],
    document_BT: jax.Array,
) -> jax.Array:
    """New tokens that see of each other their own document alone."""
    B, T, N, H = q_BTNH.shape
    rows = max(d.rows for d in sight.dilations)
    width = max(1, min(T, SCORES // (B * N * rows * H)))  # columns at a time
    first_B, count = _first(position_BT) - sight.reach + 1, T + sight.reach - 1
    cached = [_finder(p.position_BS, first_B, count) for p in parts[:-1]]
    row = jnp.arange(B)[None, :, None, None, None]

    def some(given: tuple[jax.Array, ...]) -> jax.Array:
        q, at_BW, column_BW, own_BW = given

        def find(position: jax.Array) -> jax.Array:
            """In the last part: as far before the query's column as before its position."""
            wanted = position.reshape(1, B, at_BW.shape[1], -1, position.shape[-1])
            column = (column_BW - at_BW)[None, :, :, None, None] + wanted
            inside = (column >= 0) & (column < T) & (wanted >= 0)
            held = row, jnp.clip(column, 0, T - 1)
            inside &= (position_BT[held] == wanted) & (
                document_BT[held] == own_BW[None, :, :, None, None]
            )
            return jnp.where(inside, column, -1).reshape(position.shape)

        return _each(sight, q, at_BW, parts, [*cached, find])

    def turns(x: jax.Array, blank: int) -> jax.Array:
        pad = [(0, 0), (0, -T % width), *[(0, 0)] * (x.ndim - 2)]
        padded = jnp.pad(x, pad, constant_values=blank)
        return jnp.moveaxis(padded.reshape(B, -1, width, *x.shape[2:]), 1, 0)

    column_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    given = turns(q_BTNH, 0), turns(position_BT, -1), turns(column_BT, 0), turns(document_BT, -1)
    out = jax.lax.map(some, given)
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, N, H)[:, :T]


def _same_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    if a.dtype == b.dtype:
        return a, b
    return a.astype(jnp.float32), b.astype(jnp.float32)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *_same_dtype(a, b), preferred_element_type=jnp.float32)
