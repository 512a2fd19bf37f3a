"""KV caches: repr, text, equality, int8 entries, gradients, vmap and transfers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.cache import branch, drop_range, fork, rewind, shift
from jaxllm.cache.kv import cache_nbytes
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError
from jaxllm.generation.sampling.truncation import Temperature
from jaxllm.models import build
from jaxllm.ops import Int8Entries, cast, dequantize
from jaxllm.ops.slot_update import update_window
from jaxllm.weights.precision import Precision
from tests.cache.caches import close, filled, fresh, lm_of, peek
from tests.tiny_models import random_model, tokens


@pytest.fixture(scope="module")
def lm() -> Any:
    return random_model("llama")


def test_repr_describes_cache_without_numbers(lm: Any) -> None:
    """A cache prints its model, format and sizes, never its values, also when traced or donated."""
    cache = filled(lm, tokens(2, 9))
    assert repr(cache) == (
        "KVCache(llama, 2 layers, float32: 2 rows of 9, 9 tokens, 0 frozen segments,"
        " tail 9/24, 10 kB)"
    )
    forks = fork(filled(lm, tokens(1, 9)), 20, capacity=3)
    assert "20 rows of 9, 9, 9, 9, 9, 9, 9, 9, ... tokens, 1 frozen segment, tail 0/3" in repr(
        forks
    )
    seen: list[str] = []
    jax.eval_shape(lambda c: seen.append(repr(c)), cache)
    assert seen == ["KVCache(llama, 2 layers, float32: 2 rows, capacity 24, traced)"]
    jaxllm.decode_step(*lm, cache, [1, 2], donate=True)
    assert repr(cache) == "KVCache(llama, 2 layers, float32: 2 rows, capacity 24, donated)"


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def test_show_marks_culled_and_patched_tokens(lm: Any) -> None:
    cache = filled(lm, np.array([range(9), range(10, 19)]))
    assert cache.show(Letters()) == ("abcdefghi", "klmnopqrs")
    culled = drop_range(cache, [0, 2], [1, 5])
    shown = jaxllm.recompute(*lm, culled, 5, 7).show(Letters())
    assert str(shown) == repr(shown) == "[-a-]bcde{+fg+}hi\nkl[-mno-]{+pq+}rs"
    assert "<del>a</del>bcde<ins>fg</ins>hi" in shown._repr_html_()
    moved = shift(drop_range(cache, 2, 4), -2, start=4)  # shifted tokens follow the gap
    assert moved.show(Letters())[0] == "ab[-cd-]efghi"
    put = jaxllm.insert(*lm, drop_range(cache, 2, 4), 5, [[25], [25]])
    assert put.show(Letters())[0] == "ab[-cd-]ezfghi"
    assert rewind(drop_range(cache, 6, 8), to=7).show(Letters())[0] == "abcdef[-g-]"


def test_caches_with_equal_contents_are_equal(lm: Any) -> None:
    """Equality compares tokens, positions and entries; the contents of empty slots are ignored."""
    cache = filled(lm, np.array([range(9), range(10, 19)]))
    assert cache == filled(lm, np.array([range(9), range(10, 19)]))
    assert cache != filled(lm, np.array([range(9), range(11, 20)]))
    assert cache != drop_range(cache, 2, 3)
    assert cache != "cache"
    longer = jaxllm.decode_step(*lm, cache, [1, 2]).cache
    assert longer != cache
    assert rewind(longer, 1) == cache  # contents of empty slots are ignored
    assert fork(branch(cache, 0), 2, capacity=3) == fork(branch(cache, 0), 2, capacity=3)


def test_init_cache_validates_sizes_and_dtype(lm: Any) -> None:
    """Invalid or too large sizes are refused before allocation; the dtype is the model's."""
    model, _ = lm
    for sizes in ((1, 2.5), (1, 2**50), (2**40, 1), (True, 4), (1, "8"), (1, 0), (2**20, 2**30)):
        with pytest.raises(CapacityError, match=r"whole number from 1|needs"):
            jaxllm.init_cache(model.config, *sizes)
    assert jaxllm.init_cache(model.config, np.int64(1), np.int32(8)).capacity == 8
    half = build(model.config, Precision.uniform("float16"))
    assert jaxllm.init_cache(half, 1, 8).dtype == "float16"
    assert jaxllm.init_cache(half, 1, 8, dtype="int8").dtype == "int8"
    assert jaxllm.init_cache(model.config, 1, 8).dtype == "float32"
    for format_ in ("float32", "bfloat16", "int8"):
        cache = jaxllm.init_cache(model.config, 3, 8, dtype=format_)
        assert abs(cache_nbytes(model.config, 3, 8, format_) - cache.nbytes) < 32
    with pytest.raises(ConfigError, match="a model or its configuration"):
        jaxllm.init_cache("llama", 1, 8)  # type: ignore[arg-type]


