"""Stages with different layers: windows, rotary settings, and uneven layer counts."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.cache import close_gaps, drop_range, load_cache, save_cache, shift
from jaxllm.research.pipeline.stage_layers import assign_layers
from jaxllm.research.plan.estimate import plan
from jaxllm.research.token_merging.pool import pool
from jaxllm.sharding.shard_params import bytes_per_device
from tests.research.pipeline.test_pipeline import CLOSE, check_caches, check_generation, of_layers
from tests.sharding.test_plan import ROWS, SLOTS, make_query
from tests.sharding.tiny_models import check_trace, largest_difference, shard_model
from tests.tiny_models import tokens

pytestmark = pytest.mark.devices
FULL = pytest.mark.full
# Layer patterns of published models: gemma-2-2b, gemma-3-1b, SmolLM3-3B.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "gemma2": (26, {}),
    "gemma3_text": (26, {"sliding_window_pattern": 6}),
    "smollm3": (36, {"no_rope_layer_interval": 4}),
}


@pytest.fixture(scope="module")
def gemma3() -> Any:
    """Return a model with two windows and two rotary settings, three layers on two stages."""
    model, params = of_layers("gemma3_text", 3, sliding_window_pattern=3)
    return model, params, *shard_model(model, params, "stage=2")


def test_stages_cut_layer_pattern_correctly(gemma3: Any) -> None:
    """Three layers on two stages, the third of another kind: trace, prefill and decoding equal one
    device.
    """
    model, params, over, shared = gemma3
    assert over.layer_table == [[0, 1], [2, None]]
    assert model.config.layer_signature(2) != model.config.layer_signature(0)
    options: dict[str, Any] = {"hidden_states": True}
    ours = jaxllm.forward(over, shared, None, tokens(2, 9), **options)
    theirs = jaxllm.forward(model, params, None, tokens(2, 9), **options)
    check_trace(ours, theirs, CLOSE)
    found = [jaxllm.generate(*lm, tokens(2, 9), max_new_tokens=4) for lm in pairs(gemma3)]
    np.testing.assert_array_equal(found[1].token_BT, found[0].token_BT)
    check_caches(found[1].cache, found[0].cache)


def pairs(lm: Any) -> list[tuple[Any, Any]]:
    return [(lm[0], lm[1]), (lm[2], lm[3])]


def test_cache_edits_rotate_keys_by_layer(gemma3: Any, tmp_path: Any) -> None:
    """Cache edits rotate the keys of stacked layers by each layer's own rotary settings; saving
    restores the cache.
    """
    changes = (
        lambda cache: shift(cache, 3, start=4),
        lambda cache: close_gaps(drop_range(cache, 1, 4)),
        lambda cache: pool(cache, ratio=2, sinks=1, recent=2),
    )
    caches = [
        jaxllm.prefill(*lm, jaxllm.init_cache(lm[0], 2, 16), tokens(2, 9)).cache
        for lm in pairs(gemma3)
    ]
    for change in changes:
        theirs, ours = map(change, caches)
        check_caches(ours, theirs)
    save_cache(tmp_path / "kept", caches[1], *pairs(gemma3)[1])
    assert load_cache(tmp_path / "kept", *pairs(gemma3)[1]) == caches[1]


def test_empty_layer_slot_is_planned_without_parameters(gemma3: Any) -> None:
    """The plan counts the empty layer slot, and gathering returns the original parameters bit for
    bit.
    """
    _, params, over, shared = gemma3
    found = plan(make_query(over, over.axes))
    assert max(bytes_per_device(shared).values()) == found.weights.total
    cache = bytes_per_device(jaxllm.init_cache(over, ROWS, SLOTS))
    assert max(cache.values()) == found.cache_bytes + 4 * (1 + ROWS)  # cursor and next positions
    assert over.unsharded_paths("layers.1.mlp.up_proj.weight") == (
        "layers.1.mlp.up_proj.weight",
        None,
    )
    for a, b in zip(*(sorted_leaves(x) for x in (over.gather(shared), params)), strict=True):
        np.testing.assert_array_equal(a, b)


def sorted_leaves(params: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves({k: params[k] for k in sorted(params)})]


@FULL
@pytest.mark.parametrize(
    ("family", "mesh", "layers", "options"),
    [
        ("smollm3", "stage=2", 4, {"chunks": 2}),
        ("gemma2", "stage=2,sequence=2", 3, {"microbatches": 2}),
        ("gemma2", "stage=2,sequence=2:heads", 3, {}),
        ("gemma2", "stage=2,tensor=2:tokens,data=2", 3, {}),
        ("qwen2", "stage=3", 4, {}),
    ],
)
def test_layer_patterns_work_on_every_axis(
    family: str, mesh: str, layers: int, options: dict[str, Any]
) -> None:
    changes = {"no_rope_layer_interval": 3} if family == "smollm3" else {}
    model, params = of_layers(family, layers, **changes)
    check_generation(model, params, *shard_model(model, params, mesh, **options), 12)


@FULL
@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize("stages", [2, 4])
def test_published_layer_patterns_run_in_stages(family: str, stages: int) -> None:
    """Layers as in the published models, of tiny width; rounding is near 1e-4, a wrong layer kind
    would give 1.
    """
    layers, changes = PUBLISHED[family]
    model, params = of_layers(family, layers, **changes)
    over, shared = shard_model(model, params, f"stage={stages}")
    assert [n for row in over.layer_table for n in row if n is not None] == list(range(layers))
    ours = jaxllm.forward(over, shared, None, tokens(4, 9)).logits
    theirs = jaxllm.forward(model, params, None, tokens(4, 9)).logits
    assert largest_difference(ours, theirs) < 1e-3
    found = [
        jaxllm.generate(*lm, tokens(4, 9), max_new_tokens=5)
        for lm in ((model, params), (over, shared))
    ]
    np.testing.assert_array_equal(found[1].token_BT, found[0].token_BT)
    kept = zip(
        found[1].cache.unstack_layers([*map(np.asarray, found[1].cache.tail.k)]),
        found[0].cache.tail.k,
        strict=True,
    )
    assert max(largest_difference(a[:, :12], b[:, :12]) for a, b in kept) < 1e-3


@pytest.mark.parametrize(
    ("layers", "stages", "lengths"), [(26, 4, (7, 7, 6, 6)), (34, 4, (9, 9, 8, 8)), (5, 4, (2, 1))]
)
def test_first_stages_hold_extra_layers(layers: int, stages: int, lengths: tuple[int, ...]) -> None:
    """Each layer is assigned once, in order; empty slots are the last ones of later stages."""
    config = of_layers("llama", 2)[0].config.with_layers([0] * layers)
    table = assign_layers(config, stages)
    counts = [sum(n is not None for n in row) for row in table]
    assert tuple(counts[: len(lengths)]) == lengths
    assert [n for row in table for n in row if n is not None] == list(range(layers))
    assert all(None not in row[:-1] for row in table)
