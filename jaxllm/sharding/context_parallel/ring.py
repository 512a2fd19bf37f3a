"""Ring attention (Liu et al. 2023, arXiv 2310.01889): queries stay, keys and values rotate.

Each of n devices has 1/n of the queries and of the slots. In each of n rounds it absorbs the slots
that it holds into the online softmax of `ops.attention`; between rounds, slots move on by one
device. A round computes only the pairs of halves in which a query can see a slot, by position: in
zigzag order (`order`) that is 2n + 1 of 4n pairs for every device.

The gradient is a second pass around the ring: the cotangents of slots travel with them, and arrive
home after n rounds. Between the passes only the input, the output and one number per query are
stored: nothing on a device grows with the whole text.
"""

from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxllm.ops.attention import (
    BLOCK,
    Part,
    Queries,
    Softmax,
    absorb,
    empty_softmax,
    normalize_output,
    scores,
    visible,
    weighted_sum,
)
from jaxllm.ops.kv_quant import Int8Entries
from jaxllm.ops.varying_axes import match_varying

T = TypeVar("T")


class RingOptions(NamedTuple):
    """Static options: the axis that slots rotate over, and arguments of `ops.attend`."""

    axis: str
    scale: float
    window: int | None
    cap: float | None


class TokenPlaces(NamedTuple):
    """Where tokens `[B, T]` are: their positions and documents; None: one document."""

    position_BT: jax.Array
    document_BT: jax.Array | None


class KVSlots(NamedTuple):
    """Some keys and values `[B, S, K, H]`, and where they are; this is what rotates."""

    k_BSKH: Any
    v_BSKH: Any
    place: TokenPlaces


