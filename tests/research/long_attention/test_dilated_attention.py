"""Dilated attention by gathering, against the paper's formulas as loops and a dense softmax."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops import Part, cast
from jaxllm.ops.kv_quant import concat_slots, dequantize
from jaxllm.ops.products import einsum
from jaxllm.research.long_attention import dilated_blocks as blocks
from jaxllm.research.long_attention.dilated_attention import attend, dense_weights, multiplicity
from jaxllm.research.long_attention.dilation_pattern import Dilation, DilationPattern

N, K, H = 6, 2, 5
SCALE = 0.6


def pairs(*given: tuple[int, int], heads: int = N) -> tuple[Dilation, ...]:
    return tuple(Dilation(w, r, tuple(j % r for j in range(heads))) for w, r in given)


PAIRS = pairs((4, 1), (8, 3), (16, 6))  # no segment is a multiple of its dilation, as in the paper


def dense_attend(
    q_BTNH: jax.Array, position_BT: jax.Array, parts: Sequence[Part], pattern: DilationPattern
) -> jax.Array:
    """Compute `attend` as one softmax with the logarithm of `multiplicity`, `[B, T, N, H]`."""
    B, T, N, H = q_BTNH.shape
    weight_BNTS = dense_weights(q_BTNH, position_BT, parts, pattern)
    v_BSKH = concat_slots([dequantize(p.v_BSKH).astype(jnp.float32) for p in parts], B)
    position_BS = concat_slots([p.position_BS for p in parts], B)
    v_BSKH = jnp.where(position_BS[:, :, None, None] >= 0, v_BSKH, 0.0)  # zero times NaN is NaN
    weight_BKGTS = weight_BNTS.reshape(B, v_BSKH.shape[2], -1, T, v_BSKH.shape[1])
    out_BTKGH = einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, v_BSKH)
    return out_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype)


def draw(rows: int, length: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, length, N, H), np.float32)
    k, v = rng.standard_normal((2, rows, length, K, H), np.float32)
    return q, k, v


def paper_loops(q: Any, k: Any, v: Any, position: Any, dilations: Any, dedupe: bool = False) -> Any:
    """Return sections 2.2 to 2.4 of the paper for one row, in float64 loops."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for j in range(q.shape[1]):
        kv = j // (q.shape[1] // k.shape[1])
        for t, p in enumerate(position):
            total, value, had = 0.0, np.zeros(q.shape[2]), set[int]()
            for w, r, offsets in dilations if p >= 0 else ():
                segment = p // w
                rows = range(segment * w + offsets[j], (segment + 1) * w, r)  # equation 8
                if offsets[j] < 0 or p not in rows:
                    continue
                for s, at in enumerate(position):
                    if at in rows and 0 <= at <= p and not (dedupe and s in had):
                        had.add(s)
                        weight = np.exp(SCALE * (q[t, j] @ k[s, kv]))
                        total += weight  # s_i of equation 10
                        value += weight * v[s, kv]  # s_i O_i
            out[t, j] = value / total if total else 0.0
    return out


def run_attend(
    q: Any, k: Any, v: Any, position: Any, dilations: Any = PAIRS, dedupe: bool = False, **more: Any
) -> Any:
    position = jnp.asarray(position, jnp.int32)
    part, pattern = (
        Part(jnp.asarray(k), jnp.asarray(v), position),
        DilationPattern(dilations, SCALE, None, dedupe),
    )
    return jax.jit(lambda q, part: attend(q, position, [part], pattern, **more))(
        jnp.asarray(q), part
    )


LENGTH = 29
UNEQUAL = np.stack(
    [
        np.arange(LENGTH),  # no padding
        np.maximum(np.arange(LENGTH) - 7, -1),  # padded on the left
        np.where(np.arange(LENGTH) < 11, np.arange(LENGTH), -1),  # padded on the right
        np.arange(LENGTH) + 5,  # from the middle of a segment
    ]
)


@pytest.mark.parametrize("dedupe", [pytest.param(False, marks=pytest.mark.full), True])
def test_attend_equals_papers_loops(dedupe: bool) -> None:
    """Outputs equal the paper's formulas as float64 loops, for padded rows and a row that begins
    within a segment.
    """
    q, k, v = draw(4, LENGTH)
    out = run_attend(q, k, v, UNEQUAL, dedupe=dedupe)
    for row in range(4):
        expected = paper_loops(q[row], k[row], v[row], UNEQUAL[row], PAIRS, dedupe)
        np.testing.assert_allclose(out[row], expected, atol=1e-5)
    assert not out[1, :7].any()


