"""Pipeline parallelism against one device: tokens, caches, collectives and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import steps
from jaxllm.cache.kv import init_cache
from jaxllm.errors import ConfigError, TokenError
from jaxllm.generation.loops.generate import generate
from jaxllm.generation.sampling.sampler import GREEDY, Sampler
from jaxllm.research.pipeline.decode_loop import row_groups
from jaxllm.sharding import make_sharded_model
from jaxllm.sharding.collective_stats import count_collectives
from jaxllm.sharding.mesh_spec import parse_mesh
from jaxllm.sharding.shard_params import bytes_per_device
from jaxllm.weights.paths import map_leaves
from jaxllm.weights.precision import Override, Precision
from tests.sharding.tiny_models import (
    FAMILIES,
    check_trace,
    largest_difference,
    make_model,
    shard_model,
)
from tests.tiny_models import tokens

pytestmark = pytest.mark.devices

CLOSE = 3e-5  # relative to the largest value: sums run in another order


# Stages need the same layers in the same places, so none of these models' is dense here.
ALL_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": []},
    "glm4_moe": {"first_k_dense_replace": 0},
}


def of_layers(family: str, layers: int, **changes: Any) -> tuple[Any, Any]:
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    changes = {**ALL_EXPERTS.get(family, {}), **changes}
    return make_model(family, **{name: layers}, **changes)


def check_generation(model: Any, params: Any, over: Any, shared: Any, rows: int) -> None:
    """Check tokens and cache of greedy and sampled rows with unequal budgets."""
    prompt = tokens(rows, 5)
    for sampler in (GREEDY, Sampler()):
        options = {
            "max_new_tokens": [3 + i % 3 for i in range(rows)],
            "sampler": sampler,
            "seed": 5,
        }
        ours = generate(over, shared, prompt, **options)  # type: ignore[arg-type]
        theirs = generate(model, params, prompt, **options)  # type: ignore[arg-type]
        np.testing.assert_array_equal(ours.token_BT, theirs.token_BT)
        np.testing.assert_allclose(ours.logprob_BT, theirs.logprob_BT, atol=1e-3)
        check_caches(ours.cache, theirs.cache)


def check_caches(ours: Any, theirs: Any) -> None:
    """Check that both caches have equal slots, keys and values, and zeros in unwritten slots."""
    for name in ("position_BS", "token_BS", "patched_BS"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert int(ours.cursor) == int(theirs.cursor)
    np.testing.assert_array_equal(ours.next_position_B, theirs.next_position_B)
    slots = np.arange(ours.capacity)
    meant_BS = (np.asarray(theirs.position_BS) >= 0) | (slots >= int(theirs.cursor))
    for kind in ("k", "v"):
        whole = ours.unstack_layers([*map(np.asarray, getattr(ours.tail, kind))])
        for mine, other in zip(whole, getattr(theirs.tail, kind), strict=True):
            assert largest_difference(mine[meant_BS], np.asarray(other)[meant_BS]) < 1e-4


CASES = [
    pytest.param("llama", "stage=2", 2, {}, marks=pytest.mark.full),
    ("gpt2", "data=2,stage=2,tensor=2", 4, {"microbatches": 2}),
]


@pytest.mark.parametrize(("family", "mesh", "layers", "options"), CASES)
def test_pipeline_equals_single_device(
    family: str, mesh: str, layers: int, options: dict[str, Any]
) -> None:
    """Logits, attention mass, hidden states, generated tokens and caches equal one device."""
    model, params = of_layers(family, layers)
    over, shared = shard_model(model, params, mesh, **options)
    rows = 4 if not options else 8
    options: dict[str, Any] = {"hidden_states": True, "attention_mass": "layers"}
    ours = steps.forward(over, shared, None, tokens(rows, 7), **options)
    theirs = steps.forward(model, params, None, tokens(rows, 7), **options)
    check_trace(ours, theirs, CLOSE)
    assert largest_difference(ours.attention_mass, theirs.attention_mass) < CLOSE
    check_generation(model, params, over, shared, rows)


MATRIX = [
    (family, mesh, layers, options)
    for family in FAMILIES
    for mesh, layers, options in (
        ("stage=2", 4, {}),
        ("stage=2,tensor=2", 4, {"microbatches": 2}),
        ("stage=4", 4, {"microbatches": 4}),
        ("data=2,stage=2,tensor=2", 4, {}),
        ("stage=2", 4, {"chunks": 2, "microbatches": 2}),
        ("stage=2,sequence=2", 4, {"microbatches": 2}),
        ("stage=2,sequence=2,tensor=2:tokens", 4, {"microbatches": 4}),
    )
]


@pytest.mark.full
@pytest.mark.parametrize(("family", "mesh", "layers", "options"), MATRIX)
def test_every_family_equals_single_device_in_pipeline(
    family: str, mesh: str, layers: int, options: dict[str, Any]
) -> None:
    model, params = of_layers(family, layers)
    over, shared = shard_model(model, params, mesh, **options)
    check_generation(model, params, over, shared, 8)


def test_stage_holds_only_its_layers_and_caches() -> None:
    """With stage=4, a device holds a quarter of the layers, the cache of its layer, and its rows of
    the tables.
    """
    model, params = of_layers("llama", 4)
    over, shared = shard_model(model, params, "stage=4")
    layers = {k: v for k, v in shared.items() if k.startswith("layers.")}
    total = sum(x.nbytes for k, v in params.items() if "layers." in k for x in jax.tree.leaves(v))
    assert set(bytes_per_device(layers).values()) == {total // 4}
    cache = init_cache(over, 4, 16)
    assert set(bytes_per_device((cache.tail.k, cache.tail.v)).values()) == {2 * 4 * 16 * 2 * 6 * 4}
    tables = bytes_per_device({k: v for k, v in shared.items() if k in ("embed_tokens", "lm_head")})
    assert set(tables.values()) == {2 * 33 * 40 * 4}  # 131 rows over four devices


def test_more_microbatches_give_same_cache() -> None:
    """Idle ticks, five of eight here, write nothing: any number of microbatches or chunks gives one
    device's cache.
    """
    model, params = of_layers("llama", 4)
    prompt = tokens(4, 8)
    caches = []
    for options in ({"microbatches": 1}, {"microbatches": 4}, {"microbatches": 2, "chunks": 2}):
        over, shared = shard_model(model, params, "stage=2", **options)
        _, cache = steps.prefill(over, shared, init_cache(over, 4, 11), prompt)
        caches.append(cache)
    _, theirs = steps.prefill(model, params, init_cache(model, 4, 11), prompt)
    for cache in caches:
        check_caches(cache, theirs)


@pytest.mark.full
def test_row_groups_require_divisible_rows() -> None:
    """Rows decode in groups if they divide over the stages; otherwise they form one group, with
    equal tokens.
    """
    model, params = of_layers("llama", 2)
    over, shared = shard_model(model, params, "data=2,stage=2")
    # Rows do not divide: stages idle.
    assert row_groups(over, 3) is None and row_groups(over, 2) is None
    np.testing.assert_array_equal(row_groups(over, 8), [0, 0, 1, 1, 0, 0, 1, 1])
    check_generation(model, params, over, shared, 3)


def test_pipeline_sends_only_activations() -> None:
    """A tick sends one microbatch to the next stage; embeddings and outputs are summed, logits
    gathered, weights never.
    """
    model, params = of_layers("llama", 4)
    over, shared = shard_model(model, params, "stage=2", microbatches=2)
    B, T, D, V = 4, 7, 40, 131
    cache = init_cache(over, B, 16)

    def step(params: Any, cache: Any, token_BT: jax.Array) -> Any:
        position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        trace, delta, _ = steps.run_model(over, params, cache.segments, token_BT, position_BT)
        return trace.logits, delta

    stats = count_collectives(
        jax.jit(step).lower(shared, cache, tokens(B, T).astype(np.int32)).compile().as_text()
    )
    assert set(stats) == {"collective-permute", "all-reduce", "all-gather"}
    assert stats["collective-permute"] == (1, B // 2 * T * D * 4, B // 2 * T * D * 4)
    assert stats["all-reduce"] == (
        2,
        2 * B * T * D * 4,
        B * T * D * 4,
    )  # embeddings; outputs of the last stage
    assert stats["all-gather"] == (1, B * T * (V + 1) * 4, B * T * (V + 1) * 4)


def error_message(family: str, layers: int, mesh: str, **options: Any) -> str:
    changes = options.pop("changes", {})
    model, _ = of_layers(family, layers, **changes)
    with pytest.raises(ConfigError) as caught:
        make_sharded_model(
            model.config, options.pop("precision", model.precision), parse_mesh(mesh), **options
        )
    return str(caught.value)


def test_pipeline_refuses_indivisible_sizes_by_name() -> None:
    assert "num_hidden_layers 1 is too small for 2 stages" in error_message("llama", 1, "stage=2")
    assert "for 2 stages of 4 chunks" in error_message("llama", 4, "stage=2", chunks=4)
    assert "6 is not divisible into 2 stages of 2" in error_message("llama", 6, "stage=2", chunks=2)
    dense = {"mlp_only_layers": [0]}
    other = error_message("qwen3_moe", 2, "stage=2", changes=dense)
    assert "layers 0 and 1 would share one place of 2 stages" in other
    assert "mesh tensor=2 has no options chunks" in error_message("llama", 2, "tensor=2", chunks=2)
    assert "microbatches must be a whole number" in error_message(
        "llama", 2, "stage=2", microbatches=0
    )
    named = Precision(overrides=(("layers.1", Override(activations="bfloat16")),))
    assert "name layers by number" in error_message("llama", 2, "stage=2", precision=named)
    model, params = of_layers("llama", 2)
    over, shared = shard_model(model, params, "stage=2", microbatches=3)
    with pytest.raises(TokenError, match="4 rows are not divisible into 3 microbatches"):
        steps.forward(over, shared, None, tokens(4, 5))
    mixed = map_leaves(
        lambda path, x: x.astype(jnp.bfloat16) if path.endswith("1.mlp.up_proj.weight") else x,
        params,
    )
    over = make_sharded_model(model.config, model.precision, parse_mesh("stage=2"))
    with pytest.raises(ConfigError, match=r"layers.0/layers.1.mlp.up_proj.weight share one place"):
        over.shard(mixed)
