"""Steps: every way to run a sequence gives equal logits, and reading never modifies a cache."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.models import layers, run_blocks
from jaxllm.models.compiled_steps import run_and_commit
from tests.tiny_models import BOTH, VOCAB, in_both, random_model, tokens

TOLERANCE = 1e-5  # float32, between our own programs with different shapes


@pytest.fixture(scope="module", params=BOTH)
def lm(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


def close(a: Any, b: Any) -> None:
    scale = max(1.0, float(jnp.abs(b).max()))
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=TOLERANCE * scale, rtol=0)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def filled(lm: Any, ids: np.ndarray, capacity: int = 40) -> jaxllm.KVCache:
    model, params = lm
    cache = jaxllm.init_cache(model.config, ids.shape[0], capacity)
    return jaxllm.prefill(model, params, cache, ids).cache


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("gpt2", 1), ("gemma2", 2)])
def test_layers_of_one_kind_share_trace(
    family: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program traces one layer of each kind, and has the bits of one that traces all."""
    model, params = random_model(family, num_hidden_layers=4, n_layer=4)
    ids, at = tokens(2, 5), np.tile(np.arange(5), (2, 1))
    cache = jaxllm.init_cache(model.config, 2, 8)
    count = []
    module = importlib.import_module(type(model).block.__module__)
    attend = layers.attend
    for place in {module, importlib.import_module("jaxllm.models.decoder_block")}:
        monkeypatch.setattr(place, "attend", lambda *a, **k: count.append(1) or attend(*a, **k))

    def run() -> tuple[int, list[bytes]]:
        count.clear()
        step = jax.jit(lambda *args: run_and_commit(model, args[0], (), *args[1:]))
        out = step(params, cache, ids, at)
        return len(count), bits((out.logits, out.cache.tail.k, out.cache.tail.v))

    shared = run()
    monkeypatch.setattr(run_blocks, "_can_share", lambda *_: False)
    assert run() == (4, shared[1])
    assert shared[0] == kinds


@in_both("lm", chunk=[5, 1, 2, 23, 300])
def test_chunked_prefill_equals_uncached_forward(lm: Any, chunk: int) -> None:
    model, params = lm
    ids = tokens(2, 23)
    whole = jaxllm.forward(model, params, None, ids).logits
    cache = jaxllm.init_cache(model.config, 2, 23)
    logits, cache = jaxllm.prefill(model, params, cache, ids, chunk=chunk)
    close(logits, whole[:, -1])
    assert cache.length_B.tolist() == [23, 23]
    assert np.asarray(cache.tail.token_BS).tolist() == ids.tolist()


def test_prefill_across_attention_blocks_equals_uncached_forward() -> None:
    model, params = random_model("llama", max_position_embeddings=1024)
    ids = tokens(2, 700)
    whole = jaxllm.forward(model, params, None, ids).logits
    cache = jaxllm.init_cache(model.config, 2, 900)
    logits, cache = jaxllm.prefill(model, params, cache, ids[:, :690], chunk=200)
    close(logits, whole[:, 689])
    for column in range(690, 700):
        logits, cache = jaxllm.decode_step(model, params, cache, ids[:, column], donate=True)
        close(logits, whole[:, column])


@in_both("lm", side=["left", "right", "both", "scattered"])
def test_prefill_padded_rows_equal_single_rows(lm: Any, side: str) -> None:
    """With padding on any side or scattered, prefill and the next decode step equal forward on each
    row without padding.
    """
    model, params = lm
    lengths, width = [5, 11, 1], 13
    ids = tokens(3, width)
    positions = np.full((3, width), -1)
    rng = np.random.default_rng(0)
    for row, length in enumerate(lengths):
        where = {
            "left": np.arange(width - length, width),
            "right": np.arange(length),
            "both": np.arange(length) + 1,
            "scattered": np.sort(rng.choice(width, length, replace=False)),
        }[side]
        positions[row, where] = np.arange(length)
    cache = jaxllm.init_cache(model.config, 3, 20)
    logits, cache = jaxllm.prefill(model, params, cache, ids, positions_BT=positions, chunk=4)
    assert cache.length_B.tolist() == lengths
    assert cache.next_position_B.tolist() == lengths
    after, _ = jaxllm.decode_step(model, params, cache, np.array([3, 1, 4]))
    for row, token in enumerate([3, 1, 4]):
        single = ids[row][positions[row] >= 0][None]
        close(logits[row], jaxllm.forward(model, params, None, single).logits[0, -1])
        longer = np.append(single, [[token]], axis=1)
        close(after[row], jaxllm.forward(model, params, None, longer).logits[0, -1])