def gradients(function: Any, *args: Any) -> Any:
    """Return the values, and the gradients of a weighted sum of them."""

    def loss(*args: Any) -> Any:
        out = function(*args)
        weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * weight), out

    found, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*args)
    return out, found


def assert_equals_dense(run: Any, pattern: DilationPattern, at: jax.Array) -> None:
    """Assert that values and gradients of `run(q, at, part)` equal one dense softmax."""
    qkv = [jnp.asarray(x) for x in draw(*at.shape)]
    values, found = gradients(lambda q, k, v: run(q, at, Part(k, v, at)), *qkv)
    expected, wanted = gradients(
        lambda q, k, v: dense_attend(q, at, [Part(k, v, at)], pattern), *qkv
    )
    np.testing.assert_allclose(values, expected, atol=1e-5)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_values_and_gradients_equal_dense_softmax() -> None:
    """Values and gradients equal one softmax with multiplicities, also with a soft cap."""
    pattern = DilationPattern(pairs((4, 1), (12, 5)), SCALE, cap=2.0)
    at = jnp.asarray(UNEQUAL, jnp.int32)
    assert_equals_dense(lambda q, at, part: attend(q, at, [part], pattern), pattern, at)


def test_block_size_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few scores at a time, blocks hold several segments, or a part of one
    segment's queries.
    """
    monkeypatch.setattr(blocks, "MAX_SCORES", 24 * 6)
    at = jnp.asarray(UNEQUAL[:1], jnp.int32)
    # Blocks of two segments, of two queries, and of both with a shorter last stride.
    for pair in (pairs((3, 1)), pairs((12, 1)), pairs((14, 4))):
        pattern = DilationPattern(pair, SCALE)
        assert_equals_dense(
            lambda q, at, part, p=pattern: blocks.attend_blocks(p, q, at, (part,)), pattern, at
        )


def test_memory_grows_linearly_with_length() -> None:
    """For four times the tokens, no array of values or gradients is over 4.2 times as large, in any
    branch.
    """

    pattern = DilationPattern(pairs((64, 1), (256, 4)), SCALE)

    def most(length: int) -> int:
        at = jnp.arange(length, dtype=jnp.int32)[None]
        given = [jax.ShapeDtypeStruct((1, length, heads, H), jnp.float32) for heads in (N, K, K)]

        def loss(q: Any, k: Any, v: Any) -> jax.Array:
            return attend(q, at, [Part(k, v, at)], pattern).sum()

        closed = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*given)
        return max(sizes(closed.jaxpr))

    def sizes(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars)
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from sizes(inner)

    # Only linear-size arrays grow; the blocks of scores have a constant size.
    assert most(8192) <= 4.2 * most(2048)


CACHED = np.concatenate([np.arange(17), [-1, -1], np.arange(17, 24)])  # two slots are empty


@pytest.mark.parametrize("packed", [False, True])
def test_gradient_stores_no_per_token_keys(packed: bool) -> None:
    """A gradient reserves memory for both branches; the branch that gathers keys per token must not
    add its own.
    """
    T, w = 96, 64
    q, k, v = (jnp.asarray(x) for x in draw(1, T))
    position = jnp.arange(T, dtype=jnp.int32)[None]
    document = jnp.zeros_like(position) if packed else None

    def run(q: Any, k: Any, v: Any) -> Any:
        pattern = DilationPattern(pairs((w, 1)), SCALE)
        return attend(q, position, [Part(k, v, position)], pattern, document_BT=document)

    kept = jax.tree.leaves(jax.eval_shape(lambda *given: jax.vjp(run, *given)[1], q, k, v))
    assert kept and max(x.size for x in kept) < T * w * K


@pytest.mark.parametrize("order", [pytest.param("in order", marks=pytest.mark.full), "with gaps"])
def test_single_token_decode_handles_any_slot_order(order: str) -> None:
    """Cache parts in float32 and int8, with gaps and NaN in empty slots, equal one softmax with
    multiplicities.
    """
    q, k, v = draw(2, 27)
    at = np.stack([np.append(np.arange(26), 26), np.append(np.arange(26) + 3, 29)])
    if order == "with gaps":
        at[0, :26] = np.random.default_rng(1).permutation(CACHED)
        at[1, 4:9] = -7
    k, v = (np.where(at[..., None, None] < 0, np.nan, x) for x in (k, v))
    cut = (slice(0, 9), slice(9, 26), slice(26, 27))
    parts = [Part(*(jnp.asarray(x[:, s]) for x in (k, v)), jnp.asarray(at[:, s])) for s in cut]
    parts[1] = Part(*(cast(jnp.nan_to_num(x), jnp.int8) for x in parts[1][:2]), parts[1][2])
    q, now = jnp.asarray(q[:, 26:]), jnp.asarray(at[:, 26:], jnp.int32)
    clean = [Part(*(jax.tree.map(jnp.nan_to_num, x) for x in p[:2]), p[2]) for p in parts]
    pattern = DilationPattern(PAIRS, SCALE)
    expected = dense_attend(q, now, clean, pattern)
    ours = jax.jit(lambda q, parts: attend(q, now, parts, pattern))(q, parts)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    weights = dense_weights(q, now, clean, pattern)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)


def test_scattered_positions_equal_papers_loops() -> None:
    """New tokens at unordered positions with gaps equal the paper's loops."""
    q, k, v = draw(1, 9)
    at = np.array([[0, 3, 5, 23, 21, -1, 48, 12, 15]])
    expected = paper_loops(q[0], k[0], v[0], at[0], PAIRS)
    np.testing.assert_allclose(run_attend(q, k, v, at)[0], expected, atol=1e-5)


