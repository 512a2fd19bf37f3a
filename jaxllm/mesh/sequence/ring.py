"""Ring attention (Liu et al. 2023, arXiv 2310.01889): queries stay, keys and values go round.

Each of n devices has 1/n of the queries and of the slots. In n rounds it meets the slots of all,
and absorbs them into the online softmax of `ops.attention`; between rounds the slots move on by one
device. Of a round it computes only those pairs of halves in which a query can see a slot, by their
positions: in zig-zag order (`order`) that is 2n + 1 of 4n pairs for every device.

The gradient goes round a second time: what slots receive travels with them, and comes home after n
rounds. What is kept in between is the input, the output and one number a query: nothing on a device
grows with the whole text.
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
    finished,
    scores,
    unseen,
    visible,
    weighted_sum,
)
from jaxllm.ops.entries import Int8Entries
from jaxllm.ops.varying import varying_as

T = TypeVar("T")


class Rules(NamedTuple):
    """What is static: the axis that slots go round, and what `ops.attend` is told."""

    axis: str
    scale: float
    window: int | None
    cap: float | None


class Place(NamedTuple):
    """Where tokens `[B, T]` are: their positions, and of which documents; None: of any."""

    position_BT: jax.Array
    document_BT: jax.Array | None


class Slots(NamedTuple):
    """Some keys and values `[B, S, K, H]`, and where they are: what travels."""

    k_BSKH: Any
    v_BSKH: Any
    place: Place


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
    """This device's queries over the slots of all devices: what `ops.attend` gives them, float32
    `[B, T, N, H]`, and the logarithms of their softmaxes' denominators, `[B, T, N]`.

    Inside `shard_map`. Queries and slots are this device's share, as many everywhere; any token and
    any padding (position -1) may be anywhere. document_BT: int32, which document each query is of;
    slots are then the same tokens, of which it sees those of its own alone.

    Sends the slots of a device n - 1 times; for the gradient once more as often, and float32
    cotangents n times. Int8 is not differentiated.
    """
    B, T, N, H = q_BTNH.shape
    K = part.k_BSKH.shape[2]
    q_BTKGH, place = q_BTNH.reshape(B, T, K, N // K, H), Place(position_BT, document_BT)
    slots = Slots(part.k_BSKH, part.v_BSKH, Place(part.position_BS, document_BT))
    rules = Rules(axis, scale, window, cap)
    # What devices hold alike gets the sum of their gradients: this is the transpose of a psum.
    q_BTKGH, place, slots = varying_as((q_BTKGH, place, slots), q_BTKGH, place, slots)
    floats = not any(isinstance(x, Int8Entries) for x in part)
    found = (_differentiable if floats else _found)(
        q_BTKGH, (slots.k_BSKH, slots.v_BSKH), place, slots.place, rules
    )
    return found[0], jnp.moveaxis(found[1], 3, 1).reshape(B, T, N)


def _found(
    q_BTKGH: jax.Array, entries: Any, place: Place, at: Place, rules: Rules
) -> tuple[jax.Array, jax.Array]:
    k, v = entries
    state = _softmax(q_BTKGH, place, Slots(k, v, at), rules)
    return finished(state, jnp.float32), state.log_BKGT


_differentiable = jax.custom_vjp(_found, nondiff_argnums=(4,))


def _forwards(
    q_BTKGH: jax.Array, entries: Any, place: Place, at: Place, rules: Rules
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    found, (k, v) = _found(q_BTKGH, entries, place, at, rules), entries
    return found, (q_BTKGH, place, Slots(k, v, at), found)


def _softmax(q_BTKGH: jax.Array, place: Place, slots: Slots, rules: Rules) -> Softmax:
    """The softmax of this device's queries after all rounds."""
    asking = _halves((q_BTKGH, place))
    blank = [varying_as(unseen(_queries(*half, rules)), q_BTKGH) for half in asking]

    def meet(states: list[Softmax], slots: Slots) -> list[Softmax]:
        for some in _halves(slots):
            for i, (q, at) in enumerate(asking):
                look = partial(_absorbed, queries=_queries(q, at, rules), place=at, slots=some)
                met = _meet(at, some.place, rules.window)
                states[i] = jax.lax.cond(met, look, lambda state: state, states[i])
        return states

    def turn(carry: Any, _: None) -> tuple[Any, None]:
        states, slots = carry
        # Neither waits for the other: slots are on their way while they are computed with.
        return (meet(list(states), slots), passed_on(slots, rules.axis)), None

    rounds = jax.lax.axis_size(rules.axis)
    (states, slots), _ = jax.lax.scan(turn, (blank, slots), length=rounds - 1)
    states = meet(list(states), slots)
    return Softmax(*(jnp.concatenate(halves, axis=3) for halves in zip(*states, strict=True)))


