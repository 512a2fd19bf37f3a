"""Attention as a fold: an online softmax over keys and values, part by part and block by block.

Nothing is concatenated and no score matrix is stored, so reading a cache takes memory independent
of its capacity (Milakov & Gimelshein 2018; Rabe & Staats 2021). Positions alone decide what a query
attends to, never slot numbers. On a CPU blocks are small; a block that no query attends to is
skipped. On an accelerator each step of a loop costs more than it saves: a block is as large as
`MAX_SCORES` allows, mostly all of a part; and cuDNN takes what it supports (`flash.attend_packed`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.ops import flash, native
from jaxllm.ops.kv_quant import Entries, Int8Entries, dequantize
from jaxllm.ops.products import einsum, match_dtypes
from jaxllm.ops.target import is_accelerator
from jaxllm.ops.varying_axes import match_varying

BLOCK = 256  # slots per block on a CPU: small enough to skip empty ones, large enough to be fast
MAX_SCORES = 1 << 26  # float32 scores of a block on an accelerator


class Part(NamedTuple):
    """Some keys and values: one cache segment, or the new tokens themselves.

    Attributes:
        k_BSKH, v_BSKH: `[B or 1, S, K, H]`; one row is shared by all rows and never repeated.
        position_BS: int32 `[B or 1, S]`, negative in empty slots, whose entries are ignored.
    """

    k_BSKH: Entries
    v_BSKH: Entries
    position_BS: jax.Array


class Queries(NamedTuple):
    """Queries grouped by the key head that they share, with positions and visibility rules."""

    q_BTKGH: jax.Array
    position_BT: jax.Array
    scale: float
    window: int | None
    cap: float | None = None

    @classmethod
    def from_heads(
        cls, q_BTNH: jax.Array, position_BT: jax.Array, parts: Sequence[Part], **score_options: Any
    ) -> "Queries":
        """Group the queries of all heads by the key heads of `parts`. rules: scale, window, cap."""
        B, T, N, H = q_BTNH.shape
        K = parts[0].k_BSKH.shape[2]
        return cls(q_BTNH.reshape(B, T, K, N // K, H), position_BT, **score_options)


class Softmax(NamedTuple):
    """The running softmax of each query: largest score, sum of weights, weighted sum of values."""

    top_BKGT: jax.Array
    total_BKGT: jax.Array
    value_BKGTH: jax.Array

    @property
    def lse_BKGT(self) -> jax.Array:
        """Logarithm of the denominator (logsumexp); -inf for a query that has seen nothing."""
        seen = self.total_BKGT > 0
        log = finite_or_zero(self.top_BKGT) + jnp.log(jnp.where(seen, self.total_BKGT, 1.0))
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
    row_B: jax.Array | None = None,
    packed: bool = False,
    sink_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute softmax attention of new tokens over all parts.

    A query at position p attends to slots with `0 <= position <= p`, and with a window only to
    those with `p - position < window`. Scores, softmax and sums are float32. A query that attends
    to nothing gives zeros, never NaN. N is a multiple of the parts' K heads (grouped-query
    attention, Ainslie et al. 2023).

    Args:
        cap: Soft cap on scores, `cap * tanh(score / cap)` (Gemma 2, section 2).
        mass: Also return attention mass, at the cost of a second pass over the keys.
        row_B: int32 `[B]` or `[B, P]`, which rows of all parts but the last (the new tokens) each
            row reads, one after another; default: its own. One that does not exist is empty. Parts
            whose keys all rows share have positions in the first. The native kernel copies nothing.
        packed: Whether in each row the used slots of each part are its first ones, and each new
            token's position follows those of all tokens before it. cuDNN needs that.
        sink_N: Attention sinks: a score of each query head, neither scaled nor capped, that takes
            part in the softmax without a value. cuDNN's backward pass lacks them.

    Returns:
        The heads `[B, T, N, H]` in q's dtype, and the attention that each slot of all parts
        received, summed over heads and queries, float32 `[B, S]`; None unless requested.
    """
    same_dtype = all(k.dtype == v.dtype for k, v, _ in parts)  # the kernel requires it
    if not mass and same_dtype and native.is_enabled() and not is_accelerator():
        arrays = (q_BTNH, position_BT, tuple(parts), row_B, sink_N)
        return _attend_native_jit(*arrays, scale, window, cap), None
    if packed and not mass and window is None and cap is None and sink_N is None:
        parts, row_B = take_rows(parts, row_B), None
        if flash.is_supported(q_BTNH, [(p.k_BSKH, p.v_BSKH) for p in parts]):
            return flash.attend_packed(q_BTNH, parts, scale), None
    return _fold(q_BTNH, position_BT, parts, row_B, sink_N, scale, window, cap, mass)


