"""Recurrent layers: a short convolution, and a matrix that each token decays and adds to.

The matrix S of a head reads as a linear attention. Token t with key k, value v and decay g <= 0
gives S = e^g S + k d^T, and a query q reads q^T S. Under the delta rule (Yang et al. 2024, Gated
Delta Networks, arXiv 2412.06464) d = b (v - k^T e^g S), else d = v (Mamba-2, Dao & Gu 2024, arXiv
2405.21060).

The state is a value: S at the last boundary, a multiple of `CHUNK` of the position, and for each
token since then a row: k, d, the decay since the boundary, and the input of the convolution. With
these a query reads e^G q^T S + sum_i e^(G - G_i) (q.k_i) d_i. So a token that is not committed is a
row that is not written, rewinding within the chunk drops rows, and S is only read. Axes: H key
heads, R value heads of a key head, K and V their sizes, X channels, L the convolution's width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.ops.buckets import make_buckets
from jaxllm.ops.products import einsum

CHUNK = 64  # tokens between boundaries


class Rows(struct.PyTreeNode):
    """What tokens add to a state, float32.

    Attributes:
        input_BTX: The convolution's inputs.
        key_BTHK, value_BTHRV: Keys, and what is added under them (d); None without a matrix.
        decay_BTHR: The sum of decays since the boundary before the token.
    """

    input_BTX: jax.Array
    key_BTHK: Any = None
    value_BTHRV: Any = None
    decay_BTHR: Any = None


class RecurrentState(struct.PyTreeNode):
    """The state of a layer, one row per text, float32 except `start_B`.

    Attributes:
        start_B: int32, the position of the last boundary.
        before_BLX: The convolution's last L - 1 inputs before the boundary; zeros before the text.
        rows: `[B, CHUNK, ...]`, of the positions from the boundary on; zeros where no token is.
        sum_BHRKV: S at the boundary; None for a convolution alone.
    """

    start_B: jax.Array
    before_BLX: jax.Array
    rows: Rows
    sum_BHRKV: Any = None


class Pending(struct.PyTreeNode):
    """The state that tokens continue, in their chunk, and their rows, `[B, T, ...]`."""

    state: RecurrentState
    rows: Rows


class Tokens(NamedTuple):
    """What the convolution's output and other projections give for each token, float32.

    update_BTHR: b of the delta rule; None without it.
    """

    query_BTHK: jax.Array
    key_BTHK: jax.Array
    value_BTHRV: jax.Array
    decay_BTHR: jax.Array
    update_BTHR: Any = None


class Recurrence(NamedTuple):
    """The weights of a layer's convolution, and what follows it.

    split: Returns the `Tokens` from the convolution's output and the other projections; None for a
    convolution alone, whose output is the layer's.
    """

    weight_XL: jax.Array
    bias_X: Any = None
    split: Callable[[jax.Array, Any], Tokens] | None = None


def state_shapes(
    channels: int, width: int, heads: tuple[int, int, int, int] | None
) -> RecurrentState:
    """Return the `jax.ShapeDtypeStruct`s of one text's state.

    channels, width: of the convolution. heads: H, R, K and V; None without a matrix.
    """

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    inputs = of(CHUNK, channels)
    start: Any = jax.ShapeDtypeStruct((), jnp.int32)
    if heads is None:
        return RecurrentState(start, of(width - 1, channels), Rows(inputs))
    H, R, K, V = heads
    rows = Rows(inputs, of(CHUNK, H, K), of(CHUNK, H, R, V), of(CHUNK, H, R))
    return RecurrentState(start, of(width - 1, channels), rows, of(H, R, K, V))


def empty_state(shapes: Any, rows: int) -> Any:
    """Return the state of texts without tokens."""
    return jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), shapes)


def run(
    state: RecurrentState | None,
    shapes: RecurrentState,
    recurrence: Recurrence,
    input_BTX: jax.Array,
    others: Any,
    position_BT: jax.Array,
) -> tuple[jax.Array, "Pending | RecurrentState"]:
    """Run tokens (positions -1: padding), which are consecutive in each row.

    Args:
        state: None before a text.
        shapes: Those of `state_shapes`.
        others: A pytree of further projections `[B, T, ...]`, for `Recurrence.split`.

    Returns:
        The outputs, `[B, T, H, R, V]` or `[B, T, X]`; those of padding are arbitrary. And the
        state after the tokens; up to `CHUNK` of them can still be committed in part.
    """
    B, T = position_BT.shape
    input_BTX = input_BTX.astype(jnp.float32)
    if T > CHUNK:
        buckets = make_buckets(position_BT, CHUNK)

        def run_bucket(state: RecurrentState, bucket: Any) -> Any:
            input_BWX, others, position_BW = bucket
            state = fold(state, position_BW.max(axis=1) // CHUNK * CHUNK)
            out, rows = _run_open(state, recurrence, input_BWX, others, position_BW)
            return write(state, rows, position_BW), out

        split = jax.tree.map(buckets.split, (input_BTX, others))
        begin: RecurrentState = empty_state(shapes, B) if state is None else state
        end, out = jax.lax.scan(run_bucket, begin, (*split, buckets.position_nBW))
        return buckets.join(out), end
    order_BT = None
    if T > 1:
        order_BT = jnp.argsort(jnp.where(position_BT < 0, jnp.iinfo(jnp.int32).max, position_BT))
        input_BTX, others, position_BT = _take_columns((input_BTX, others, position_BT), order_BT)
    begin_B = position_BT[:, 0] // CHUNK * CHUNK
    if state is None:
        state = empty_state(shapes, B).replace(start_B=jnp.maximum(begin_B, 0))
    else:
        state = _fold_if_needed(state, begin_B)
    out, rows = _run_open(state, recurrence, input_BTX, others, position_BT)
    if order_BT is not None:
        out, rows = _take_columns((out, rows), jnp.argsort(order_BT))
    return out, Pending(state, rows)


def _take_columns(tree: Any, index_BT: jax.Array) -> Any:
    def take(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, index_BT.reshape(*index_BT.shape, *[1] * (x.ndim - 2)), 1)

    return jax.tree.map(take, tree)


def _run_open(
    state: RecurrentState,
    recurrence: Recurrence,
    input_BTX: jax.Array,
    others: Any,
    position_BT: jax.Array,
) -> tuple[jax.Array, Rows]:
    """Run at most `CHUNK` tokens, padding last, after a state's rows; return outputs and rows."""
    real_BT = position_BT >= 0
    at_B = position_BT[:, 0] - state.start_B  # the first token's place in the chunk
    window = state.before_BLX.shape[1]
    place_BL = at_B[:, None].clip(0) + jnp.arange(-window, 0, dtype=jnp.int32)[None]
    past_BLX = jnp.where(
        (place_BL >= 0)[..., None],
        _take_columns(state.rows.input_BTX, place_BL.clip(0)),
        _take_columns(state.before_BLX, (place_BL + window).clip(0, window - 1)),
    )
    inputs_BSX = jnp.concatenate([past_BLX, input_BTX], axis=1)
    conv_BTX = convolve(inputs_BSX, recurrence)
    if recurrence.split is None:
        return conv_BTX, Rows(input_BTX)
    tokens = recurrence.split(conv_BTX, others)
    tokens = jax.tree.map(
        lambda x: jnp.where(real_BT.reshape(*real_BT.shape, *[1] * (x.ndim - 2)), x, 0.0), tokens
    )
    # Decays are negative, and zero where no token is.
    so_far_BHR = state.rows.decay_BTHR.min(axis=1)
    since_BTHR = jnp.cumsum(tokens.decay_BTHR, axis=1)
    out, value_BTHRV = _read_and_write(state, tokens, so_far_BHR[:, None] + since_BTHR)
    # A row counts its decays from the boundary before its own token, of which one may be new.
    new_BT = position_BT // CHUNK * CHUNK > state.start_B[:, None]
    new_BT11 = new_BT[..., None, None]
    own_BTHR = jnp.cumsum(jnp.where(new_BT11, tokens.decay_BTHR, 0.0), axis=1)
    decay_BTHR = jnp.where(new_BT11, own_BTHR, so_far_BHR[:, None] + since_BTHR)
    return out, Rows(input_BTX, tokens.key_BTHK, value_BTHRV, decay_BTHR)