def test_tokens_are_returned_in_position_order(lm: Any) -> None:
    """tokens() returns a row's tokens by position, after drops, insertions and left padding."""
    model, params = lm
    ids = tokens(2, 9)
    cache = filled(lm, ids)
    assert cache.tokens(1) == ids[1].tolist()
    assert drop_range(cache, 3, 6).tokens(1) == [*ids[1, :3], *ids[1, 6:]]
    assert jaxllm.insert(model, params, cache, 4, [[1], [2]]).tokens(1) == [
        *ids[1, :4],
        2,
        *ids[1, 4:],
    ]
    _, left = jaxllm.prefill(
        model,
        params,
        jaxllm.init_cache(model.config, 1, 8),
        [[0, 0, 5, 6]],
        positions_BT=[[-1, -1, 0, 1]],
    )
    assert left.tokens() == [5, 6]


def test_cache_of_another_model_is_refused(lm: Any) -> None:
    """A cache of another configuration is refused with the field; unknown formats are refused."""
    model, params = lm
    other, _ = random_model("llama", max_position_embeddings=64)
    cache = jaxllm.init_cache(other.config, 1, 8)
    with pytest.raises(CacheMismatchError, match=r"max_position_embeddings is 64, expected 97"):
        jaxllm.forward(model, params, cache, [[1]])
    with pytest.raises(ConfigError, match="int8"):
        jaxllm.init_cache(model.config, 1, 8, dtype="int4")
    with pytest.raises(ConfigError, match="cache must be one of"):
        Precision(cache="int4")
    with pytest.raises(ConfigError, match="weights must be one of float32, bfloat16, float16 "):
        Precision(weights="int8")


def test_int8_entries_round_to_half_step() -> None:
    """Int8 entries are within half a step, keep NaN, and rounding twice changes nothing."""
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 8)).astype(np.float32)
    x[0, 1] = 0
    entries = cast(jnp.asarray(x), jnp.int8)
    assert isinstance(entries, Int8Entries)
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    assert (np.abs(np.asarray(dequantize(entries)) - x) <= 0.5001 * step).all()
    assert np.abs(np.asarray(entries.value)).max(axis=-1)[1].min() == 127
    assert cast(entries, jnp.dtype(jnp.int8)) is entries
    again = cast(cast(entries, jnp.float32), jnp.int8)  # rounding is idempotent
    np.testing.assert_array_equal(again.value, entries.value)
    x[1, 2, 1, 3] = np.nan
    assert np.isnan(np.asarray(dequantize(cast(jnp.asarray(x), jnp.int8)))[1, 2, 1]).all()


def test_int8_cache_is_small_and_close_to_float32() -> None:
    lm8, lm32 = lm_of(("llama", "int8")), lm_of(("llama", "float32"))
    model, _ = lm32
    int8, float32 = filled(lm8, tokens(2, 9)), filled(lm32, tokens(2, 9))
    heads, H = model.config.num_key_value_heads, model.config.head_dim
    per_token = 2 * model.config.num_hidden_layers * heads * (H + 4)
    k, v = int8.tail.k, int8.tail.v
    assert sum(x.nbytes for x in jax.tree.leaves((k, v))) == 2 * 24 * per_token
    exact = peek(lm32, float32)
    assert 0 < np.abs(peek(lm8, int8) - exact).max() < 0.05 * np.abs(exact).max()