def take_rows(parts: Sequence[Part], row_B: jax.Array | None) -> tuple[Part, ...]:
    """Return the parts with these rows of all but the last; rows shared by all stay."""
    if row_B is None:
        return tuple(parts)
    row_BP = row_B[:, None] if row_B.ndim == 1 else row_B

    def take(part: Part) -> Part:
        rows = row_BP if part.k_BSKH.shape[0] > 1 else row_BP[:, :1]

        def gather(x: jax.Array, **mode: Any) -> jax.Array:
            if x.shape[0] == 1:
                return x
            taken = jnp.take(x, rows, axis=0, **mode)
            return taken.reshape(len(rows), rows.shape[1] * x.shape[1], *x.shape[2:])

        k, v = jax.tree.map(partial(gather, mode="clip"), (part.k_BSKH, part.v_BSKH))
        return Part(k, v, gather(part.position_BS, mode="fill", fill_value=-1))

    return (*map(take, parts[:-1]), parts[-1])


def _fold(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: Sequence[Part],
    row_B: jax.Array | None,
    sink_N: jax.Array | None,
    scale: float,
    window: int | None,
    cap: float | None,
    mass: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute attention in plain JAX, on any platform; the reference for the native kernel."""
    parts = take_rows(parts, row_B)
    queries = Queries.from_heads(q_BTNH, position_BT, parts, scale=scale, window=window, cap=cap)
    return fold([KeyView(queries)], parts, q_BTNH.dtype, mass=mass, sink_N=sink_N)


def fold(
    views: Sequence["KeyView"],
    parts: Sequence[Part],
    dtype: jnp.dtype,
    *,
    mass: bool,
    sink_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute one softmax over several views of the parts: heads `[B, T, N, H]`, and mass.

    Each slot is visible to a query in at most one view. dtype: of the heads.
    """
    state = add_sink(softmax(views, parts), sink_N)
    out = normalize_output(state, dtype)
    if not mass:
        return out, None
    blank = match_varying(jnp.zeros((out.shape[0], BLOCK), jnp.float32), state)
    each = []
    for look in views:
        walks = [
            _visit_blocks(look.wrap_visit(_sum_weights), blank, state, look.queries, p)[1]
            for p in parts
        ]
        each.append(jnp.concatenate([m for walk in walks for m in walk], axis=1))
    return out, sum(each[1:], each[0])


def softmax(views: Sequence["KeyView"], parts: Sequence[Part]) -> Softmax:
    """Return the softmax state of queries after all of the parts."""
    state = match_varying(empty_softmax(views[0].queries), views[0].queries.q_BTKGH, *parts)
    return absorb_parts(state, views, parts)


def absorb_parts(state: Softmax, views: Sequence["KeyView"], parts: Sequence[Part]) -> Softmax:
    """Return the softmax state after these further parts."""
    for look in views:
        for part in parts:
            state, _ = _visit_blocks(look.wrap_visit(absorb), None, state, look.queries, part)
    return state


def empty_softmax(queries: Queries) -> Softmax:
    """Return the softmax state of queries that have seen nothing."""
    B, T, K, G, H = queries.q_BTKGH.shape
    return Softmax(
        jnp.full((B, K, G, T), -jnp.inf, jnp.float32),
        jnp.zeros((B, K, G, T), jnp.float32),
        jnp.zeros((B, K, G, T, H), jnp.float32),
    )


def add_sink(state: Softmax, sink_N: jax.Array | None) -> Softmax:
    """Return the softmax state after a slot with these scores, whose value is 0."""
    if sink_N is None:
        return state
    K, G = state.top_BKGT.shape[1:3]
    sink_1KG1 = sink_N.astype(jnp.float32).reshape(1, K, G, 1)
    top = jnp.maximum(state.top_BKGT, jax.lax.stop_gradient(sink_1KG1))
    shrink = jnp.exp(state.top_BKGT - top)
    total = state.total_BKGT * shrink + jnp.exp(sink_1KG1 - top)
    return Softmax(top, total, state.value_BKGTH * shrink[..., None])


def normalize_output(state: Softmax, dtype: jnp.dtype) -> jax.Array:
    """Return the heads, `[B, T, N, H]`; zeros for a query that has seen nothing."""
    B, K, G, T, H = state.value_BKGTH.shape
    total = jnp.where(state.total_BKGT == 0, 1.0, state.total_BKGT)
    out_BKGTH = state.value_BKGTH / total[..., None]
    return jnp.moveaxis(out_BKGTH, 3, 1).reshape(B, T, K * G, H).astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(5, 6, 7))