def test_prefill_trailing_padding_takes_no_slots(lm: Any) -> None:
    model, params = lm
    cache = jaxllm.init_cache(model.config, 2, 8)
    ids = tokens(2, 13)
    _, cache = jaxllm.prefill(model, params, cache, ids, lengths_B=np.array([6, 8]), chunk=5)
    assert int(cache.cursor) == 8  # the widest row, not the padded width of 15


def test_steps_leave_input_cache_bytes_unchanged(lm: Any) -> None:
    """forward, decode_step, prefill and generate leave bytes and buffers of their cache alone."""
    model, params = lm
    cache = filled(lm, tokens(2, 9))
    before = bits(cache)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    first = jaxllm.forward(model, params, cache, tokens(2, 4, seed=1))
    again = jaxllm.forward(model, params, cache, tokens(2, 4, seed=1))
    assert bits(first.logits) == bits(again.logits)
    jaxllm.decode_step(model, params, cache, np.array([1, 2]))
    jaxllm.prefill(model, params, cache, tokens(2, 6))
    jaxllm.generate(model, params, tokens(2, 3), max_new_tokens=4, cache=cache)
    assert bits(cache) == before
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)] == pointers


def test_forward_copies_no_cache(lm: Any) -> None:
    """A compiled program's temporary memory is that of blocks, whatever the cache's size."""
    model, params = lm
    ids, positions = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 7, jnp.int32)

    @jax.jit
    def step(params: Any, cache: jaxllm.KVCache) -> Any:
        return jaxllm.forward(model, params, cache, ids, positions_BT=positions)

    def temporary(capacity: int) -> int:
        cache = jaxllm.init_cache(model.config, 1, capacity)
        return step.lower(params, cache).compile().memory_analysis().temp_size_in_bytes

    config, more = model.config, (1 << 16) - (1 << 12)
    cache_grows_by = 2 * 4 * more * config.num_key_value_heads * config.head_dim  # one layer's
    assert temporary(1 << 16) - temporary(1 << 12) < 0.01 * cache_grows_by


def test_forward_then_commit_equals_decode_step(lm: Any) -> None:
    model, params = lm
    cache = filled(lm, tokens(2, 9))
    out = jaxllm.forward(model, params, cache, np.array([[3], [4]]))
    logits, stepped = jaxllm.decode_step(model, params, cache, np.array([3, 4]))
    close(out.logits[:, 0], logits)
    committed = jaxllm.commit(cache, out.delta)
    close(
        jaxllm.forward(model, params, committed, np.array([[5], [6]])).logits,
        jaxllm.forward(model, params, stepped, np.array([[5], [6]])).logits,
    )


def test_donated_commit_reuses_buffers_and_invalidates_cache(lm: Any) -> None:
    """A donated commit keeps the buffers; using the old cache raises an error that names it."""
    model, params = lm
    cache = filled(lm, tokens(2, 9))
    delta = jaxllm.forward(model, params, cache, np.array([[3], [4]])).delta
    pointers = [x.unsafe_buffer_pointer() for x in (*cache.tail.k, *cache.tail.v)]
    grown = jaxllm.commit(cache, delta, donate=True)
    assert [x.unsafe_buffer_pointer() for x in (*grown.tail.k, *grown.tail.v)] == pointers
    for use in (
        lambda: jaxllm.forward(model, params, cache, np.array([[3], [4]])),
        lambda: jaxllm.commit(cache, delta),
        lambda: jaxllm.decode_step(model, params, cache, np.array([3, 4])),
    ):
        with pytest.raises(CacheMismatchError, match="donated"):
            use()


