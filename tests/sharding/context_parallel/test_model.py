"""A model with context parallelism equals the model on one device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import steps
from jaxllm.cache import init_cache
from jaxllm.errors import ConfigError
from jaxllm.research.self_extend import SelfExtend
from jaxllm.sharding import make_sharded_model
from jaxllm.sharding.collective_stats import count_collectives
from jaxllm.sharding.mesh_spec import parse_mesh
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.objective import NextToken
from tests.sharding.tiny_models import FAMILIES, largest_difference, make_model, shard_model

pytestmark = pytest.mark.devices

QUICK = [("gpt2", "tensor=4:tokens")]
MORE = [
    ("llama", "data=2,sequence=2,tensor=2"),
    ("llama", "sequence=4"),
    ("llama", "sequence=2:heads"),
    ("gemma2", "sequence=4"),  # windows and caps
    ("gpt2", "sequence=8"),
    ("gemma2", "sequence=2,tensor=2:tokens"),
]
FULL = [
    (family, mesh)
    for mesh in ("sequence=4", "sequence=2:heads", "data=2,sequence=2,tensor=2", "tensor=4:tokens")
    for family in FAMILIES
    if (family, mesh) not in QUICK + MORE
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE + FULL)]
LENGTHS = np.array([40, 27])


def prompt(T: int = 40, rows: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 131, (rows, T)).astype(np.int32)


@pytest.mark.parametrize("family, mesh", CASES)
def test_prompts_and_decoding_equal_single_device(family: str, mesh: str) -> None:
    """Prefill in chunks (the second on a cache, the last padded) and decoding equal one device,
    logits and cache.
    """
    model, params = make_model(family, **({"n_layer": 1} if (family, mesh) in QUICK else {}))
    over, shared = shard_model(model, params, mesh)
    caches = [init_cache(m, 2, 64) for m in (model, over)]
    ids = prompt()
    if model.config.original_context is not None:  # LongRoPE: cached text may not cross this length
        mine, theirs = (
            steps.forward(*made, None, ids, hidden_states=True)
            for made in ((over, shared), (model, params))
        )
        assert largest_difference(mine.logits, theirs.logits) < 1e-5
        assert largest_difference(mine.delta.k[-1], theirs.delta.k[-1]) < 1e-5
        return

    def both(step: Callable[..., Any], *given: Any, **more: Any) -> list[jax.Array]:
        found = []
        for i, (m, p) in enumerate(((model, params), (over, shared))):
            logits, caches[i] = step(m, p, caches[i], *given, **more)
            found.append(logits)
        return found

    want, found = both(steps.prefill, ids, lengths_B=LENGTHS, chunk=24)
    assert largest_difference(found, want) < 1e-5
    where = caches[1].tail.k[0].sharding.spec
    if "sequence" in mesh:
        assert "sequence" in str(where[2] if "heads" in mesh else where[1])
    for _ in range(2):
        want, found = both(steps.decode_step, np.asarray(want.argmax(-1), np.int32))
        assert largest_difference(found, want) < 1e-5
    more = prompt(T=20)  # continues on the cache and fills all slots but two
    trace = [steps.forward(m, p, c, more, hidden_states=True)
             for m, p, c in zip((model, over), (params, shared), caches, strict=True)]  # fmt: skip
    assert largest_difference(trace[1].logits, trace[0].logits) < 1e-5
    assert largest_difference(trace[1].hidden_states[1], trace[0].hidden_states[1]) < 1e-5
    for mine, theirs in zip(caches[1].tail.k, caches[0].tail.k, strict=True):
        assert largest_difference(mine, theirs) < 1e-5
    assert (np.asarray(caches[0].position_BS) == np.asarray(caches[1].position_BS)).all()


def packed(T: int = 40, seed: int = 0) -> Rows:
    """Return rows of two documents each; the second row ends in padding."""
    ids = prompt(T=T + 1, seed=seed)
    document = np.stack([np.arange(T) >= 23, np.arange(T) >= 9]).astype(np.int32)
    position = np.where(document == 1, np.arange(T) - [[23], [9]], np.arange(T)).astype(np.int32)
    label = ids[:, 1:].copy()
    position[1, -6:], document[1, -6:], label[1, -6:] = -1, -1, IGNORED
    return Rows(np.where(position < 0, 0, ids[:, :-1]), label, position, document)


@pytest.mark.full
@pytest.mark.parametrize("family, mesh", QUICK + MORE)
def test_gradients_equal_single_device(family: str, mesh: str) -> None:
    """The loss of packed rows has the gradients of one device in all parameters."""
    model, params = make_model(family)
    over = make_sharded_model(model.config, model.precision, parse_mesh(mesh)).clone(remat=True)
    rows, key = packed(), jax.random.key(0)

    def loss(m: Any, p: Any, prepare: Callable[[Any], Any]) -> jax.Array:
        measured = NextToken()(m, prepare(p), None, rows, key)
        return measured.total / measured.weight

    want = jax.jit(jax.value_and_grad(partial(loss, model, prepare=lambda p: p)))(params)
    shared = over.shard(params)
    found = jax.jit(jax.value_and_grad(partial(loss, over, prepare=lambda p: p)))(shared)
    assert abs(float(found[0] - want[0])) < 1e-5 * float(want[0])
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want[1]))
    pairs = zip(jax.tree.leaves(found[1]), jax.tree.leaves(want[1]), strict=True)
    for mine, theirs in pairs:
        if mine.shape == theirs.shape:  # tables whose last shard is padded have another shape
            assert float(jnp.abs(mine - theirs).max()) < 1e-5 * largest


@pytest.mark.parametrize("mesh", ["sequence=4", "sequence=4:heads"])
def test_prefill_sends_no_full_keys_or_values(mesh: str) -> None:
    """Prefill of an empty cache uses the expected collectives and never gathers all
    keys or values.
    """
    model, params = make_model("llama", num_hidden_layers=2, num_key_value_heads=4)
    over, shared = shard_model(model, params, mesh)
    ids, at = jnp.asarray(prompt(T=96, rows=1)), jnp.arange(96, dtype=jnp.int32)[None]

    def prefill(m: Any, params: Any, cache: Any, ids: jax.Array) -> Any:
        options: Any = {"column_B": jnp.array([95])}
        return steps.run_and_commit(m, params, (), cache, ids, at, **options)

    given = shared, init_cache(over, 1, 128), ids
    compiled = jax.jit(partial(prefill, over)).lower(*given).compile()
    logits, cache = compiled(*given)
    want, whole = jax.jit(partial(prefill, model))(params, init_cache(model, 1, 128), ids)
    assert largest_difference(logits, want) < 1e-5
    for mine, theirs in zip(cache.tail.v, whole.tail.v, strict=True):
        assert largest_difference(mine, theirs) < 1e-5
    assert {x.data.nbytes for x in cache.tail.v[0].addressable_shards} == {
        whole.tail.v[0].nbytes // 4
    }
    found = count_collectives(compiled.as_text())
    layers, token = 2, model.config.head_dim * 4
    if mesh.endswith("heads"):
        assert found["all-to-all"].calls == 4 * layers  # q, k, v, and the heads
        assert "collective-permute" not in found
    else:
        # Per layer: ring of keys, values and positions; queries with their softmax state over the
        # cache; back to plain order and cache update, two each for keys and values.
        assert found["collective-permute"].calls == (3 + 5 + 4 + 2) * layers
        assert found["collective-permute"].largest == 24 * 8 * 6 * 4  # the queries of one device
        assert "all-to-all" not in found
    gathered = found.get("all-gather")
    assert gathered is None or gathered.largest < 96 * token * 4


def test_tensor_axis_tokens_mode_uses_reduce_scatter() -> None:
    """With tensor=4:tokens, prefill scatters sums and gathers norm outputs; decoding uses
    all-reduce.
    """
    model, params = make_model("llama", num_hidden_layers=2, num_key_value_heads=4)
    over, shared = shard_model(model, params, "tensor=4:tokens")

    def collectives(T: int) -> dict[str, Any]:
        ids = jnp.asarray(prompt(T=T, rows=1))
        at = jnp.arange(T, dtype=jnp.int32)[None]

        def logits(params: Any, ids: jax.Array) -> jax.Array:
            last = jnp.array([T - 1], jnp.int32)
            return steps.run_model(over, params, (), ids, at, column_B=last)[0].logits

        return count_collectives(jax.jit(logits).lower(shared, ids).compile().as_text())

    many, few = collectives(32), collectives(1)
    assert "all-reduce" not in many
    # The embedding; attention and MLP of each layer.
    assert many["reduce-scatter"].calls == 1 + 2 * 2
    assert many["all-gather"].calls == 1 + 2 * 2 + 1  # the last norm; and the logits
    assert few["all-reduce"].calls == 1 + 2 * 2
    assert "reduce-scatter" not in few


def test_unsupported_splits_are_refused() -> None:
    model, params = make_model("llama")
    over, shared = shard_model(model, params, "sequence=4")
    cache = init_cache(over, 1, 32)
    with pytest.raises(ConfigError, match=r"attention mass .* mesh sequence=4 must be"):
        steps.forward(over, shared, cache, prompt(rows=1)[:, :16], attention_mass=True)
    with pytest.raises(ConfigError, match=r"8 query heads and 2 key heads .* 4 devices"):
        make_sharded_model(model.config, model.precision, parse_mesh("sequence=4:heads"))
    extended = model.config.with_attention(SelfExtend(group_size=4, neighbor_window=16))
    with pytest.raises(ConfigError, match=r"'self-extend' .* mesh sequence=2 must have sequence=1"):
        make_sharded_model(extended, model.precision, parse_mesh("sequence=2"))
    with pytest.raises(
        ConfigError, match=r"mode of a mesh axis must be as in sequence=4:heads, tensor=4:tokens"
    ):
        parse_mesh("tensor=2:heads")
    with pytest.raises(ConfigError, match="mesh tensor=2:tokens and exact=True cannot be combined"):
        make_sharded_model(model.config, model.precision, parse_mesh("tensor=2:tokens"), exact=True)
    with pytest.raises(ConfigError, match=r"exact=True .* mesh sequence=2 must have sequence=1"):
        make_sharded_model(model.config, model.precision, parse_mesh("sequence=2"), exact=True)
    assert str(parse_mesh("sequence=4:heads,data=2")) == "data=2,sequence=4:heads"