def _attend_native(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    parts: tuple[Part, ...],
    row_B: jax.Array | None,
    sink_N: jax.Array | None,
    scale: float,
    window: int | None,
    cap: float | None,
) -> jax.Array:
    """Compute attention with the native kernel on a CPU, without copying the parts."""

    def fold(
        q_BTNH: jax.Array, position_BT: jax.Array, parts: Any, row_B: Any, sink_N: Any
    ) -> jax.Array:
        return _fold(q_BTNH, position_BT, parts, row_B, sink_N, scale, window, cap, False)[0]

    @jax.custom_batching.custom_vmap
    def kernel(
        q_BTNH: jax.Array, position_BT: jax.Array, parts: Any, row_B: Any, sink_N: Any
    ) -> jax.Array:
        pieces: list[Any] = []
        for part in parts:
            k, v = part.k_BSKH, part.v_BSKH
            if isinstance(k, Int8Entries) and isinstance(v, Int8Entries):
                pieces += [k.value, v.value, part.position_BS, k.scale, v.scale]
            else:
                pieces += [k, v, part.position_BS]
        q = q_BTNH if q_BTNH.dtype == jnp.bfloat16 else q_BTNH.astype(jnp.float32)
        options: Any = {"scale": scale, "window": window, "cap": cap, "cached": len(parts) - 1}
        out = native.attend(q, position_BT, pieces, row_B=row_B, sink_N=sink_N, **options)
        # A kernel's outputs carry no varying axes.
        return match_varying(out.astype(q_BTNH.dtype), q_BTNH, position_BT, parts)

    @kernel.def_vmap
    def _(size: int, batched: Any, *args: Any) -> tuple[jax.Array, bool]:
        axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
        return jax.vmap(fold, in_axes=axes)(*args), True

    out: jax.Array = jax.lax.platform_dependent(
        q_BTNH, position_BT, parts, row_B, sink_N, cpu=kernel, default=fold
    )
    return out


@_attend_native.defjvp
def _(scale: float, window: int | None, cap: float | None, primals: Any, tangents: Any) -> Any:
    def fold(
        q_BTNH: jax.Array, position_BT: jax.Array, parts: Any, row_B: Any, sink_N: Any
    ) -> jax.Array:
        return _fold(q_BTNH, position_BT, parts, row_B, sink_N, scale, window, cap, False)[0]

    return _attend_native(*primals, scale, window, cap), jax.jvp(fold, primals, tangents)[1]


# Jitted, so that it is traced once for a model's equal layers.
_attend_native_jit = jax.jit(_attend_native, static_argnums=(5, 6, 7))


def visible(q_position_BT: jax.Array, k_position_BS: jax.Array, *, window: int | None) -> jax.Array:
    """Return which slots each query attends to, bool `[B, T, S]`: the formula behind every mask."""
    q, k = q_position_BT[:, :, None], k_position_BS[:, None, :]
    seen = (k >= 0) & (k <= q)
    return seen if window is None else seen & (q - k < window)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Soft-cap scores to `cap`; None: no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


