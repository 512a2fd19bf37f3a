"""The dilation pattern of a layer, the mixture of dilations, and the lookup of positions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops.attention import Part, soft_cap
from jaxllm.ops.kv_quant import dequantize
from jaxllm.ops.products import einsum, match_dtypes

MAX_SCORES = 1 << 22  # computed at a time; more are split into turns

# Maps positions `[X, B, ...]` to slots of one part: int32 of the same shape, -1 if missing.
FindSlots = Callable[[jax.Array], jax.Array]


class Dilation(NamedTuple):
    """A segment length and a dilation ratio, with the offset of each head.

    Segments begin at multiples of `length`. In a segment, head j has every `ratio`-th position from
    `offsets[j]` on (equation 8); -1: none. If `ratio` does not divide `length`, the last stride is
    shorter, and some heads have one position less.
    """

    length: int
    ratio: int
    offsets: tuple[int, ...]

    @property
    def max_positions(self) -> int:
        """Maximum number of positions of a segment that a head has."""
        return -(-self.length // self.ratio)

    def residue(self, position: jax.Array) -> jax.Array:
        """Return the offset of the heads that have a position."""
        return position % self.length % self.ratio

    def head_mask(self, position_BT: jax.Array) -> jax.Array:
        """Return which heads have each position, bool `[B, T, N]`; none have padding."""
        has_residue = (
            self.residue(position_BT)[..., None] == jnp.asarray(self.offsets, jnp.int32)[None, None]
        )
        return has_residue & (position_BT >= 0)[..., None]


class DilationPattern(NamedTuple):
    """The dilation pattern of a layer, the same for all queries.

    Attributes:
        dilations: The segment lengths and ratios.
        scale, cap: Factor and soft cap of scores.
        dedupe: Count a key once if several dilations contain it.
        frozen_mixture: Stop gradients through the mixture weights.
    """

    dilations: tuple[Dilation, ...]
    scale: float
    cap: float | None = None
    dedupe: bool = False
    frozen_mixture: bool = False

    @property
    def reach(self) -> int:
        """The longest segment: how far back a query attends, its own position included."""
        return max(d.length for d in self.dilations)

    def key_mask(
        self, number: int, head: Any, q_position: jax.Array, k_position: jax.Array
    ) -> jax.Array:
        """Return which keys of its segment each query attends to in dilation `number`.

        None after the query and, with dedupe, none that an earlier dilation contains. head: `[...,
        1, 1]`.
        """
        q, k = q_position[..., :, None], k_position[..., None, :]
        seen = k <= q
        for d in self.dilations[:number] if self.dedupe else ():
            offset = jnp.asarray(d.offsets, jnp.int32)[head]
            together = q // d.length == k // d.length
            seen &= ~(together & (d.residue(q) == offset) & (d.residue(k) == offset))
        return seen

    def softmax(
        self, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Attend `[..., Q, G, H]` to `[..., M, H]` under the mask `[..., Q, M]`.

        Returns the heads in float32, and the logarithm of their denominators `[..., Q, G]`; -inf if
        a query attends to nothing.
        """
        score = soft_cap(self.scale * einsum("...qgh,...kh->...qgk", q, k), self.cap)
        score = jnp.where(seen[..., None, :], score, -jnp.inf)
        top = jax.lax.stop_gradient(score.max(axis=-1))
        top = jnp.where(jnp.isneginf(top), 0.0, top)
        weight = jnp.exp(score - top[..., None])
        total = weight.sum(axis=-1)
        some = jnp.where(total == 0, 1.0, total)
        out = einsum("...qgk,...kh->...qgh", weight.astype(q.dtype), v) / some[..., None]
        return out, jnp.where(total == 0, -jnp.inf, jnp.log(some) + top)

    def mix(self, outputs: Sequence[tuple[jax.Array, jax.Array]], dtype: Any) -> jax.Array:
        """Average the outputs of the dilations, weighted by their denominators (equation 10)."""
        total = jnp.stack([log_total for _, log_total in outputs])
        if self.frozen_mixture:
            total = jax.lax.stop_gradient(total)
        top = jax.lax.stop_gradient(total.max(axis=0))
        share = jnp.exp(total - jnp.where(jnp.isneginf(top), 0.0, top)[None])
        whole = share.sum(axis=0)
        share = share / jnp.where(whole == 0, 1.0, whole)[None]
        out = sum(share[i][..., None] * out for i, (out, _) in enumerate(outputs))
        return jnp.asarray(out).astype(dtype)


class HeadStreams(NamedTuple):
    """Heads grouped by the rows that they read: E streams of G heads each, as constants.

    Attributes:
        head_E: First head of each stream; the others follow.
        kv_E: Its key head.
        group: G.
    """

    head_E: np.ndarray
    kv_E: np.ndarray
    group: int


