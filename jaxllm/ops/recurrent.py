"""Recurrent layers: a short convolution, and a matrix that each token decays and adds to.

The matrix S of a head reads as a linear attention. Token t with key k, value v and decay g <= 0
gives S = e^g S + k d^T, and a query q reads q^T S. Under the delta rule (Yang et al. 2024, Gated
Delta Networks, arXiv 2412.06464) d = b (v - k^T e^g S), else d = v (Mamba-2, Dao & Gu 2024, arXiv
2405.21060).

The state is a value: S at the last boundary, a multiple of `CHUNK` of the position, and for each
token since then a row: k, d, g, and the input of the convolution. With these a query reads
e^G q^T S + sum_i e^(G - G_i) (q.k_i) d_i, where G sums the decays since the boundary. So a
token that is not committed is a row that is not written, rewinding within the chunk drops rows, and
S is only read. Axes: H key heads, R value heads of a key head, K and V their sizes, X channels, L
the convolution's width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxllm.ops.buckets import make_buckets
from jaxllm.ops.products import einsum
from jaxllm.ops.slot_update import NO_SLOT, write_slots

CHUNK = 64  # tokens between boundaries


class Rows(struct.PyTreeNode):
    """What tokens add to a state, float32.

    Attributes:
        input_BTX: The convolution's inputs.
        key_BHTK, value_BHRTV: Keys, and what is added under them (d); None without a matrix.
        decay_BHRT: The tokens' decays (g).
    """

    input_BTX: jax.Array
    key_BHTK: Any = None
    value_BHRTV: Any = None
    decay_BHRT: Any = None


class RecurrentState(struct.PyTreeNode):
    """The state of a layer, one row per text, float32 except `start_B`.

    Attributes:
        start_B: int32, the position of the last boundary.
        before_BLX: The convolution's last L - 1 inputs before the boundary; zeros before the text.
        rows: CHUNK of them, of the positions from the boundary on; zeros where no token is.
        sum_BHRKV: S at the boundary; None for a convolution alone.
    """

    start_B: jax.Array
    before_BLX: jax.Array
    rows: Rows
    sum_BHRKV: Any = None


class Pending(struct.PyTreeNode):
    """The state that tokens continue, in their chunk, and their rows."""

    state: RecurrentState
    rows: Rows


class Tokens(NamedTuple):
    """What the convolution's output and other projections give for each token, float32.

    Attributes:
        update_BTHR: b of the delta rule; None without it.
        skip_BTHRV: What is added to what the queries read; None: nothing.
    """

    query_BTHK: jax.Array
    key_BTHK: jax.Array
    value_BTHRV: jax.Array
    decay_BTHR: jax.Array
    update_BTHR: Any = None
    skip_BTHRV: Any = None


class HeadTokens(NamedTuple):
    """`Tokens` by head: `[B, H, T, K]`, and `[B, H, R, T]` with or without V."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    update: Any
    skip: Any


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
    rows = Rows(inputs, of(H, CHUNK, K), of(H, R, CHUNK, V), of(H, R, CHUNK))
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

        def skip(state: RecurrentState, bucket: Any) -> Any:
            shape = jax.eval_shape(run_bucket, state, bucket)[1]
            return state, jnp.zeros(shape.shape, shape.dtype)

        def run_if_used(state: RecurrentState, bucket: Any) -> Any:
            is_used = (bucket[2] >= 0).any()  # the last one often is not
            return jax.lax.cond(is_used, run_bucket, skip, state, bucket)

        split = jax.tree.map(buckets.split, (input_BTX, others))
        begin: RecurrentState = empty_state(shapes, B) if state is None else state
        end, out = jax.lax.scan(run_if_used, begin, (*split, buckets.position_nBW))
        return buckets.join(out), end
    order_BT = None
    if T > 1:
        order_BT = jnp.argsort(jnp.where(position_BT < 0, jnp.iinfo(jnp.int32).max, position_BT))
        input_BTX, others, position_BT = jax.tree.map(
            partial(take_tokens, index_BT=order_BT), (input_BTX, others, position_BT)
        )
    begin_B = position_BT[:, 0] // CHUNK * CHUNK
    if state is None:
        state = empty_state(shapes, B).replace(start_B=jnp.maximum(begin_B, 0))
    else:
        state = _fold_if_needed(state, begin_B)
    out, rows = _run_open(state, recurrence, input_BTX, others, position_BT)
    if order_BT is not None:
        back_BT = jnp.argsort(order_BT)
        out = take_tokens(out, back_BT)
        rows = map_rows(lambda x, axis: take_tokens(x, back_BT, axis), rows)
    return out, Pending(state, rows)