# Processes a block of slots: `(state, queries, block, seen) -> (state, [B, S] or None)`.
Visit = Callable[[Softmax, Queries, Part, jax.Array], tuple[Softmax, Any]]


class KeyView(NamedTuple):
    """Queries, and a transformation of each block and its visibility mask before they attend to it.

    transform: maps a block and bool `[B, T, S]` to the same; None: no transformation.
    """

    queries: Queries
    transform: Callable[[Part, jax.Array], tuple[Part, jax.Array]] | None = None

    def wrap_visit(self, visit: Visit) -> Visit:
        """Wrap a visit so that it receives transformed blocks."""
        take = self.transform
        if take is None:
            return visit

        def visit_view(
            state: Softmax, queries: Queries, block: Part, seen_BTS: jax.Array
        ) -> tuple[Softmax, Any]:
            return visit(state, queries, *take(block, seen_BTS))

        return visit_view


def _visit_blocks(
    visit: Visit, blank: Any, state: Softmax, queries: Queries, part: Part
) -> tuple[Softmax, list[jax.Array]]:
    """Visit a part block by block; return the final state, and what the visits returned.

    On a CPU, blocks that no query attends to are skipped and return `blank`.
    """
    slots, skips, size = part.position_BS.shape[1], not is_accelerator(), BLOCK
    if not skips:
        B, T, K, G, _ = queries.q_BTKGH.shape
        size = max(BLOCK, MAX_SCORES // (B * T * K * G) // BLOCK * BLOCK)
    full_blocks = slots // size if slots >= 2 * size else 0
    outputs: list[Any] = []

    def visible_slots(block: Part) -> jax.Array:
        return visible(queries.position_BT, block.position_BS, window=queries.window)

    if full_blocks:

        def step(state: Softmax, i: jax.Array) -> tuple[Softmax, Any]:
            block = _slice_part(part, lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size, 1))
            seen_BTS = visible_slots(block)
            if not skips:
                return visit(state, queries, block, seen_BTS)
            return jax.lax.cond(
                seen_BTS.any(),
                lambda state: visit(state, queries, block, seen_BTS),
                lambda state: (state, blank),
                state,
            )

        state, each = jax.lax.scan(step, state, jnp.arange(full_blocks))
        if each is not None:
            outputs.append(jnp.moveaxis(each, 0, 1).reshape(-1, full_blocks * size))
        part = _slice_part(part, lambda x: x[:, full_blocks * size :])
    if part.position_BS.shape[1]:
        state, last = visit(state, queries, part, visible_slots(part))
        if last is not None:
            outputs.append(last)
    return state, outputs


def absorb(
    state: Softmax, queries: Queries, block: Part, seen_BTS: jax.Array
) -> tuple[Softmax, None]:
    """Add a block's weights and values to the softmax state."""
    v_BSKH = dequantize(block.v_BSKH)
    # Zero times NaN is NaN: entries of empty slots must not reach the sum.
    used_BS = block.position_BS >= 0
    if v_BSKH.shape[0] == 1:  # a slot that any row still uses
        used_BS = used_BS.any(axis=0, keepdims=True)
    v_BSKH = jnp.where(used_BS[:, :, None, None], v_BSKH, jnp.zeros_like(v_BSKH))
    score_BKGTS = scores(queries, block, seen_BTS)
    top = jnp.maximum(state.top_BKGT, jax.lax.stop_gradient(score_BKGTS.max(axis=-1)))
    weight_BKGTS = jnp.exp(score_BKGTS - finite_or_zero(top)[..., None])
    shrink = jnp.exp(state.top_BKGT - finite_or_zero(top))
    value = weighted_sum(weight_BKGTS, v_BSKH, queries.q_BTKGH.dtype)
    return Softmax(
        top,
        state.total_BKGT * shrink + weight_BKGTS.sum(axis=-1),
        state.value_BKGTH * shrink[..., None] + value,
    ), None