def test_nan_in_empty_slots_changes_no_bit(lm: Any) -> None:
    model, params = lm
    cache = filled(lm, tokens(2, 9), capacity=600)
    empty = (cache.tail.position_BS < 0)[:, :, None, None]
    dirty = cache.replace(
        tail=cache.tail.replace(
            k=tuple(jnp.where(empty, jnp.nan, k) for k in cache.tail.k),
            v=tuple(jnp.where(empty, jnp.nan, v) for v in cache.tail.v),
        )
    )
    token_B = np.array([3, 4])
    clean_logits, _ = jaxllm.decode_step(model, params, cache, token_B)
    dirty_logits, _ = jaxllm.decode_step(model, params, dirty, token_B)
    assert bits(clean_logits) == bits(dirty_logits)


def test_forward_gradient_is_causal(lm: Any) -> None:
    """A position's hidden state has gradients to all embeddings up to it, and to none after it."""
    model, params = lm
    table = "embed_tokens" if "embed_tokens" in params else "wte"
    ids = np.arange(12)[None]  # distinct tokens, so that each table row corresponds to one position
    direction = np.random.default_rng(0).standard_normal(model.config.hidden_size)

    def state(embedding: jax.Array, column: int) -> jax.Array:
        changed = {**params, table: {"weight": embedding}}
        out = jaxllm.forward(model, changed, None, ids, hidden_states=True)
        assert out.hidden_states is not None  # not the logits: a tied head depends on every row
        return out.hidden_states[-1][0, column] @ jnp.asarray(direction, jnp.float32)

    for column in (0, 4, 11):
        gradient = jax.grad(state)(params[table]["weight"], column)
        moved = np.abs(np.asarray(gradient)).max(axis=1) > 0
        assert moved.tolist() == [i <= column for i in range(VOCAB)]


def test_forward_permuting_rows_permutes_logits(lm: Any) -> None:
    model, params = lm
    ids = tokens(3, 8)
    rows = jaxllm.forward(model, params, None, ids).logits
    permuted = jaxllm.forward(model, params, None, ids[[2, 0, 1]]).logits
    assert bits(permuted) == bits(rows[jnp.array([2, 0, 1])])


def test_full_cache_refuses_tokens_and_overwrites_nothing(lm: Any) -> None:
    """prefill, generate, commit and decode_step refuse tokens beyond the capacity; only the padding
    of a chunk may exceed it.
    """
    model, params = lm
    ids = tokens(1, 10)
    cache = filled(lm, ids, capacity=12)
    before = bits(cache)
    with pytest.raises(CapacityError, match="3 more tokens do not fit: 10 of the cache's 12"):
        jaxllm.prefill(model, params, cache, tokens(1, 3), chunk=2)
    with pytest.raises(CapacityError, match="do not fit"):
        jaxllm.generate(model, params, tokens(1, 1), max_new_tokens=3, cache=cache)
    with pytest.raises(CapacityError, match="3 more tokens"):
        jaxllm.commit(cache, jaxllm.forward(model, params, cache, tokens(1, 3)).delta)
    assert bits(cache) == before
    # A last chunk fits if only its padding exceeds the capacity.
    _, full = jaxllm.prefill(model, params, cache, tokens(1, 2), chunk=8)
    assert np.asarray(full.tail.token_BS)[0].tolist() == [*ids[0], *tokens(1, 2)[0]]
    assert bits(full.tail.k[0][:, :10]) == bits(cache.tail.k[0][:, :10])
    with pytest.raises(CapacityError, match="1 more tokens do not fit: 12 of the cache's 12"):
        jaxllm.decode_step(model, params, full, np.array([1]))