def take_tokens(x: jax.Array, index_BT: jax.Array, axis: int = 1) -> jax.Array:
    B, T = index_BT.shape
    index = index_BT.reshape(B, *[1] * (axis - 1), T, *[1] * (x.ndim - axis - 1))
    return jnp.take_along_axis(x, index, axis)


def map_rows(function: Callable[..., jax.Array], rows: Rows, *others: Rows) -> Rows:
    """Apply a function to each leaf of rows and the axis of its tokens."""
    leaves = zip(*map(jax.tree.leaves, (rows, *others)), strict=True)
    made = [function(*x, axis) for x, axis in zip(leaves, (1, 2, 3, 3), strict=False)]
    mapped: Rows = jax.tree.unflatten(jax.tree.structure(rows), made)
    return mapped


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
    inputs_BWX = jnp.concatenate([past_inputs(state, place_BL), input_BTX], axis=1)
    conv_BTX = convolve(inputs_BWX, recurrence)
    if recurrence.split is None:
        return conv_BTX, Rows(input_BTX)
    tokens = split_tokens(recurrence, conv_BTX, others, real_BT)
    sum_BHRC = jnp.cumsum(state.rows.decay_BHRT, axis=-1)
    since_BHRT = sum_BHRC[..., -1:] + jnp.cumsum(tokens.decay, axis=-1)
    # Unused rows are zeros, so that they add nothing; the minimum keeps their factor finite.
    gap_BHRTC = jnp.minimum(since_BHRT[..., None] - sum_BHRC[..., None, :], 0.0)
    own_BHRTT = since_BHRT[..., None] - since_BHRT[..., None, :]
    upto_111TT = jnp.tri(own_BHRTT.shape[-1], dtype=bool)[None, None, None]
    own_BHRTT = jnp.where(upto_111TT, own_BHRTT, -jnp.inf)
    out, value = read_and_write(
        state.sum_BHRKV, state.rows, gap_BHRTC, tokens, since_BHRT, own_BHRTT
    )
    return jnp.moveaxis(out, 3, 1), Rows(input_BTX, tokens.key, value, tokens.decay)


def past_inputs(state: RecurrentState, place_BN: jax.Array) -> jax.Array:
    """Return the convolution's inputs at places from the boundary, which may be before it."""
    window = state.before_BLX.shape[1]
    return jnp.where(
        (place_BN >= 0)[..., None],
        take_tokens(state.rows.input_BTX, place_BN.clip(0, CHUNK - 1)),
        take_tokens(state.before_BLX, (place_BN + window).clip(0, window - 1)),
    )


def split_tokens(
    recurrence: Recurrence, conv_BTX: jax.Array, others: Any, real_BT: jax.Array
) -> Any:
    """Return the tokens with their heads first, `[B, H, T, ...]`; padding is zeros."""
    assert recurrence.split is not None

    def heads_first(x: Any, axis: int) -> Any:
        if x is None:
            return None
        real = real_BT.reshape(*real_BT.shape, *[1] * (x.ndim - 2))
        return jnp.moveaxis(jnp.where(real, x, 0.0), 1, axis)

    # Without a barrier XLA:CPU computes the convolution again for each of its uses.
    tokens = jax.lax.optimization_barrier(recurrence.split(conv_BTX, others))
    return HeadTokens(*map(heads_first, tokens, (2, 2, 3, 3, 3, 3)))


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