def _sum_weights(
    state: Softmax, queries: Queries, block: Part, seen_BTS: jax.Array
) -> tuple[Softmax, jax.Array]:
    """Return the weights of a block's slots in the finished softmax, `[B, S]`."""
    total = jnp.where(state.total_BKGT == 0, 1.0, state.total_BKGT)
    score_BKGTS = scores(queries, block, seen_BTS)
    weight_BKGTS = (
        jnp.exp(score_BKGTS - finite_or_zero(state.top_BKGT)[..., None]) / total[..., None]
    )
    return state, weight_BKGTS.sum(axis=(1, 2, 3))


def _slice_part(part: Part, take: Callable[[jax.Array], jax.Array]) -> Part:
    """Apply a slice of slots to a part."""
    sliced: Part = jax.tree.map(take, part)
    return sliced


def finite_or_zero(top: jax.Array) -> jax.Array:
    """Return the largest scores, or 0 for a query that has seen nothing yet."""
    return jnp.where(jnp.isneginf(top), 0.0, top)


def scores(queries: Queries, block: Part, seen_BTS: jax.Array) -> jax.Array:
    """Return the scores of a block's keys, float32 `[B, K, G, T, S]`; -inf if not visible."""
    q, k = match_dtypes(queries.q_BTKGH, dequantize(block.k_BSKH))
    if k.shape[0] == 1:
        product = einsum("BTKGH,SKH->BKGTS", q, k[0])
    elif q.shape[1] == 1 and is_accelerator():
        product = _scores_of_one(q[:, 0], k)
    else:
        product = einsum("BTKGH,BSKH->BKGTS", q, k)
    score = soft_cap(queries.scale * product, queries.cap)
    return jnp.where(seen_BTS[:, None, None, :, :], score, -jnp.inf)


def weighted_sum(weight_BKGTS: jax.Array, v_BSKH: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the weighted sum of values, float32 `[B, K, G, T, H]`. dtype: of the weights."""
    w, v = match_dtypes(weight_BKGTS.astype(dtype), v_BSKH)
    if v.shape[0] == 1:
        return einsum("BKGTS,SKH->BKGTH", w, v[0])
    if w.shape[3] == 1 and is_accelerator():
        return _sum_of_one(w[:, :, :, 0], v)
    return einsum("BKGTS,BSKH->BKGTH", w, v)


def _scores_of_one(q_BKGH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
    """Return the products of one query per row with all keys, float32 `[B, K, G, 1, S]`.

    Each head's query stands in the columns of its key head, with zeros elsewhere: one product per
    row with the keys as they are stored, `[S, K * H]`. The product by key heads would transpose
    them first, and read them no faster: the time is that of reading.
    """
    (B, K, G, H), S = q_BKGH.shape, k_BSKH.shape[1]
    if S == 1:
        product = q_BKGH.astype(jnp.float32) * k_BSKH.astype(jnp.float32)[:, 0, :, None]
        return product.sum(axis=-1)[..., None, None]
    own_KK = jnp.eye(K, dtype=bool)[:, None, :, None]
    q_BNC = jnp.where(own_KK, q_BKGH[:, :, :, None], 0).reshape(B, K * G, K * H)
    return einsum("BNC,BSC->BNS", q_BNC, k_BSKH.reshape(B, S, K * H)).reshape(B, K, G, 1, S)


def _sum_of_one(weight_BKGS: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """Return the weighted sum of values of one query per row, float32 `[B, K, G, 1, H]`."""
    (B, K, G, S), H = weight_BKGS.shape, v_BSKH.shape[3]
    if S == 1:
        value = weight_BKGS.astype(jnp.float32) * v_BSKH.astype(jnp.float32)[:, 0, :, None]
        return value[:, :, :, None]
    all_BNC = einsum("BNS,BSC->BNC", weight_BKGS.reshape(B, K * G, S), v_BSKH.reshape(B, S, K * H))
    own_KK = jnp.eye(K, dtype=bool)[:, None, :, None]
    return jnp.where(own_KK, all_BNC.reshape(B, K, G, K, H), 0).sum(axis=3)[:, :, :, None]