def attend(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    part: Part,
    *,
    axis: str,
    scale: float,
    window: int | None,
    cap: float | None = None,
    document_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with this device's queries to the slots of all devices, inside `shard_map`.

    All devices have equal numbers of queries and slots; tokens and padding (position -1) may be
    anywhere. The slots of a device are sent n - 1 times. The gradient sends them as often again,
    and float32 cotangents n times. Int8 is not differentiable.

    Args:
        document_BT: int32, the document of each query. Slots are then the same tokens, and a query
            sees only those of its own document.

    Returns:
        The output of `ops.attend`, float32 `[B, T, N, H]`, and the log of the softmax denominators,
        `[B, T, N]`.
    """
    B, T, N, H = q_BTNH.shape
    K = part.k_BSKH.shape[2]
    q_BTKGH, place = q_BTNH.reshape(B, T, K, N // K, H), TokenPlaces(position_BT, document_BT)
    slots = KVSlots(part.k_BSKH, part.v_BSKH, TokenPlaces(part.position_BS, document_BT))
    options = RingOptions(axis, scale, window, cap)
    # Replicated inputs get the sum of the devices' gradients: this is the transpose of a psum.
    q_BTKGH, place, slots = match_varying((q_BTKGH, place, slots), q_BTKGH, place, slots)
    floats = not any(isinstance(x, Int8Entries) for x in part)
    output = (_differentiable if floats else _attend)(
        q_BTKGH, (slots.k_BSKH, slots.v_BSKH), place, slots.place, options
    )
    return output[0], jnp.moveaxis(output[1], 3, 1).reshape(B, T, N)


def _attend(
    q_BTKGH: jax.Array, entries: Any, place: TokenPlaces, at: TokenPlaces, options: RingOptions
) -> tuple[jax.Array, jax.Array]:
    k, v = entries
    state = _softmax(q_BTKGH, place, KVSlots(k, v, at), options)
    return normalize_output(state, jnp.float32), state.lse_BKGT


_differentiable = jax.custom_vjp(_attend, nondiff_argnums=(4,))


def _forward(
    q_BTKGH: jax.Array, entries: Any, place: TokenPlaces, at: TokenPlaces, options: RingOptions
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    output, (k, v) = _attend(q_BTKGH, entries, place, at, options), entries
    return output, (q_BTKGH, place, KVSlots(k, v, at), output)


def _softmax(
    q_BTKGH: jax.Array, place: TokenPlaces, slots: KVSlots, options: RingOptions
) -> Softmax:
    """Return the softmax state of this device's queries after all rounds."""
    asking = _halves((q_BTKGH, place))
    blank = [match_varying(empty_softmax(_queries(*half, options)), q_BTKGH) for half in asking]

    def meet(states: list[Softmax], slots: KVSlots) -> list[Softmax]:
        for some in _halves(slots):
            for i, (q, at) in enumerate(asking):
                look = partial(
                    _absorb_slots, queries=_queries(q, at, options), place=at, slots=some
                )
                met = _may_see(at, some.place, options.window)
                states[i] = jax.lax.cond(met, look, lambda state: state, states[i])
        return states

    def run_round(carry: Any, _: None) -> tuple[Any, None]:
        states, slots = carry
        # The two are independent: slots are sent while they are used.
        return (meet(list(states), slots), pass_on(slots, options.axis)), None

    rounds = jax.lax.axis_size(options.axis)
    (states, slots), _ = jax.lax.scan(run_round, (blank, slots), length=rounds - 1)
    states = meet(list(states), slots)
    return Softmax(*(jnp.concatenate(halves, axis=3) for halves in zip(*states, strict=True)))


def _absorb_slots(state: Softmax, queries: Queries, place: TokenPlaces, slots: KVSlots) -> Softmax:
    """Absorb slots into the softmax, block by block; blocks that no query sees are skipped."""

    def one(state: Softmax, block: KVSlots) -> tuple[Softmax, None]:
        seen_BTS = _visible_slots(place, block.place, queries.window)
        part = Part(block.k_BSKH, block.v_BSKH, block.place.position_BT)
        return jax.lax.cond(
            seen_BTS.any(),
            lambda state: absorb(state, queries, part, seen_BTS),
            lambda state: (state, None),
            state,
        )

    return jax.lax.scan(one, state, _blocks(slots))[0]


def _backward(options: RingOptions, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    """Compute the gradient by a second pass around the ring.

    With weights p = exp(score - log), output o, its cotangent g and the cotangent h of log, the
    cotangent of a score is `p (g v - g o + h)`, and that of v is `p g` (Dao et al. 2022, appendix
    B).
    """
    q_BTKGH, place, slots, (out_BTNH, log_BKGT) = residuals
    g_BTKGH = cotangents[0].reshape(q_BTKGH.shape)
    less_BTKG = (g_BTKGH * out_BTNH.reshape(q_BTKGH.shape)).sum(axis=-1)
    less_BTKG -= jnp.moveaxis(cotangents[1], 3, 1)
    log_BTKG = jnp.moveaxis(jnp.where(jnp.isneginf(log_BKGT), jnp.inf, log_BKGT), 3, 1)
    halves = _halves((q_BTKGH.astype(jnp.float32), place, g_BTKGH, less_BTKG, log_BTKG))
    dq = [jnp.zeros_like(half[0]) for half in halves]
    received = tuple(jnp.zeros(x.shape, jnp.float32) for x in slots[:2])
    dq, received = match_varying((dq, received), residuals, cotangents)

    def meet(dq: list[jax.Array], received: Any, slots: KVSlots) -> tuple[Any, Any]:
        ends = []
        for some, got in zip(_halves(slots), _halves(received), strict=True):
            for i, half in enumerate(halves):
                pull = partial(_pull_cotangents, half=half, slots=some, options=options)
                met = _may_see(half[1], some.place, options.window)
                dq[i], got = jax.lax.cond(met, pull, lambda sums: sums, (dq[i], got))
            ends.append(got)
        return dq, jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *ends)

    def run_round(carry: Any, _: None) -> tuple[Any, None]:
        dq, received, slots = carry
        dq, received = meet(list(dq), received, slots)
        return (dq, pass_on(received, options.axis), pass_on(slots, options.axis)), None

    rounds, start = jax.lax.axis_size(options.axis), (dq, received, slots)
    (dq, received, last), _ = jax.lax.scan(run_round, start, length=rounds - 1)
    dq, received = meet(list(dq), received, last)
    home = pass_on(received, options.axis)
    entries = tuple(x.astype(like.dtype) for x, like in zip(home, slots[:2], strict=True))
    return jnp.concatenate(dq, axis=1).astype(q_BTKGH.dtype), entries, None, None


_differentiable.defvjp(_forward, _backward)


def _pull_cotangents(sums: Any, half: Any, slots: KVSlots, options: RingOptions) -> Any:
    """Add to the cotangents of queries and slots what they contribute to each other."""
    q_BTKGH, place, *statistics = half
    g_BKGTH, less_BKGT, log_BKGT = (jnp.moveaxis(x, 1, 3) for x in statistics)

    def block_backward(dq: jax.Array, block: KVSlots) -> tuple[jax.Array, Any]:
        seen_BTS = _visible_slots(place, block.place, options.window)
        # An empty slot may hold NaN, and zero times NaN is NaN.
        used_BS11 = seen_BTS.any(axis=1)[:, :, None, None]
        k, v = (jnp.where(used_BS11, x.astype(jnp.float32), 0.0) for x in block[:2])

        def score(q_BTKGH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
            part = Part(k_BSKH, v, block.place.position_BT)
            return scores(_queries(q_BTKGH, place, options), part, seen_BTS)

        score_BKGTS, to_score = jax.vjp(score, q_BTKGH, k)
        weight_BKGTS = jnp.exp(score_BKGTS - log_BKGT[..., None])
        _, to_sum = jax.vjp(lambda p, v: weighted_sum(p, v, p.dtype), weight_BKGTS, v)
        dp_BKGTS, dv = to_sum(g_BKGTH)
        dq_more, dk = to_score(weight_BKGTS * (dp_BKGTS - less_BKGT[..., None]))
        return dq + dq_more, (dk, dv)

    dq, received = sums
    dq, more = jax.lax.scan(block_backward, dq, _blocks(slots))
    return dq, tuple(x + _merge_blocks(y, x.shape[1]) for x, y in zip(received, more, strict=True))


def pass_on(x: T, axis: str, step: int = 1) -> T:
    """Send an array to the next device of a ring, and return that of the previous one.

    step: -1 to send to the previous device.
    """
    n = jax.lax.axis_size(axis)
    received: T = jax.lax.ppermute(x, axis, [(i, (i + step) % n) for i in range(n)])
    return received


def _queries(q_BTKGH: jax.Array, place: TokenPlaces, options: RingOptions) -> Queries:
    return Queries(q_BTKGH, place.position_BT, options.scale, options.window, options.cap)


def _visible_slots(queries: TokenPlaces, slots: TokenPlaces, window: int | None) -> jax.Array:
    """Return which slots each query sees, bool `[B, T, S]`."""
    seen_BTS = visible(queries.position_BT, slots.position_BT, window=window)
    if queries.document_BT is None or slots.document_BT is None:
        return seen_BTS
    return seen_BTS & (queries.document_BT[:, :, None] == slots.document_BT[:, None, :])


def _may_see(queries: TokenPlaces, slots: TokenPlaces, window: int | None) -> jax.Array:
    """Return whether a query may see a slot, by the first and last of both. False is certain."""
    (first_q, last_q), (first_k, last_k) = _position_range(queries), _position_range(slots)
    may_B = (first_k <= last_q) & (last_k >= 0)
    if window is not None:
        may_B &= first_q - last_k < window
    if queries.document_BT is not None and slots.document_BT is not None:
        (low_q, high_q), (low_k, high_k) = (
            _min_max(at.document_BT, at.position_BT >= 0) for at in (queries, slots)
        )
        may_B &= (low_k <= high_q) & (low_q <= high_k)
    return may_B.any()


def _position_range(place: TokenPlaces) -> tuple[jax.Array, jax.Array]:
    return _min_max(place.position_BT, place.position_BT >= 0)


def _min_max(x_BT: jax.Array | None, real_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the minimum and maximum over the real columns of each row, `[B]`.

    A row without any gives the largest int32, and -1.
    """
    assert x_BT is not None
    least_B = jnp.where(real_BT, x_BT, jnp.iinfo(jnp.int32).max).min(axis=1)
    return least_B, jnp.where(real_BT, x_BT, -1).max(axis=1)


def _halves(x: T) -> list[T]:
    """Split columns in two halves: in zigzag order, the early and the late chunk."""
    cut = jax.tree.leaves(x)[0].shape[1] // 2
    ends: list[T] = [jax.tree.map(lambda x: x[:, :cut], x), jax.tree.map(lambda x: x[:, cut:], x)]
    return ends if cut else ends[1:]


def _blocks(slots: KVSlots) -> KVSlots:
    """Split slots into blocks, `[S / BLOCK, B, BLOCK, ...]`, padded with empty slots."""
    count = slots.place.position_BT.shape[1]
    width = min(BLOCK, count)

    def cut(x: jax.Array, empty: int) -> jax.Array:
        padding = [(0, 0), (0, -count % width)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, padding, constant_values=empty)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, width, *x.shape[2:]), 1, 0)

    k, v = (jax.tree.map(lambda x: cut(x, 0), x) for x in slots[:2])
    return KVSlots(k, v, jax.tree.map(lambda x: cut(x, -1), slots.place))


def _merge_blocks(x: jax.Array, count: int) -> jax.Array:
    """Merge blocks to `count` slots: the inverse of `_blocks`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :count]