# Errors in the reference code (torchscale, dilated_attention.py) and points the paper leaves open.


def test_zero_log_denominator_is_counted() -> None:
    """A token that sees only itself with score 0 has a log-sum-exp of 0, which does not mean a
    missing one.
    """
    at, v = np.arange(6)[None], draw(1, 6)[2]
    zero = np.zeros((1, 6, N, H), np.float32)
    out = run_attend(zero, np.zeros_like(v), v, at, pairs((6, 1), (12, 6)))
    token, head = 4, 4  # the only token of the head in the second dilation
    expected = (v[0, :5, 1].sum(axis=0) + v[0, 4, 1]) / 6
    np.testing.assert_allclose(out[0, token, head], expected, atol=1e-6)


def test_frozen_mixture_blocks_gradients() -> None:
    """Equations 9 and 10 by hand with constant denominators: gradients of q differ from the full
    ones, those of v do not.
    """
    q, k, v = map(jnp.asarray, draw(1, 12))
    at = jnp.arange(12, dtype=jnp.int32)[None]
    pair = pairs((4, 1), (12, 3))

    def by_hand(frozen: bool, q: Any, k: Any, v: Any) -> Any:
        wide_k, wide_v = jnp.repeat(k, N // K, axis=2), jnp.repeat(v, N // K, axis=2)
        outs, totals = [], []
        for d in pair:
            seen = multiplicity([d], at, at)
            score = SCALE * jnp.einsum("btnh,bsnh->bnts", q, wide_k)
            weight = jnp.where(seen > 0, jnp.exp(score), 0.0)
            s = weight.sum(axis=-1)
            out = jnp.einsum("bnts,bsnh->btnh", weight, wide_v)
            some = jnp.moveaxis(jnp.where(s == 0, 1.0, s), 1, 2)[..., None]
            outs.append(out / some)
            totals.append(jnp.moveaxis(jax.lax.stop_gradient(s) if frozen else s, 1, 2)[..., None])
        return sum(s * o for s, o in zip(totals, outs, strict=True)) / sum(totals)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attend(q, at, [Part(k, v, at)], DilationPattern(pair, SCALE, frozen_mixture=True))

    _, found = gradients(lambda *x: ours(*x), q, k, v)
    _, expected = gradients(lambda *x: by_hand(True, *x), q, k, v)
    _, whole = gradients(lambda *x: by_hand(False, *x), q, k, v)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.abs(found[0] - whole[0]).max() > 1e-3
    np.testing.assert_allclose(found[2], whole[2], atol=1e-5)  # not affected by freezing
