"""Context-parallel attention equals attention on one device, gradients included."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType

from jaxllm import ops
from jaxllm.errors import ConfigError
from jaxllm.ops.attention import Queries
from jaxllm.ops.masked import attend_with_mask, document_mask
from jaxllm.sharding.context_parallel import ring, split_cache, ulysses, zigzag

pytestmark = pytest.mark.devices

AXIS = "sequence"
SPLIT, WHOLE = jax.P(None, AXIS), jax.P()
B, N, K, H = 2, 6, 2, 5
SCALE = 0.37


def first(cases: list[Any]) -> list[Any]:
    """Mark all cases but the first as `full`."""
    return [pytest.param(*cases[0]), *(pytest.param(*x, marks=pytest.mark.full) for x in cases[1:])]


def mesh_of(n: int) -> jax.sharding.Mesh:
    return jax.make_mesh((n,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def text(T: int, *, ragged: bool = True, seed: int = 0) -> tuple[jax.Array, ...]:
    """Return q, k, v and positions of ragged rows, with gaps, and NaN in the padding."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(B, T, heads, H)).astype(np.float32) for heads in (N, K, K))
    position = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    if ragged:
        position[1] += 3  # positions that start above zero
        position[0, T - T // 3 :] = -1
        position[1, 2:4] = -1
        v[position < 0] = k[position < 0] = np.nan
    return tuple(map(jnp.asarray, (q, k, v, position)))


def dense(q: Any, k: Any, v: Any, position: Any, **rules: Any) -> jax.Array:
    return ops.attend(q, position, [ops.Part(k, v, position)], scale=SCALE, **rules)[0]


def ring_attention(n: int, T: int, **rules: Any) -> Callable[..., jax.Array]:
    """Return ring attention on arrays in plain order, with zigzag order inside."""
    there = zigzag.zigzag(T, n)

    def attend(q: Any, k: Any, v: Any, at: Any) -> jax.Array:
        part = ops.Part(k, v, at)
        return ring.attend(q, at, part, axis=AXIS, scale=SCALE, **rules)[0]

    split = jax.shard_map(attend, mesh=mesh_of(n), in_specs=(SPLIT,) * 4, out_specs=SPLIT)

    def whole(*given: jax.Array) -> jax.Array:
        return split(*(x[:, there] for x in given))[:, np.argsort(there)]

    return whole


def relative_error(a: Any, b: Any) -> float:
    """Return the largest difference of two pytrees, relative to the largest value of the second."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs)


def check_outputs_and_gradients(found: Any, want: Any, *given: jax.Array) -> None:
    """Check outputs, and the gradients of their sum of squares in all arguments."""
    assert relative_error(jax.jit(found)(*given), want(*given)) < 1e-5
    here, there = (
        jax.jit(jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), tuple(range(len(given)))))(*given)
        for f in (found, want)
    )
    assert relative_error(here, there) < 1e-5


RULES: list[dict[str, Any]] = [
    {"window": 19, "cap": 1.5},
    {"window": None},
    {"window": 7},
    {"window": None, "cap": 0.8},
]


@pytest.mark.parametrize("n, rules", first([(n, r) for n in (4, 2, 8) for r in RULES]), ids=str)
def test_ring_equals_single_device(n: int, rules: dict[str, Any]) -> None:
    given = text(48)
    found = jax.jit(ring_attention(n, 48, **rules))(*given)
    assert jnp.isfinite(found).all()
    np.testing.assert_allclose(found, dense(*given, **rules), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rules", first([(rules,) for rules in RULES]), ids=str)
def test_ring_gradients_equal_single_device(rules: dict[str, Any]) -> None:
    q, k, v, position = text(48)
    aim = jnp.asarray(np.random.default_rng(1).normal(size=q.shape).astype(np.float32))

    def loss(attend: Callable[..., jax.Array], q: Any, k: Any, v: Any) -> jax.Array:
        return (aim * attend(q, k, v, position)).sum()

    real = (position >= 0)[..., None, None]  # NaN in padding gives NaN gradients in plain JAX
    clean = [jnp.where(real, x, 0.0) for x in (k, v)]
    want = jax.grad(partial(loss, partial(dense, **rules)), (0, 1, 2))(q, *clean)
    found = jax.jit(jax.grad(partial(loss, ring_attention(4, 48, **rules)), (0, 1, 2)))(q, k, v)
    assert relative_error(found, want) < 1e-5


@pytest.mark.full
def test_ring_with_multiple_blocks_equals_single_device() -> None:
    """Halves of 300 slots, a full block of 256 and a partial one, give the outputs and gradients of
    one device.
    """
    *qkv, position = text(1200, ragged=False)
    for rules in ({"window": None}, {"window": 333}):
        one, split = (
            lambda *x, f=f: f(*x, position)
            for f in (partial(dense, **rules), ring_attention(2, 1200, **rules))
        )
        check_outputs_and_gradients(split, one, *qkv)


@pytest.mark.full
def test_ring_with_packed_documents_equals_masked_attention() -> None:
    """Documents in one row do not attend to each other: outputs and gradients equal masked
    attention.
    """
    T, n = 48, 4
    q, k, v, _ = text(T, ragged=False)
    document = jnp.asarray(np.repeat([[0, 1, 2, 3], [0, 1, 1, 2]], T // 4, axis=1), jnp.int32)
    starts = np.array([[np.argmax(row == d) for d in row] for row in np.asarray(document)])
    position = jnp.asarray(np.arange(T)[None] - starts, jnp.int32).at[:, -3:].set(-1)
    there = zigzag.zigzag(T, n)

    def one(q: Any, k: Any, v: Any) -> jax.Array:
        parts = [ops.Part(k, v, position)]
        mask = document_mask(position, parts, document, window=9)
        return attend_with_mask(q, parts, mask, scale=SCALE, cap=1.5)

    def attend(q: Any, k: Any, v: Any, at: Any, of: Any) -> jax.Array:
        rules: Any = {"axis": AXIS, "scale": SCALE, "window": 9, "cap": 1.5, "document_BT": of}
        return ring.attend(q, at, ops.Part(k, v, at), **rules)[0]

    split = jax.shard_map(attend, mesh=mesh_of(n), in_specs=(SPLIT,) * 5, out_specs=SPLIT)

    def ring_documents(q: Any, k: Any, v: Any) -> jax.Array:
        given = (q, k, v, position, document)
        return split(*(x[:, there] for x in given))[:, np.argsort(there)]

    check_outputs_and_gradients(ring_documents, one, q, k, v)


@pytest.mark.parametrize("dtype", first([("float32",), ("int8",)]))
def test_split_cache_attention_equals_single_device(dtype: str) -> None:
    """New tokens attend to a split cache and to a replicated segment, in prefill (pass-Q) and in
    decoding.
    """
    q, k, v, position = text(16, ragged=False)
    _, old_k, old_v, old = text(24, seed=1)
    kept = [ops.cast(jnp.where((old >= 0)[..., None, None], x, 0.0), jnp.dtype(dtype))
            for x in (old_k, old_v)]  # fmt: skip
    cached = ops.Part(*kept, old)
    _, own_k, own_v, own = text(5, ragged=False, seed=2)
    shared, at = ops.Part(own_k[:1], own_v[:1], own[:1] + 27), position + 32
    new, rules = ops.Part(k, v, at), {"scale": SCALE, "window": 31}
    want = ops.attend(q, at, [cached, shared, new], **rules)[0]

    def split(q: Any, at: Any, cached: Any, shared: Any, new: Any) -> jax.Array:
        """Attend from split new tokens to the cache and, by a ring, to each other."""
        before = [cached, split_cache.keep_on_first(shared, AXIS)]
        found = [
            split_cache.attend_pass_q(Queries.from_heads(q, at, before, **rules), before, AXIS),
            ring.attend(q, at, new, axis=AXIS, **rules),
        ]
        return split_cache.combine_outputs(found)

    specs = (SPLIT, SPLIT, SPLIT, WHOLE, SPLIT)
    over = jax.shard_map(split, mesh=mesh_of(4), in_specs=specs, out_specs=SPLIT)
    assert relative_error(jax.jit(over)(q, at, cached, shared, new), want) < 1e-5

    def decode(q: Any, at: Any, cached: Any, shared: Any, new: Any) -> jax.Array:
        parts = [cached, *(split_cache.keep_on_first(part, AXIS) for part in (shared, new))]
        return split_cache.attend(Queries.from_heads(q, at, parts, **rules), parts, AXIS)

    specs = (WHOLE, WHOLE, SPLIT, WHOLE, WHOLE)
    merged = jax.shard_map(decode, mesh=mesh_of(4), in_specs=specs, out_specs=WHOLE)
    few = jax.tree.map(lambda x: x[:, :3], (q, at, new))
    want = ops.attend(*few[:2], [cached, shared, few[2]], **rules)[0]
    found = jax.jit(merged)(*few[:2], cached, shared, few[2])
    assert relative_error(found, want) < 1e-5


@pytest.mark.full
def test_combined_outputs_have_single_device_gradient() -> None:
    """Combining split-cache and ring outputs keeps all gradients, also of cached keys and values,
    as for prefix tuning.
    """
    q, k, v, position = text(16, ragged=False)
    _, old_k, old_v, old = text(8, ragged=False, seed=1)

    def one(q: Any, k: Any, v: Any, old_k: Any, old_v: Any) -> jax.Array:
        parts = [ops.Part(old_k, old_v, old), ops.Part(k, v, position + 8)]
        return ops.attend(q, position + 8, parts, scale=SCALE, window=None)[0]

    def split(q: Any, k: Any, v: Any, old_k: Any, old_v: Any, old: Any, at: Any) -> jax.Array:
        cached, new = [ops.Part(old_k, old_v, old)], ops.Part(k, v, at)
        rules: Any = {"scale": SCALE, "window": None}
        before = split_cache.attend_pass_q(Queries.from_heads(q, at, cached, **rules), cached, AXIS)
        return split_cache.combine_outputs([before, ring.attend(q, at, new, axis=AXIS, **rules)])

    over = jax.shard_map(split, mesh=mesh_of(2), in_specs=SPLIT, out_specs=SPLIT)

    def two(*given: Any) -> jax.Array:
        return over(*given, old, position + 8)

    check_outputs_and_gradients(two, one, q, k, v, old_k, old_v)


@pytest.mark.parametrize(
    "devices, queries, keys", first([(4, 8, 2), (2, 6, 2), (3, 6, 3), (8, 8, 1)])
)
def test_ulysses_equals_single_device(devices: int, queries: int, keys: int) -> None:
    """All-to-all between tokens and heads gives the outputs and gradients of one device."""
    T = 24
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.float32)
        for heads in (queries, keys, keys)
    )
    position = text(T)[3]
    ulysses.check_heads(queries, keys, devices)

    def attend(q: Any, k: Any, v: Any, at: Any) -> jax.Array:
        q, k, v = ulysses.to_heads((q, k, v), AXIS)
        return ulysses.to_tokens(dense(q, k, v, ulysses.gather_tokens(at, AXIS), window=9), AXIS)

    split = jax.shard_map(attend, mesh=mesh_of(devices), in_specs=(SPLIT,) * 4, out_specs=SPLIT)

    one = partial(dense, window=9)
    check_outputs_and_gradients(
        lambda *x: split(*x, position), lambda *x: one(*x, position), q, k, v
    )


def test_ulysses_refuses_indivisible_heads() -> None:
    with pytest.raises(ConfigError, match=r"6 query heads and 2 key heads .* 4 devices"):
        ulysses.check_heads(6, 2, 4)
    with pytest.raises(ConfigError, match=r"12 query heads and 4 key heads .* 6 devices"):
        ulysses.check_heads(12, 4, 6)


def test_zigzag_pairs_early_and_late_chunks() -> None:
    """Zigzag order gives each device one early and one late chunk; lengths must be a multiple of
    2n.
    """
    assert zigzag.zigzag(12, 3).reshape(3, 4).tolist() == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]
    assert [zigzag.pad_length(T, 3) for T in (1, 6, 7)] == [6, 6, 12]
    with pytest.raises(ConfigError, match=r"multiple of 6 .*, got 13. Pad them to 18"):
        zigzag.zigzag(13, 3)


@pytest.mark.parametrize("n", first([(3,), (1,), (8,)]))
def test_zigzag_exchange_round_trip_takes_two_permutes(n: int) -> None:
    """to_zigzag and to_plain are inverse, and to_zigzag takes two collective permutes."""
    x = jnp.arange(2 * 4 * n * 3).reshape(2, 4 * n, 3)
    over = partial(jax.shard_map, mesh=mesh_of(n), in_specs=SPLIT, out_specs=SPLIT)
    there = jax.jit(over(partial(zigzag.to_zigzag, axis=AXIS)))
    assert (there(x) == x[:, zigzag.zigzag(4 * n, n)]).all()
    assert (jax.jit(over(partial(zigzag.to_plain, axis=AXIS)))(there(x)) == x).all()
    assert there.lower(x).as_text().count("collective_permute") == 2


def count_ppermutes(jaxpr: Any, times: int = 1) -> int:
    """Return the number of ppermutes that a program runs, counting loop iterations."""
    total = 0
    for equation in jaxpr.eqns:
        often = times * equation.params.get("length", 1)
        total += often * (equation.primitive.name == "ppermute")
        total += sum(count_ppermutes(inner, often) for inner in jaxprs_in_params(equation.params))
    return total


@pytest.mark.parametrize("n", [2, 8])
def test_ring_communication_count(n: int) -> None:
    """Keys, values and positions are sent n - 1 times; the gradient repeats this and returns 2n
    cotangents.
    """
    q, k, v, position = text(48)
    attend = ring_attention(n, 48, window=None)
    assert count_ppermutes(jax.make_jaxpr(attend)(q, k, v, position).jaxpr) == 3 * (n - 1)

    def loss(q: jax.Array) -> jax.Array:
        return (attend(q, k, v, position) ** 2).sum()

    both = 3 * (n - 1) + 3 * (n - 1) + 2 * n
    assert count_ppermutes(jax.make_jaxpr(jax.grad(loss))(q).jaxpr) == both


@pytest.mark.parametrize("n", first([(2,), (4,)]))
def test_ring_balances_chunk_pairs(n: int, monkeypatch: pytest.MonkeyPatch, afresh: None) -> None:
    """The ring computes n (2n + 1) causal pairs of chunks; a window skips the pairs outside it."""
    absorb, met = ring.absorb, []

    def counted(state: Any, queries: Any, *given: Any) -> Any:
        first = queries.position_BT.min()
        jax.debug.callback(lambda first: met.append(int(first)), first)
        return absorb(state, queries, *given)

    monkeypatch.setattr(ring, "absorb", counted)
    given = text(8 * n, ragged=False)
    jax.block_until_ready(jax.jit(ring_attention(n, 8 * n, window=None))(*given))
    jax.effects_barrier()
    assert len(met) == n * (2 * n + 1)
    # A chunk attends to itself and to all earlier chunks.
    assert [met.count(4 * chunk) for chunk in range(2 * n)] == [c + 1 for c in range(2 * n)]
    # Chunks of 4: the first query is 5 tokens after the end of the chunk before the previous one.
    for window, counts in ((5, [1, *[2] * (2 * n - 1)]), (6, [1, 2, *[3] * (2 * n - 2)])):
        met.clear()
        jax.block_until_ready(jax.jit(ring_attention(n, 8 * n, window=window))(*given))
        jax.effects_barrier()
        assert [met.count(4 * chunk) for chunk in range(2 * n)] == counts


def test_ring_skips_future_chunks() -> None:
    """The last chunk's values are NaN, which would reach every output even with zero weights."""
    q, k, v, position = text(48, ragged=False)
    v = v.at[:, 42:].set(jnp.nan)
    found = jax.jit(ring_attention(4, 48, window=None))(q, k, v, position)
    want = dense(q[:, :42], k[:, :42], v[:, :42], position[:, :42], window=None)
    assert relative_error(found[:, :42], want) < 1e-5


def test_ring_never_holds_full_sequence() -> None:
    """The compiled program, gradient included, has no full score matrix and no all-gather."""
    T, n, H = 8192, 8, 64
    form = {heads: jax.ShapeDtypeStruct((1, T, heads, H), jnp.float32) for heads in (2, 1)}
    there = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def attend(q: Any, k: Any, v: Any, at: Any) -> jax.Array:
        rules: Any = {"axis": AXIS, "scale": SCALE, "window": None}
        return (ring.attend(q, at, ops.Part(k, v, at), **rules)[0] ** 2).sum()[None]

    split = jax.shard_map(attend, mesh=mesh_of(n), in_specs=(SPLIT,) * 4, out_specs=jax.P(AXIS))
    program = jax.jit(jax.grad(lambda *given: split(*given).sum(), (0, 1, 2)))
    sharding = jax.NamedSharding(mesh_of(n), SPLIT)
    given = [x.update(sharding=sharding) for x in (form[2], form[1], form[1], there)]
    compiled = program.lower(*given).compile()
    arrays = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in arrays)
    assert largest == 2 * (T // n // 2) * 256  # scores of half the queries and one block of slots
    assert largest < T * H
    assert "all-gather" not in compiled.as_text()
