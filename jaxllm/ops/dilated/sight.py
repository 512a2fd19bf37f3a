"""What queries share: what a dilation shows, how dilations are mixed, and where positions lie."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops.attention import Part, capped
from jaxllm.ops.entries import dense

SCORES = 1 << 22  # that are made at a time: what is larger goes in turns

# Where positions `[X, B, ...]` lie in one part: int32 of the same shape, -1 for nowhere.
Find = Callable[[jax.Array], jax.Array]


class Dilation(NamedTuple):
    """A pair of a segment length and a dilation, and what each head sees of it.

    The text is cut at the multiples of `length`, by positions. Of a segment, head j has every
    `ratio`-th position from number `offsets[j]` on (equation 8); -1: nothing. Where `ratio` does
    not divide `length`, the last stride is shorter, and some heads have a position less.
    """

    length: int
    ratio: int
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many positions of a segment a head has, at most."""
        return -(-self.length // self.ratio)

    def residue(self, position: jax.Array) -> jax.Array:
        """The offset by which a position is seen."""
        return position % self.length % self.ratio

    def shown(self, position_BT: jax.Array) -> jax.Array:
        """The heads that have each position, bool `[B, T, N]`; none has padding."""
        own = (
            self.residue(position_BT)[..., None] == jnp.asarray(self.offsets, jnp.int32)[None, None]
        )
        return own & (position_BT >= 0)[..., None]


class Sight(NamedTuple):
    """What is the same for all queries of a layer.

    dedupe: a key that several dilations show counts once. frozen_mixture: no gradient goes through
    the mixture.
    """

    dilations: tuple[Dilation, ...]
    scale: float
    cap: float | None = None
    dedupe: bool = False
    frozen_mixture: bool = False

    @property
    def reach(self) -> int:
        """How far back the longest segment goes, the query's own position included."""
        return max(d.length for d in self.dilations)

    def seen_by(
        self, number: int, head: Any, q_position: jax.Array, k_position: jax.Array
    ) -> jax.Array:
        """Which keys of its segment dilation `number` shows: none after the query and, with dedupe,
        none that a dilation before it has shown. head: `[..., 1, 1]`.
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
        """Attention of `[..., Q, G, H]` over `[..., M, H]` where `[..., Q, M]` says so, float32,
        and the logarithm of its denominators `[..., Q, G]`, -inf where nothing is seen.
        """
        score = capped(self.scale * _product("...qgh,...kh->...qgk", q, k), self.cap)
        score = jnp.where(seen[..., None, :], score, -jnp.inf)
        top = jax.lax.stop_gradient(score.max(axis=-1))
        top = jnp.where(jnp.isneginf(top), 0.0, top)
        weight = jnp.exp(score - top[..., None])
        total = weight.sum(axis=-1)
        some = jnp.where(total == 0, 1.0, total)
        out = _product("...qgk,...kh->...qgh", weight.astype(q.dtype), v) / some[..., None]
        return out, jnp.where(total == 0, -jnp.inf, jnp.log(some) + top)

    def mixed(self, found: Sequence[tuple[jax.Array, jax.Array]], dtype: Any) -> jax.Array:
        """What the dilations gave, weighed by their denominators (equation 10)."""
        total = jnp.stack([log_total for _, log_total in found])
        if self.frozen_mixture:
            total = jax.lax.stop_gradient(total)
        top = jax.lax.stop_gradient(total.max(axis=0))
        share = jnp.exp(total - jnp.where(jnp.isneginf(top), 0.0, top)[None])
        whole = share.sum(axis=0)
        share = share / jnp.where(whole == 0, 1.0, whole)[None]
        out = sum(share[i][..., None] * out for i, (out, _) in enumerate(found))
        return jnp.asarray(out).astype(dtype)


class Streams(NamedTuple):
    """Heads that read the same rows together: E streams of G heads each, all constants.

    head_E: the first head of each, the others follow. kv_E: whose keys they read.
    """

    head_E: np.ndarray
    kv_E: np.ndarray
    group: int


def first(position_BT: jax.Array) -> jax.Array:
    """The first position of each row; 0 for a row of padding."""
    most = jnp.iinfo(jnp.int32).max
    first_B = jnp.where(position_BT >= 0, position_BT, most).min(axis=1)
    return jnp.where(first_B == most, 0, first_B)


def finder(position_BS: jax.Array, first_B: jax.Array, count: int) -> Find:
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


def streams(dilation: Dilation, kv_heads: int, share: bool) -> Streams:
    """The heads of a dilation. share: whether those of one key head may read together."""
    heads = np.flatnonzero(np.asarray(dilation.offsets) >= 0)
    group = len(dilation.offsets) // kv_heads
    if share and dilation.ratio == 1 and len(heads) == len(dilation.offsets):
        kv_E = np.arange(kv_heads)
        return Streams(kv_E * group, kv_E, group)
    return Streams(heads, heads // group, 1)


def read(
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
            (k, new_k), (v, new_v) = same_dtype(k, found[0]), same_dtype(v, found[1])
            k = jnp.where(is_there[..., None], new_k, k)
            v = jnp.where(is_there[..., None], new_v, v)
            there |= is_there
    assert k is not None and v is not None and there is not None
    return k, v, there


def taken(
    found: tuple[jax.Array, jax.Array], index: Any, shown_BTN: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What each head of each token has of what a dilation gave, `[B, T, N, H]` and `[B, T, N]`."""
    out, total = (x[index] for x in found)
    return jnp.where(shown_BTN[..., None], out, 0.0), jnp.where(shown_BTN, total, -jnp.inf)


def same_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    if a.dtype == b.dtype:
        return a, b
    return a.astype(jnp.float32), b.astype(jnp.float32)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *same_dtype(a, b), preferred_element_type=jnp.float32)
