"""Attention as a fold: an online softmax that absorbs keys and values part by part, block by block.

Nothing is concatenated and no score matrix is kept, so reading a cache costs memory that does not
grow with its capacity, and blocks that nobody can see are skipped (Milakov & Gimelshein 2018;
Rabe & Staats 2021). What a query sees is decided by positions alone, never by slot numbers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.ops import native
from jaxllm.ops.entries import Entries, Int8Entries, dense
from jaxllm.ops.varying import varying_as

BLOCK = 256  # slots absorbed at a time: small enough to skip what is empty, large enough to be fast


class Part(NamedTuple):
    """Some keys and values: one cache segment, or the new tokens themselves.

    k, v: `[B or 1, S, K, H]`; a part of one row is shared by all rows and never repeated.
    position_BS: int32 `[B or 1, S]`, negative where nothing is to be seen; such slots may hold
    anything.
    """

    k_BSKH: Entries
    v_BSKH: Entries
    position_BS: jax.Array


class Queries(NamedTuple):
    """Who asks: vectors grouped by the key head that they share, positions, and what they see."""

    q_BTKGH: jax.Array
    position_BT: jax.Array
    scale: float
    window: int | None
    cap: float | None = None

    @classmethod
    def of(
        cls, q_BTNH: jax.Array, position_BT: jax.Array, parts: Sequence[Part], **rules: Any
    ) -> "Queries":
        """Those of all heads, to be asked of these parts. rules: scale, window and cap."""
        B, T, N, H = q_BTNH.shape
        K = parts[0].k_BSKH.shape[2]
        return cls(q_BTNH.reshape(B, T, K, N // K, H), position_BT, **rules)


class Softmax(NamedTuple):
    """The running softmax of each query: largest score, sum of weights, weighted sum of values."""

    top_BKGT: jax.Array
    total_BKGT: jax.Array
    value_BKGTH: jax.Array

    @property
    def log_BKGT(self) -> jax.Array:
        """The logarithm of the denominator, -inf for a query that saw nothing."""
        seen = self.total_BKGT > 0
        log = finite(self.top_BKGT) + jnp.log(jnp.where(seen, self.total_BKGT, 1.0))
        return jnp.where(seen, log, -jnp.inf)


def attend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
    mass: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Softmax attention of new tokens over all parts: `[B, T, N, H]` in q's dtype, and the mass.

    A query at position p sees the slots with `0 <= position <= p`, and with a window only those
    with `p - position < window`. Scores, softmax and sums are float32. A query that sees nothing
    gives zeros, never NaN. N is a multiple of the parts' K heads (grouped-query attention,
    Ainslie et al. 2023).

    cap: scores are bent to stay within it, `cap * tanh(score / cap)` (Gemma 2, section 2).
    mass: also return what each slot of all parts received, float32 `[B, S]`: its softmax weights,
    summed over heads and queries. Costs a second pass over the keys. None where it is not wanted.
    """
    alike = all(k.dtype == v.dtype for k, v, _ in parts)  # or the kernel does not take them
    if not mass and alike and native.enabled():
        return _traced_once(q_BTNH, position_BT, tuple(parts), scale, window, cap), None
    return _fold(q_BTNH, position_BT, parts, scale, window, cap, mass)