def _absorbed(state: Softmax, queries: Queries, place: Place, slots: Slots) -> Softmax:
    """The softmax after some slots, block by block, without blocks that nobody sees."""

    def one(state: Softmax, block: Slots) -> tuple[Softmax, None]:
        seen_BTS = _seen(place, block.place, queries.window)
        part = Part(block.k_BSKH, block.v_BSKH, block.place.position_BT)
        return jax.lax.cond(
            seen_BTS.any(),
            lambda state: absorb(state, queries, part, seen_BTS),
            lambda state: (state, None),
            state,
        )

    return jax.lax.scan(one, state, _blocks(slots))[0]


def _backwards(rules: Rules, kept: Any, given: tuple[jax.Array, jax.Array]) -> Any:
    """The second time round. With weights p = exp(score - log), o the output, g its cotangent and
    h that of log, a score's is `p (g v - g o + h)`, and v's is `p g` (Dao et al. 2022, appendix B).
    """
    q_BTKGH, place, slots, (out_BTNH, log_BKGT) = kept
    g_BTKGH = given[0].reshape(q_BTKGH.shape)
    less_BTKG = (g_BTKGH * out_BTNH.reshape(q_BTKGH.shape)).sum(axis=-1)
    less_BTKG -= jnp.moveaxis(given[1], 3, 1)
    log_BTKG = jnp.moveaxis(jnp.where(jnp.isneginf(log_BKGT), jnp.inf, log_BKGT), 3, 1)
    asking = _halves((q_BTKGH.astype(jnp.float32), place, g_BTKGH, less_BTKG, log_BTKG))
    dq = [jnp.zeros_like(half[0]) for half in asking]
    received = tuple(jnp.zeros(x.shape, jnp.float32) for x in slots[:2])
    dq, received = varying_as((dq, received), kept, given)

    def meet(dq: list[jax.Array], received: Any, slots: Slots) -> tuple[Any, Any]:
        ends = []
        for some, got in zip(_halves(slots), _halves(received), strict=True):
            for i, half in enumerate(asking):
                pull = partial(_pulled, asking=half, slots=some, rules=rules)
                met = _meet(half[1], some.place, rules.window)
                dq[i], got = jax.lax.cond(met, pull, lambda sums: sums, (dq[i], got))
            ends.append(got)
        return dq, jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *ends)

    def turn(carry: Any, _: None) -> tuple[Any, None]:
        dq, received, slots = carry
        dq, received = meet(list(dq), received, slots)
        return (dq, passed_on(received, rules.axis), passed_on(slots, rules.axis)), None

    rounds, start = jax.lax.axis_size(rules.axis), (dq, received, slots)
    (dq, received, last), _ = jax.lax.scan(turn, start, length=rounds - 1)
    dq, received = meet(list(dq), received, last)
    home = passed_on(received, rules.axis)
    entries = tuple(x.astype(like.dtype) for x, like in zip(home, slots[:2], strict=True))
    return jnp.concatenate(dq, axis=1).astype(q_BTKGH.dtype), entries, None, None


_differentiable.defvjp(_forwards, _backwards)