def convolve(inputs_BSX: jax.Array, recurrence: Recurrence) -> jax.Array:
    """Return a causal convolution by channel, without the first L - 1 places."""
    width = recurrence.weight_XL.shape[1]
    size = inputs_BSX.shape[1] - width + 1
    weight_XL = recurrence.weight_XL.astype(jnp.float32)
    parts = (inputs_BSX[:, j : j + size] * weight_XL[None, None, :, j] for j in range(width))
    total = sum(parts, jnp.zeros((), jnp.float32))
    bias = recurrence.bias_X
    summed: jax.Array = total if bias is None else total + bias.astype(jnp.float32)[None, None]
    return summed


def _read_and_write(
    state: RecurrentState, tokens: Tokens, decay_BTHR: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return what the queries read, and what is added under the keys, both `[B, T, H, R, V]`.

    decay_BTHR: since the state's boundary.
    """
    T = decay_BTHR.shape[1]
    keys = [] if tokens.update_BTHR is None else [tokens.key_BTHK]
    reads = jnp.stack([tokens.query_BTHK, *keys], axis=1)  # [B, 1 or 2, T, H, K]
    grown_BTHR1 = jnp.exp(decay_BTHR)[..., None]
    old = einsum("BNTHK,BHRKV->BNTHRV", reads, state.sum_BHRKV) * grown_BTHR1[:, None]
    rows = state.rows
    gap_BTHRC = decay_BTHR[..., None] - jnp.moveaxis(rows.decay_BTHR, 1, -1)[:, None]
    # Unused rows are zeros, so that they add nothing; the minimum keeps their factor finite.
    factor = jnp.exp(jnp.minimum(gap_BTHRC, 0.0))
    score = einsum("BNTHK,BCHK->BNTHC", reads, rows.key_BTHK)
    weight = score[:, :, :, :, None] * factor[:, None]
    old += einsum("BNTHRC,BCHRV->BNTHRV", weight, rows.value_BTHRV)
    if T == 1:
        value = _added(tokens, old)
        score = einsum("BTHK,BTHK->BTH", tokens.query_BTHK, tokens.key_BTHK)
        return old[:, 0] + score[..., None, None] * value, value
    gap_BHRTS = _by_head(decay_BTHR)[..., :, None] - _by_head(decay_BTHR)[..., None, :]
    earlier_TS, upto_TS = (jnp.tri(T, k=k, dtype=bool)[None, None, None] for k in (-1, 0))
    factor = jnp.exp(jnp.where(upto_TS, gap_BHRTS, -jnp.inf))
    score = einsum("BNTHK,BSHK->BNHTS", reads, tokens.key_BTHK)
    value = _added(tokens, old)
    if tokens.update_BTHR is not None:
        share_BHRT1 = _by_head(tokens.update_BTHR)[..., None]
        lower = jnp.where(earlier_TS, score[:, 1, :, None] * factor * share_BHRT1, 0.0)
        value = jnp.moveaxis(
            jax.lax.linalg.triangular_solve(
                lower, jnp.moveaxis(value, 1, 3),
                left_side=True, lower=True, unit_diagonal=True,
            ), 3, 1,
        )  # fmt: skip
    new = einsum("BHRTS,BSHRV->BTHRV", score[:, 0, :, None] * factor, value)
    return old[:, 0] + new, value


def _by_head(x_BTHR: jax.Array) -> jax.Array:
    return jnp.moveaxis(x_BTHR, 1, 3)


def _added(tokens: Tokens, read: jax.Array) -> jax.Array:
    """Return what tokens add if there is none among them before: read has what keys read last."""
    if tokens.update_BTHR is None:
        return tokens.value_BTHRV
    return tokens.update_BTHR[..., None] * (tokens.value_BTHRV - read[:, 1])


def fold(state: RecurrentState, into_B: jax.Array) -> RecurrentState:
    """Add the rows to the sum in texts that go on with the chunk at `into_B`; no text goes back."""
    rows = state.rows
    window = state.before_BLX.shape[1]
    total = None
    if state.sum_BHRKV is not None:
        end_BHR = rows.decay_BTHR.min(axis=1)
        factor_BTHR = jnp.exp(jnp.minimum(end_BHR[:, None] - rows.decay_BTHR, 0.0))
        added = einsum(
            "BTHK,BTHRV->BHRKV", rows.key_BTHK, rows.value_BTHRV * factor_BTHR[..., None]
        )
        total = state.sum_BHRKV * jnp.exp(end_BHR)[..., None, None] + added
    last_BLX = rows.input_BTX[:, CHUNK - window :]
    folded = RecurrentState(into_B, last_BLX, jax.tree.map(jnp.zeros_like, rows), total)
    moves_B = into_B > state.start_B

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(moves_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    chosen: RecurrentState = jax.tree.map(choose, folded, state)
    return chosen


def advance(pending: Pending, position_BT: jax.Array) -> RecurrentState:
    """Return the state after tokens at these positions (-1: not committed)."""
    state, rows = pending.state, pending.rows
    state = write(state, rows, position_BT)
    if position_BT.shape[1] == 1:
        return state
    return write(
        _fold_if_needed(state, position_BT.max(axis=1) // CHUNK * CHUNK), rows, position_BT
    )


@jax.custom_jvp
def _fold_if_needed(state: RecurrentState, into_B: jax.Array) -> RecurrentState:
    """Return `fold(state, into_B)`, computed only if a text goes on with another chunk.

    A loop of one round or none: unlike a condition's, its arrays are not copied.
    """
    _, state = jax.lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.zeros((), bool), fold(carry[1], into_B)),
        ((into_B > state.start_B).any(), state),
    )
    return state


@_fold_if_needed.defjvp
def _(primals: Any, tangents: Any) -> Any:
    state, into_B = primals
    return jax.jvp(lambda state: fold(state, into_B), (state,), (tangents[0],))


def write(state: RecurrentState, rows: Rows, position_BT: jax.Array) -> RecurrentState:
    """Write the rows of the tokens that are in the state's chunk."""
    place_BT = position_BT - state.start_B[:, None]
    is_inside = (position_BT >= 0) & (place_BT >= 0) & (place_BT < CHUNK)
    place_BT = jnp.where(is_inside, place_BT, CHUNK)
    row_B1 = jnp.arange(place_BT.shape[0], dtype=jnp.int32)[:, None]
    written: Rows = jax.tree.map(
        lambda old, new: old.at[row_B1, place_BT].set(new, mode="drop"), state.rows, rows
    )
    return state.replace(rows=written)


def drop(state: RecurrentState, next_B: jax.Array) -> RecurrentState:
    """Return the state before position `next_B`, which is in its chunk, or 0: the empty state."""
    kept_BC = jnp.arange(CHUNK, dtype=jnp.int32)[None] < (next_B - state.start_B)[:, None]
    kept_BC &= (next_B > 0)[:, None]
    rows = jax.tree.map(
        lambda x: jnp.where(kept_BC.reshape(*kept_BC.shape, *[1] * (x.ndim - 2)), x, 0), state.rows
    )

    def clear(x: jax.Array) -> jax.Array:
        return jnp.where((next_B > 0).reshape(-1, *[1] * (x.ndim - 1)), x, 0)

    dropped: RecurrentState = jax.tree.map(clear, state.replace(rows=rows))
    return dropped