def first_position(position_BT: jax.Array) -> jax.Array:
    """Return the first position of each row; 0 for a row of padding."""
    most = jnp.iinfo(jnp.int32).max
    first_B = jnp.where(position_BT >= 0, position_BT, most).min(axis=1)
    return jnp.where(first_B == most, 0, first_B)


def make_finder(position_BS: jax.Array, first_B: jax.Array, count: int) -> FindSlots:
    """Return a lookup of slots for positions from `first_position` to before `first + count`."""
    B, S = first_B.shape[0], position_BS.shape[1]
    position_BS = jnp.broadcast_to(position_BS, (B, S))
    row_B1, slot_S = jnp.arange(B)[:, None], jnp.arange(S, dtype=jnp.int32)
    live_BS = position_BS >= 0
    at_B1 = live_BS.argmax(axis=1).astype(jnp.int32)[:, None]
    ahead_B1 = at_B1 - jnp.take_along_axis(position_BS, at_B1, axis=1)
    wanted_BP = first_B[:, None] + jnp.arange(count, dtype=jnp.int32)[None]

    def lookup_by_offset() -> jax.Array:
        slot_BP = wanted_BP + ahead_B1
        inside = (slot_BP >= 0) & (slot_BP < S) & (wanted_BP >= 0)
        held_BP = jnp.take_along_axis(position_BS, jnp.clip(slot_BP, 0, S - 1), axis=1)
        return jnp.where(inside & (held_BP == wanted_BP), slot_BP, -1)

    def lookup_by_scatter() -> jax.Array:
        index_BS = position_BS - first_B[:, None]
        index_BS = jnp.where(live_BS & (index_BS >= 0), index_BS, count)  # beyond: dropped
        nowhere_BP = jnp.full((B, count), -1, jnp.int32)
        return nowhere_BP.at[row_B1, index_BS].set(slot_S[None], mode="drop")

    straight = (~live_BS | (slot_S[None] - position_BS == ahead_B1)).all()
    slot_BP = jax.lax.cond(straight, lookup_by_offset, lookup_by_scatter)

    def find(position: jax.Array) -> jax.Array:
        column = (1, B) + (1,) * (position.ndim - 2)
        index = position - first_B.reshape(column)
        slot = slot_BP[np.arange(B).reshape(column), jnp.clip(index, 0, count - 1)]
        return jnp.where((index >= 0) & (index < count), slot, -1)

    return find


def head_streams(dilation: Dilation, kv_heads: int, share: bool) -> HeadStreams:
    """Return the head streams of a dilation. share: whether heads of one key head are grouped."""
    heads = np.flatnonzero(np.asarray(dilation.offsets) >= 0)
    group = len(dilation.offsets) // kv_heads
    if share and dilation.ratio == 1 and len(heads) == len(dilation.offsets):
        kv_E = np.arange(kv_heads)
        return HeadStreams(kv_E * group, kv_E, group)
    return HeadStreams(heads, heads // group, 1)


def gather_kv(
    parts: Sequence[Part], finders: Sequence[FindSlots], position: jax.Array, kv: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gather keys, values and existence at positions `[X, B, E, M]` of key heads `[..., E, 1]`.

    Missing ones are zero: entries of empty slots must not reach a sum.
    """
    k = v = valid = None
    for part, find in zip(parts, finders, strict=True):
        slot = find(position)
        rows = part.k_BSKH.shape[0]
        row = jnp.arange(rows).reshape((1, rows) + (1,) * (slot.ndim - 2))
        entries_kv = [
            dequantize(jax.tree.map(lambda x: x[row, jnp.maximum(slot, 0), kv], entries))  # noqa: B023
            for entries in (part.k_BSKH, part.v_BSKH)
        ]
        part_valid = slot >= 0
        if k is None or v is None or valid is None:
            k, v = (jnp.where(part_valid[..., None], x, jnp.zeros_like(x)) for x in entries_kv)
            valid = part_valid
        else:
            (k, new_k), (v, new_v) = match_dtypes(k, entries_kv[0]), match_dtypes(v, entries_kv[1])
            k = jnp.where(part_valid[..., None], new_k, k)
            v = jnp.where(part_valid[..., None], new_v, v)
            valid |= part_valid
    assert k is not None and v is not None and valid is not None
    return k, v, valid


def take_tokens(
    output: tuple[jax.Array, jax.Array], index: Any, shown_BTN: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Select each token's heads from a dilation's outputs, `[B, T, N, H]` and `[B, T, N]`."""
    out, total = (x[index] for x in output)
    return jnp.where(shown_BTN[..., None], out, 0.0), jnp.where(shown_BTN, total, -jnp.inf)