def _pulled(sums: Any, asking: Any, slots: Slots, rules: Rules) -> Any:
    """The cotangents of some queries and slots, with what these give each other added."""
    q_BTKGH, place, *beside = asking
    g_BKGTH, less_BKGT, log_BKGT = (jnp.moveaxis(x, 1, 3) for x in beside)

    def one(dq: jax.Array, block: Slots) -> tuple[jax.Array, Any]:
        seen_BTS = _seen(place, block.place, rules.window)
        # What an empty slot holds may be NaN, and zero times NaN is NaN.
        used_BS11 = seen_BTS.any(axis=1)[:, :, None, None]
        k, v = (jnp.where(used_BS11, x.astype(jnp.float32), 0.0) for x in block[:2])

        def score(q_BTKGH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
            part = Part(k_BSKH, v, block.place.position_BT)
            return scores(_queries(q_BTKGH, place, rules), part, seen_BTS)

        score_BKGTS, to_score = jax.vjp(score, q_BTKGH, k)
        weight_BKGTS = jnp.exp(score_BKGTS - log_BKGT[..., None])
        _, to_sum = jax.vjp(lambda p, v: weighted_sum(p, v, p.dtype), weight_BKGTS, v)
        dp_BKGTS, dv = to_sum(g_BKGTH)
        dq_more, dk = to_score(weight_BKGTS * (dp_BKGTS - less_BKGT[..., None]))
        return dq + dq_more, (dk, dv)

    dq, got = sums
    dq, more = jax.lax.scan(one, dq, _blocks(slots))
    return dq, tuple(x + _unblocked(y, x.shape[1]) for x, y in zip(got, more, strict=True))


def passed_on(x: T, axis: str) -> T:
    """What the device before had; what this one has goes to the next."""
    n = jax.lax.axis_size(axis)
    given: T = jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])
    return given


def _queries(q_BTKGH: jax.Array, place: Place, rules: Rules) -> Queries:
    return Queries(q_BTKGH, place.position_BT, rules.scale, rules.window, rules.cap)


def _seen(asked: Place, slots: Place, window: int | None) -> jax.Array:
    """What each query sees of some slots, bool `[B, T, S]`."""
    seen_BTS = visible(asked.position_BT, slots.position_BT, window=window)
    if asked.document_BT is None or slots.document_BT is None:
        return seen_BTS
    return seen_BTS & (asked.document_BT[:, :, None] == slots.document_BT[:, None, :])


def _meet(asked: Place, slots: Place, window: int | None) -> jax.Array:
    """Whether a query may see a slot, by the first and the last of both: False is certain."""
    (first_q, last_q), (first_k, last_k) = _span(asked), _span(slots)
    may_B = (first_k <= last_q) & (last_k >= 0)
    if window is not None:
        may_B &= first_q - last_k < window
    if asked.document_BT is not None and slots.document_BT is not None:
        (low_q, high_q), (low_k, high_k) = (
            _ends(at.document_BT, at.position_BT >= 0) for at in (asked, slots)
        )
        may_B &= (low_k <= high_q) & (low_q <= high_k)
    return may_B.any()


def _span(place: Place) -> tuple[jax.Array, jax.Array]:
    return _ends(place.position_BT, place.position_BT >= 0)


def _ends(x_BT: jax.Array | None, real_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest of what is real in each row, `[B]`; the greatest int32, and -1."""
    assert x_BT is not None
    least_B = jnp.where(real_BT, x_BT, jnp.iinfo(jnp.int32).max).min(axis=1)
    return least_B, jnp.where(real_BT, x_BT, -1).max(axis=1)


def _halves(x: T) -> list[T]:
    """The two halves along columns, of which zig-zag order makes an early and a late one."""
    cut = jax.tree.leaves(x)[0].shape[1] // 2
    ends: list[T] = [
        jax.tree.map(lambda x: x[:, :cut], x),
        jax.tree.map(lambda x: x[:, cut:], x),
    ]
    return ends if cut else ends[1:]


def _blocks(slots: Slots) -> Slots:
    """Slots in blocks, `[S / BLOCK, B, BLOCK, ...]`; the last one filled up with empty ones."""
    count = slots.place.position_BT.shape[1]
    width = min(BLOCK, count)

    def cut(x: jax.Array, empty: int) -> jax.Array:
        padding = [(0, 0), (0, -count % width)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, padding, constant_values=empty)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, width, *x.shape[2:]), 1, 0)

    k, v = (jax.tree.map(lambda x: cut(x, 0), x) for x in slots[:2])
    return Slots(k, v, jax.tree.map(lambda x: cut(x, -1), slots.place))


def _unblocked(x: jax.Array, count: int) -> jax.Array:
    """The way back, of so many slots."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :count]