def _fold(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    scale: float,
    window: int | None,
    cap: float | None,
    mass: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention in plain JAX: for every platform, and the meaning of the native kernel."""
    queries = Queries.of(q_BTNH, position_BT, parts, scale=scale, window=window, cap=cap)
    return fold([Look(queries)], parts, q_BTNH.dtype, mass=mass)


def fold(
    looks: Sequence["Look"], parts: Sequence[Part], dtype: jnp.dtype, *, mass: bool
) -> tuple[jax.Array, jax.Array | None]:
    """One softmax over all that several looks show of the parts: `[B, T, N, H]` and the mass.

    Every slot is shown to a query by one look at most. dtype: of what is returned.
    """
    state = softmax(looks, parts)
    out = finished(state, dtype)
    if not mass:
        return out, None
    blank = varying_as(jnp.zeros((out.shape[0], BLOCK), jnp.float32), state)
    each = []
    for look in looks:
        walks = [_walk(look.through(_receive), blank, state, look.queries, p)[1] for p in parts]
        each.append(jnp.concatenate([m for walk in walks for m in walk], axis=1))
    return out, sum(each[1:], each[0])


def softmax(looks: Sequence["Look"], parts: Sequence[Part]) -> Softmax:
    """The softmax of queries that have looked at all of the parts."""
    state = varying_as(unseen(looks[0].queries), looks[0].queries.q_BTKGH, *parts)
    return looked(state, looks, parts)


def looked(state: Softmax, looks: Sequence["Look"], parts: Sequence[Part]) -> Softmax:
    """The softmax of queries that have looked at these parts too."""
    for look in looks:
        for part in parts:
            state, _ = _walk(look.through(absorb), None, state, look.queries, part)
    return state


def unseen(queries: Queries) -> Softmax:
    """The softmax of queries that have seen nothing."""
    B, T, K, G, H = queries.q_BTKGH.shape
    return Softmax(
        jnp.full((B, K, G, T), -jnp.inf, jnp.float32),
        jnp.zeros((B, K, G, T), jnp.float32),
        jnp.zeros((B, K, G, T, H), jnp.float32),
    )


def finished(state: Softmax, dtype: jnp.dtype) -> jax.Array:
    """What each query found, `[B, T, N, H]`; zeros for one that saw nothing."""
    B, K, G, T, H = state.value_BKGTH.shape
    total = jnp.where(state.total_BKGT == 0, 1.0, state.total_BKGT)
    out_BKGTH = state.value_BKGTH / total[..., None]
    return jnp.moveaxis(out_BKGTH, 3, 1).reshape(B, T, K * G, H).astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def _in_place(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: tuple[Part, ...],
    scale: float,
    window: int | None,
    cap: float | None,
) -> jax.Array:
    """On a CPU by the native kernel, which reads the parts where they lie."""

    def fold(q_BTNH: jax.Array, position_BT: jax.Array, parts: tuple[Part, ...]) -> jax.Array:
        return _fold(q_BTNH, position_BT, parts, scale, window, cap, False)[0]

    @jax.custom_batching.custom_vmap
    def kernel(q_BTNH: jax.Array, position_BT: jax.Array, parts: tuple[Part, ...]) -> jax.Array:
        pieces: list[Any] = []
        for part in parts:
            k, v = part.k_BSKH, part.v_BSKH
            if isinstance(k, Int8Entries) and isinstance(v, Int8Entries):
                pieces += [k.value, v.value, part.position_BS, k.scale, v.scale]
            else:
                pieces += [k, v, part.position_BS]
        q = q_BTNH if q_BTNH.dtype == jnp.bfloat16 else q_BTNH.astype(jnp.float32)
        out = native.attend(q, position_BT, pieces, scale=scale, window=window, cap=cap)
        # What a kernel returns says nothing of the devices that it differs on.
        return varying_as(out.astype(q_BTNH.dtype), q_BTNH, position_BT, parts)

    @kernel.def_vmap
    def _(size: int, batched: Any, *args: Any) -> tuple[jax.Array, bool]:
        axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
        return jax.vmap(fold, in_axes=axes)(*args), True

    out: jax.Array = jax.lax.platform_dependent(
        q_BTNH, position_BT, parts, cpu=kernel, default=fold
    )
    return out


@_in_place.defjvp
def _(scale: float, window: int | None, cap: float | None, primals: Any, tangents: Any) -> Any:
    def fold(q_BTNH: jax.Array, position_BT: jax.Array, parts: tuple[Part, ...]) -> jax.Array:
        return _fold(q_BTNH, position_BT, parts, scale, window, cap, False)[0]

    return _in_place(*primals, scale, window, cap), jax.jvp(fold, primals, tangents)[1]


# As a function of its own: a model's layers are alike, and it is traced for one of them.
_traced_once = jax.jit(_in_place, static_argnums=(3, 4, 5))


def visible(q_position_BT: jax.Array, k_position_BS: jax.Array, *, window: int | None) -> jax.Array:
    """Which slots each query sees, bool `[B, T, S]`: the one formula behind every mask."""
    q, k = q_position_BT[:, :, None], k_position_BS[:, None, :]
    seen = (k >= 0) & (k <= q)
    return seen if window is None else seen & (q - k < window)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Scores bent to stay within `cap`; None: as they are."""
    return x if cap is None else cap * jnp.tanh(x / cap)


# What is done with a block of slots: `(state, queries, block, seen) -> (state, [B, S] or None)`.
Visit = Callable[[Softmax, Queries, Part, jax.Array], tuple[Softmax, Any]]


class Look(NamedTuple):
    """Queries, and what they make of a block and of what they see of it (bool `[B, T, S]`) before
    they attend to it; None: they take it as it is.
    """

    queries: Queries
    take: Callable[[Part, jax.Array], tuple[Part, jax.Array]] | None = None

    def through(self, visit: Visit) -> Visit:
        """The visit of blocks as this look takes them."""
        take = self.take
        if take is None:
            return visit

        def taken(
            state: Softmax, queries: Queries, block: Part, seen_BTS: jax.Array
        ) -> tuple[Softmax, Any]:
            return visit(state, queries, *take(block, seen_BTS))

        return taken


def _walk(
    visit: Visit, blank: Any, state: Softmax, queries: Queries, part: Part
) -> tuple[Softmax, list[jax.Array]]:
    """Visit a part block by block; the state after it, and what the visits returned.

    Blocks that nobody sees are left out and return `blank`.
    """
    slots = part.position_BS.shape[1]
    whole = slots // BLOCK if slots >= 2 * BLOCK else 0
    found: list[Any] = []

    def seen_of(block: Part) -> jax.Array:
        return visible(queries.position_BT, block.position_BS, window=queries.window)

    if whole:

        def step(state: Softmax, i: jax.Array) -> tuple[Softmax, Any]:
            block = _slots(part, lambda x: jax.lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, 1))
            seen_BTS = seen_of(block)
            return jax.lax.cond(
                seen_BTS.any(),
                lambda state: visit(state, queries, block, seen_BTS),
                lambda state: (state, blank),
                state,
            )

        state, each = jax.lax.scan(step, state, jnp.arange(whole))
        if each is not None:
            found.append(jnp.moveaxis(each, 0, 1).reshape(-1, whole * BLOCK))
        part = _slots(part, lambda x: x[:, whole * BLOCK :])
    if part.position_BS.shape[1]:
        state, last = visit(state, queries, part, seen_of(part))
        if last is not None:
            found.append(last)
    return state, found