def test_overflow_inside_jit_drops_tokens_and_is_detected(lm: Any) -> None:
    """Inside jit, overflowing tokens are dropped without overwriting others, and the next call
    outside jit raises an error.
    """
    model, params = lm
    cache = filled(lm, tokens(1, 10), capacity=11)

    @jax.jit
    def three_steps(params: Any, cache: jaxllm.KVCache) -> jaxllm.KVCache:
        for _ in range(3):
            _, cache = jaxllm.decode_step(model, params, cache, jnp.array([1]))
        return cache

    after = three_steps(params, cache)
    assert bits(after.tail.k[0][:, :10]) == bits(cache.tail.k[0][:, :10])
    with pytest.raises(CapacityError, match="the last 2 were dropped"):
        jaxllm.forward(model, params, after, tokens(1, 1))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_steps_refuse_out_of_range_token_ids(lm: Any, token: int) -> None:
    """Out-of-range ids raise TokenError; inside jit they give NaN logits in their own row only."""
    model, params = lm
    cache = filled(lm, tokens(2, 3))
    ids = np.array([[5, 6], [5, token]])
    with pytest.raises(TokenError, match=rf"token id {token} .* vocabulary of {VOCAB}"):
        jaxllm.forward(model, params, None, ids)
    with pytest.raises(TokenError, match="token id"):
        jaxllm.prefill(model, params, cache, ids)
    with pytest.raises(TokenError, match="token id"):
        jaxllm.decode_step(model, params, cache, np.array([5, token]))
    with pytest.raises(TokenError, match="token id"):
        jaxllm.generate(model, params, ids, max_new_tokens=2)
    # jit cannot raise: the row becomes NaN rather than the logits of another token.
    logits = jax.jit(lambda p, t: jaxllm.forward(model, p, None, t).logits)(params, ids)
    assert np.isnan(np.asarray(logits)[1, 1]).all()
    assert not np.isnan(np.asarray(logits)[0]).any()


def test_steps_refuse_out_of_range_positions() -> None:
    model, params = random_model("gpt2")
    with pytest.raises(TokenError, match="position 97 is out of range"):
        jaxllm.forward(model, params, None, tokens(1, 98))
    with pytest.raises(TokenError, match="position -2"):
        jaxllm.forward(model, params, None, tokens(1, 1), positions_BT=np.array([[-2]]))
    with pytest.raises(CapacityError, match="97 positions"):
        jaxllm.generate(model, params, tokens(1, 90), max_new_tokens=9)
    jaxllm.generate(model, params, tokens(1, 90), max_new_tokens=8)  # the last is not run


def test_steps_refuse_wrong_shapes_and_mismatched_caches(lm: Any) -> None:
    model, params = lm
    cache = filled(lm, tokens(2, 3))
    with pytest.raises(TokenError, match=r"\[B, T\]"):
        jaxllm.forward(model, params, None, np.array([1, 2]))
    with pytest.raises(TokenError, match="integers"):
        jaxllm.forward(model, params, None, np.array([[1.5]]))
    with pytest.raises(TokenError, match="lengths"):
        jaxllm.prefill(model, params, cache, tokens(2, 3), lengths_B=np.array([0, 3]))
    with pytest.raises(CacheMismatchError, match="2 rows, the tokens have 1"):
        jaxllm.forward(model, params, cache, tokens(1, 1))
    other, _ = random_model("llama", num_hidden_layers=3)
    with pytest.raises(CacheMismatchError, match="another model"):
        foreign = jaxllm.init_cache(other.config, 2, 8)
        jaxllm.forward(model, params, foreign, tokens(2, 1))