def read_and_write(
    sum_BHRKV: jax.Array,
    past: Rows,
    past_gap_BHRTC: jax.Array,
    tokens: HeadTokens,
    since_BHRT: jax.Array,
    own_gap_BHRTS: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return what the queries read, and what is added under the keys, both `[B, H, R, T, V]`.

    Args:
        since_BHRT: The decays from the boundary up to each token.
        past_gap_BHRTC, own_gap_BHRTS: Those from each row that a token sees, and from the tokens
            that it sees, itself included; -inf for others.
    """
    T = tokens.query.shape[2]
    times = 1 if tokens.update is None else 2  # keys read too
    reads_BHNK = jnp.concatenate([tokens.query, tokens.key][:times], axis=2)
    since_BHRN = jnp.concatenate([since_BHRT] * times, axis=3)
    each_BHRNK = jnp.broadcast_to(reads_BHNK[:, :, None], (*since_BHRN.shape, reads_BHNK.shape[3]))
    old = einsum("BHRNK,BHRKV->BHRNV", each_BHRNK, sum_BHRKV) * jnp.exp(since_BHRN)[..., None]
    factor = jnp.exp(jnp.concatenate([past_gap_BHRTC] * times, axis=3))
    score = einsum("BHNK,BHCK->BHNC", reads_BHNK, past.key_BHTK)
    old += einsum("BHRNC,BHRCV->BHRNV", score[:, :, None] * factor, past.value_BHRTV)
    if tokens.skip is not None:
        old += tokens.skip
    value = tokens.value
    if tokens.update is not None:
        value = tokens.update[..., None] * (value - old[:, :, :, T:])
        old = old[:, :, :, :T]
    if T == 1:
        score = einsum("BHTK,BHTK->BHT", tokens.query, tokens.key)
        return old + score[:, :, None, :, None] * value, value
    factor = jnp.exp(own_gap_BHRTS)
    score = einsum("BHNK,BHSK->BHNS", reads_BHNK, tokens.key)[:, :, None]
    if tokens.update is not None:
        earlier_111TS = ~jnp.eye(T, dtype=bool)[None, None, None]
        lower = jnp.where(
            earlier_111TS, score[:, :, :, T:] * factor * tokens.update[..., None], 0.0
        )
        value = einsum("BHRTS,BHRSV->BHRTV", _invert_unit_lower(lower), value)
    return old + einsum("BHRTS,BHRSV->BHRTV", score[:, :, :, :T] * factor, value), value


def _invert_unit_lower(lower_XTT: jax.Array) -> jax.Array:
    """Return the inverse of 1 + A, for A zero on and above the diagonal, `[..., T, T]`.

    Blocks of 4 are (1 - A)(1 + A^2), since A^4 = 0; two inverted blocks give one of twice the size.
    LAPACK's solver is slow here: its threads compete with XLA's.
    """
    *batch, T, _ = lower_XTT.shape
    size, full = 4, 4 << max(0, (T - 1).bit_length() - 2)
    padded = jnp.pad(lower_XTT, [(0, 0)] * len(batch) + [(0, full - T)] * 2)
    blocks = padded.reshape(-1, full // size, size, full // size, size)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return einsum("XNTS,XNSU->XNTU", a, b)

    a = jnp.stack([blocks[:, i, :, i] for i in range(full // size)], axis=1)
    one = jnp.eye(size, dtype=a.dtype)[None, None]
    inverse = product(one - a, one + product(a, a))
    while size < full:
        pairs = padded.reshape(-1, full // size, size, full // size, size)
        left = jnp.stack([pairs[:, i + 1, :, i] for i in range(0, full // size, 2)], axis=1)
        above, below = inverse[:, ::2], inverse[:, 1::2]
        corner = -product(below, product(left, above))
        inverse = jnp.concatenate(
            [
                jnp.concatenate([above, jnp.zeros_like(above)], axis=-1),
                jnp.concatenate([corner, below], axis=-1),
            ],
            axis=-2,
        )
        size *= 2
    return inverse[:, 0, :T, :T].reshape(lower_XTT.shape)


def fold(state: RecurrentState, into_B: jax.Array) -> RecurrentState:
    """Add the rows to the sum in texts that go on with the chunk at `into_B`; no text goes back."""
    rows = state.rows
    window = state.before_BLX.shape[1]
    total = None
    if state.sum_BHRKV is not None:
        sum_BHRT = jnp.cumsum(rows.decay_BHRT, axis=-1)
        end_BHR1 = sum_BHRT[..., -1:]
        factor_BHRT = jnp.exp(jnp.minimum(end_BHR1 - sum_BHRT, 0.0))
        weighted = rows.value_BHRTV * factor_BHRT[..., None]
        added = einsum("BHTK,BHRTV->BHRKV", rows.key_BHTK, weighted)
        total = state.sum_BHRKV * jnp.exp(end_BHR1)[..., None] + added
    last_BLX = rows.input_BTX[:, CHUNK - window :]
    folded = RecurrentState(into_B, last_BLX, jax.tree.map(jnp.zeros_like, rows), total)
    moves_B = into_B > state.start_B

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(moves_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    chosen: RecurrentState = jax.tree.map(choose, folded, state)
    return chosen


def advance(
    pending: Pending, position_BT: jax.Array, wait_for: tuple[jax.Array, ...] = ()
) -> RecurrentState:
    """Return the state after tokens at these positions (-1: not committed).

    wait_for: As for `slot_update.write_at_cursor`.
    """
    state, rows = pending.state, pending.rows
    state = write(state, rows, position_BT, wait_for)
    if position_BT.shape[1] == 1:
        return state
    into_B = position_BT.max(axis=1) // CHUNK * CHUNK
    return write(_fold_if_needed(state, into_B), rows, position_BT)


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


def write(
    state: RecurrentState,
    rows: Rows,
    position_BT: jax.Array,
    wait_for: tuple[jax.Array, ...] = (),
) -> RecurrentState:
    """Write the rows of the tokens that are in the state's chunk."""
    place_BT = position_BT - state.start_B[:, None]
    is_inside = (position_BT >= 0) & (place_BT >= 0) & (place_BT < CHUNK)
    slot_BT = jnp.where(is_inside, place_BT, NO_SLOT)
    return state.replace(rows=write_rows(state.rows, rows, slot_BT, wait_for))


def write_rows(
    old: Rows, new: Rows, slot_BT: jax.Array, wait_for: tuple[jax.Array, ...] = ()
) -> Rows:
    """Write rows to slots; `NO_SLOT`: not written."""

    def write_leaf(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        flat, fresh = (x.reshape(-1, *x.shape[axis:]) for x in (old, new))
        slot_NT = jnp.repeat(slot_BT, len(flat) // len(slot_BT), axis=0)
        return write_slots(flat, fresh, slot_NT, wait_for=wait_for).reshape(old.shape)

    return map_rows(write_leaf, old, new)


def drop(state: RecurrentState, next_B: jax.Array) -> RecurrentState:
    """Return the state before position `next_B`, which is in its chunk, or 0: the empty state."""
    kept_BC = jnp.arange(CHUNK, dtype=jnp.int32)[None] < (next_B - state.start_B)[:, None]
    kept_BC &= (next_B > 0)[:, None]

    def keep(x: jax.Array, axis: int) -> jax.Array:
        shape = (len(x), *[1] * (axis - 1), CHUNK, *[1] * (x.ndim - axis - 1))
        return jnp.where(kept_BC.reshape(shape), x, 0)

    rows = map_rows(keep, state.rows)

    def clear(x: jax.Array) -> jax.Array:
        return jnp.where((next_B > 0).reshape(-1, *[1] * (x.ndim - 1)), x, 0)

    dropped: RecurrentState = jax.tree.map(clear, state.replace(rows=rows))
    return dropped