def test_gradients_of_cache_entries_match_finite_differences(lm: Any) -> None:
    """Gradients of single keys and values equal finite differences; empty slots have none."""
    cache = filled(lm, tokens(1, 9))

    def loss(k: Any, v: Any) -> jax.Array:
        changed = cache.replace(tail=cache.tail.replace(k=k, v=v))
        logits = jaxllm.forward(*lm, changed, [[7]]).logits[0, -1]
        return -jax.nn.log_softmax(logits)[3]

    k, v = cache.tail.k, cache.tail.v
    by_k, by_v = jax.jit(jax.grad(loss, argnums=(0, 1)))(k, v)
    value = jax.jit(loss)
    for gradient, entries, other in ((by_k, k, False), (by_v, v, True)):
        for layer, at in ((0, (0, 2, 1, 3)), (1, (0, 8, 0, 5)), (1, (0, 0, 1, 0))):
            step = 1e-2

            def moved(by: float, entries: Any = entries, layer: int = layer, at: Any = at) -> Any:
                return tuple(x.at[at].add(by) if i == layer else x for i, x in enumerate(entries))

            ends = [value(k, moved(d)) if other else value(moved(d), v) for d in (step, -step)]
            expected = (float(ends[0]) - float(ends[1])) / (2 * step)
            assert abs(float(gradient[layer][at]) - expected) < 2e-3 + 0.02 * abs(expected)
        assert not np.asarray(gradient[0])[0, 9:].any()  # empty slots have no influence


def test_vmap_over_caches_equals_single_caches(lm: Any) -> None:
    caches = [filled(lm, tokens(1, 9, seed=s)) for s in range(3)]
    stack = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    out = jax.vmap(lambda c: jaxllm.forward(*lm, c, jnp.array([[7]])))(stack)
    _, stepped = jax.vmap(lambda c: jaxllm.decode_step(*lm, c, jnp.array([7])))(stack)
    for i, cache in enumerate(caches):
        close(out.logits[i, :, 0], peek(lm, cache))
        one = jax.tree.map(lambda x, i=i: x[i], stepped)
        close(peek(lm, one)[0], fresh(lm, [*tokens(1, 9, seed=i)[0], 7]))


def test_sampling_parameters_vmap_over_one_prefix(lm: Any) -> None:
    """Sampling mapped over temperatures and keys equals separate calls, and higher temperatures
    give more distinct tokens.
    """
    cache = filled(lm, tokens(1, 9))
    logits_BV = jaxllm.forward(*lm, cache, [[7]]).logits[:, 0]
    temperatures = jnp.array([0.2, 0.7, 1.5])

    def draw(temperature: jax.Array, key: jax.Array) -> jax.Array:
        sampler = jaxllm.make_sampler().replace(processors=(Temperature(temperature),))
        return jaxllm.sample(key, logits_BV, sampler)[0]

    key_N = jax.random.split(jax.random.key(0), 64)
    mapped = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(temperatures, key_N)
    single = [[int(draw(t, key)) for key in key_N[:4]] for t in temperatures]
    assert mapped[:, :4].tolist() == single
    assert len(set(mapped[0].tolist())) < len(set(mapped[2].tolist()))


def test_cache_survives_scan_and_device_transfer(lm: Any) -> None:
    cache = filled(lm, tokens(1, 4))

    def step(cache: Any, token: jax.Array) -> tuple[Any, None]:
        return jaxllm.decode_step(*lm, cache, token[None]).cache, None

    there = jax.device_put(jax.device_get(cache))
    scanned, _ = jax.lax.scan(step, there, jnp.asarray(tokens(1, 9)[0, 4:], jnp.int32))
    close(peek(lm, scanned)[0], fresh(lm, [*tokens(1, 4)[0], *tokens(1, 9)[0, 4:]]))


@pytest.mark.parametrize("width", [1, 3, 6, 9])
def test_writes_past_capacity_change_nothing(width: int) -> None:
    """Window writes equal slot-by-slot writes for every cursor, also past the end."""
    old, new = np.arange(12.0).reshape(2, 6), -np.arange(1.0, 2 * width + 1).reshape(2, width)
    for cursor in range(9):
        expected = old.copy()
        for i in range(width):
            if cursor + i < 6:
                expected[:, cursor + i] = new[:, i]
        found = update_window(jnp.asarray(old), jnp.asarray(new), jnp.int32(cursor))
        assert (np.asarray(found) == expected).all(), cursor