def absorb(
    state: Softmax, queries: Queries, block: Part, seen_BTS: jax.Array
) -> tuple[Softmax, None]:
    """The softmax with a block's weights and values added to it."""
    v_BSKH = dense(block.v_BSKH)
    # Zero times NaN is NaN: what an empty slot holds must not reach the sum.
    used_BS = block.position_BS >= 0
    if v_BSKH.shape[0] == 1:  # a slot that some row still uses holds a token
        used_BS = used_BS.any(axis=0, keepdims=True)
    v_BSKH = jnp.where(used_BS[:, :, None, None], v_BSKH, jnp.zeros_like(v_BSKH))
    score_BKGTS = scores(queries, block, seen_BTS)
    top = jnp.maximum(state.top_BKGT, jax.lax.stop_gradient(score_BKGTS.max(axis=-1)))
    weight_BKGTS = jnp.exp(score_BKGTS - finite(top)[..., None])
    shrink = jnp.exp(state.top_BKGT - finite(top))
    value = weighted_sum(weight_BKGTS, v_BSKH, queries.q_BTKGH.dtype)
    return Softmax(
        top,
        state.total_BKGT * shrink + weight_BKGTS.sum(axis=-1),
        state.value_BKGTH * shrink[..., None] + value,
    ), None


def _receive(
    state: Softmax, queries: Queries, block: Part, seen_BTS: jax.Array
) -> tuple[Softmax, jax.Array]:
    """The weights that a block's slots have in the finished softmax, `[B, S]`."""
    total = jnp.where(state.total_BKGT == 0, 1.0, state.total_BKGT)
    score_BKGTS = scores(queries, block, seen_BTS)
    weight_BKGTS = jnp.exp(score_BKGTS - finite(state.top_BKGT)[..., None]) / total[..., None]
    return state, weight_BKGTS.sum(axis=(1, 2, 3))


def _slots(part: Part, take: Callable[[jax.Array], jax.Array]) -> Part:
    """Some of a part's slots."""
    taken: Part = jax.tree.map(take, part)
    return taken


def finite(top: jax.Array) -> jax.Array:
    """The largest scores; 0 for a query that has seen nothing yet."""
    return jnp.where(jnp.isneginf(top), 0.0, top)


def scores(queries: Queries, block: Part, seen_BTS: jax.Array) -> jax.Array:
    """What queries make of a block's keys, float32 `[B, K, G, T, S]`; -inf where unseen."""
    q, k = _same_dtype(queries.q_BTKGH, dense(block.k_BSKH))
    if k.shape[0] == 1:
        product = _product("BTKGH,SKH->BKGTS", q, k[0])
    else:
        product = _product("BTKGH,BSKH->BKGTS", q, k)
    score = capped(queries.scale * product, queries.cap)
    return jnp.where(seen_BTS[:, None, None, :, :], score, -jnp.inf)


def weighted_sum(weight_BKGTS: jax.Array, v_BSKH: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Values times weights, float32 `[B, K, G, T, H]`. dtype: what weights are rounded to."""
    w, v = _same_dtype(weight_BKGTS.astype(dtype), v_BSKH)
    if v.shape[0] == 1:
        return _product("BKGTS,SKH->BKGTH", w, v[0])
    return _product("BKGTS,BSKH->BKGTH", w, v)


def _same_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are if they agree, else both in float32: precision is never lost by mixing."""
    if a.dtype == b.dtype:
        return a, b
    return a.astype(jnp.float32), b.astype(jnp.float32)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