def test_steps_run_under_jit_vmap_and_grad(lm: Any) -> None:
    model, params = lm
    cache = filled(lm, tokens(2, 5))
    plain, _ = jaxllm.decode_step(model, params, cache, np.array([1, 2]))
    compiled, _ = jax.jit(lambda p, c, t: jaxllm.decode_step(model, p, c, t))(
        params, cache, jnp.array([1, 2])
    )
    close(compiled, plain)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    mapped, _ = jax.vmap(lambda c, t: jaxllm.decode_step(model, params, c, t))(
        stacked, jnp.array([[1, 2], [3, 4]])
    )
    close(mapped[0], plain)

    def loss(v: jax.Array) -> jax.Array:
        changed = cache.replace(tail=cache.tail.replace(v=(v, *cache.tail.v[1:])))
        return jaxllm.forward(model, params, changed, np.array([[1], [2]])).logits[0, 0, 7]

    def step_loss(v: jax.Array) -> tuple[jax.Array, jaxllm.StepOutput]:
        changed = cache.replace(tail=cache.tail.replace(v=(v, *cache.tail.v[1:])))
        out = jaxllm.decode_step(model, params, changed, np.array([1, 2]), attention_mass=True)
        return out.logits[0, 7], out

    gradient, out = jax.grad(step_loss, has_aux=True)(cache.tail.v[0])
    assert out.attention_mass.shape == cache.position_BS.shape
    assert np.abs(gradient[0, :5]).max() > 0
    gradient = np.asarray(jax.grad(loss)(cache.tail.v[0]))
    assert np.isfinite(gradient).all()
    assert np.abs(gradient[0, :5]).max() > 0  # what the row has seen
    assert np.abs(gradient[0, 5:]).max() == 0  # empty slots
    assert np.abs(gradient[1]).max() == 0  # another row


def test_attention_weights_sum_to_attention_mass(lm: Any) -> None:
    """Weights sum to 1 over slots, are causal, and add up to the mass over heads and queries."""
    model, params = lm
    cache = filled(lm, tokens(2, 9))
    after = tokens(2, 5, seed=1)
    out = jaxllm.forward(model, params, cache, after, attention_weights=True)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    assert out.attention_weights.shape == (layers, 2, heads, 5, 45)
    np.testing.assert_allclose(out.attention_weights.sum(axis=-1), 1, atol=1e-5)
    assert not out.attention_weights[..., 0, 41:].any()  # causal
    mass = jaxllm.forward(model, params, cache, after, attention_mass="layers")
    np.testing.assert_allclose(
        out.attention_weights.sum(axis=(2, 3)), mass.attention_mass, atol=1e-4
    )
    close(out.logits, mass.logits)
    with pytest.raises(ConfigError, match="Request only one"):
        jaxllm.forward(model, params, cache, after, attention_weights=True, attention_mass=True)


def test_attention_weights_with_gqa_reproduce_head_outputs() -> None:
    """With shared heads and a window, weights times values are the output of each head."""
    model, params = random_model("mistral", sliding_window=4)
    ids = tokens(1, 9)
    out = jaxllm.forward(model, params, None, ids, attention_weights=True)
    layer = jaxllm.activations(model, params, None, ids)
    weight_NTS = out.attention_weights[0, 0]
    assert not weight_NTS[:, 8, :5].any()  # the window
    v_SKH = layer["layers.0.v"][0]
    v_SNH = jnp.repeat(v_SKH, model.config.num_attention_heads // v_SKH.shape[1], axis=1)
    close(jnp.einsum("NTS,SNH->TNH", weight_NTS, v_SNH), layer["layers.0.heads"][0])


def test_generate_accepts_numpy_and_jax_scalars(lm: Any) -> None:
    model, params = lm
    ids, hot = tokens(1, 5), jaxllm.make_sampler(temperature=1.0)

    def sample(new: Any, seed: Any, eos: Any) -> list[int]:
        found = jaxllm.generate(
            model, params, ids, max_new_tokens=new, seed=seed, eos_token_ids=eos, sampler=hot
        )
        return found.token_BT[0].tolist()

    plain = sample(4, 5, [2])
    assert sample(np.int64(4), np.int64(5), np.array([2])) == plain
    assert sample(jnp.int32(4), jnp.int32(5), jnp.array([2])) == plain
    assert sample(4, np.uint64(5), (np.int32(2),)) == plain
