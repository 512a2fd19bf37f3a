"""A model on a mesh of eight devices: what one device gives, and nothing sent that need not be."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import models, steps
from jaxllm.adapters import LoraConfig, write_adapter
from jaxllm.cache import (
    branch,
    compact,
    fork,
    keep,
    load_cache,
    rewind,
    save_cache,
    select,
)
from jaxllm.config.long_attention import LongAttention
from jaxllm.errors import CacheMismatchError, ConfigError
from jaxllm.ops import compile_cache, native
from jaxllm.sharding.collective_stats import count_collectives
from jaxllm.sharding.shard_params import bytes_per_device
from jaxllm.weights.formats import as_format, as_weight
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.precision import Precision
from jaxllm.weights.types.act_order import PermutedWeight
from tests.adapters.made import random_adapter
from tests.sharding.made import WIDE, largest_difference, one, spread
from tests.twins import save_random, tokens

pytestmark = pytest.mark.devices
CLOSE = 2e-6  # against the largest number: what another order of sums makes
FORMATS = {"int8": Precision(quantize="int8"), "int4": Precision(quantize="int4-g32")}


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", "tensor=8"),
        ("gpt2", "data=2,tensor=4"),
        pytest.param("olmo2", "tensor=4", marks=pytest.mark.full),
        ("qwen3_moe", "data=2,tensor=4"),
    ],
)
def test_all_that_forward_says_is_what_one_device_says(family: str, mesh: str) -> None:
    model, params = one(family)
    over, shares = spread(model, params, mesh)
    ids = tokens(2, 5)
    for asked in ({"hidden_states": True, "attention_mass": "layers"}, {"attention_weights": True}):
        whole: Any = jaxllm.forward(model, params, None, ids, **asked)
        found: Any = jaxllm.forward(over, shares, None, ids, **asked)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True)
        assert max(largest_difference(a, b) for a, b in pairs) < CLOSE


@pytest.mark.parametrize(("family", "name"), [("llama", "int4"), ("gpt2", "int8")])
def test_quantized_weights_are_split_on_their_groups(family: str, name: str) -> None:
    model, params = one(family, FORMATS[name], **WIDE[family])
    whole = jaxllm.forward(model, params, None, tokens(2, 3)).logits
    over, shares = spread(model, params, "data=2,tensor=4")
    found = jaxllm.forward(over, shares, None, tokens(2, 3)).logits
    assert largest_difference(found, whole) < CLOSE


def test_a_group_is_not_cut() -> None:
    model, params = one("llama", FORMATS["int4"], intermediate_size=64)
    with pytest.raises(
        ConfigError, match=r"o_proj\.weight over tensorxkv_replicas=2: columns 0 to 24 of"
    ):
        spread(model, params, "tensor=2")
    spread(model, params, "tensor=2", exact=True)


@pytest.mark.parametrize(("family", "mesh"), [("llama", "tensor=4"), ("olmo2", "data=2,tensor=2")])
def test_exact_products_of_the_kernels_have_the_bits_of_one_device(family: str, mesh: str) -> None:
    if not native.is_enabled():
        pytest.skip("XLA's products differ with the shape of what they are given")
    model, params = one(family)
    over, shares = spread(model, params, mesh, exact=True)
    ids = tokens(2, 4)
    caches = [jaxllm.init_cache(m, 2, 16) for m in (model, over)]
    whole = jaxllm.prefill(model, params, caches[0], ids)
    found = jaxllm.prefill(over, shares, caches[1], ids)
    for token in ([3, 5], [7, 1]):
        np.testing.assert_array_equal(found.logits, whole.logits)
        whole = jaxllm.decode_step(model, params, whole.cache, np.array(token))
        found = jaxllm.decode_step(over, shares, found.cache, np.array(token))
    np.testing.assert_array_equal(found.logits, whole.logits)
    assert found.cache == whole.cache


@pytest.mark.parametrize(
    ("family", "precision", "mesh"),
    [
        ("llama", Precision(), "tensor=8"),
        ("llama", FORMATS["int4"], "data=2,tensor=4"),
        ("gpt2", FORMATS["int8"], "tensor=4"),
    ],
)
def test_a_step_sums_twice_a_layer_and_gathers_logits_alone(
    family: str, precision: Precision, mesh: str
) -> None:
    model, params = one(family, precision, **WIDE[family])
    over, shares = spread(model, params, mesh)
    cache = jaxllm.init_cache(over, 2, 64)
    B = 2 // over.axes.data
    step = jax.jit(steps._decode_step, static_argnums=(2, 6))
    two = np.zeros((2, 1), np.int32)
    text = step.lower(cache, (), over, shares, two, two, False).compile().as_text()
    found, c = count_collectives(text), model.config
    assert found.keys() == {"all-reduce", "all-gather"}
    # The table's rows, and two a layer; whether any row has a token, where rows are apart.
    assert found["all-reduce"].calls == 2 * c.num_hidden_layers + 1 + (over.axes.data > 1)
    assert found["all-reduce"].largest == 4 * B * c.hidden_size
    padded = -(-c.vocab_size // (over.axes.tensor * over.axes.kv_replicas)) * (
        over.axes.tensor * over.axes.kv_replicas
    )
    assert found["all-gather"][:2] == (1, 4 * B * padded)


@pytest.fixture(scope="module")
def stories(shallow_demos: Path) -> tuple[jaxllm.LM, jaxllm.LM]:
    """A model that writes English on one device, and over four."""
    path = shallow_demos / "llama"
    return (
        jaxllm.load(path, dtype="float32"),
        jaxllm.load(path, dtype="float32", mesh="data=2,tensor=2"),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 3, "top_p": 0.9},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=["greedy", "sampled", "beams", "speculative"],
)
def test_texts_are_those_of_one_device(stories: Any, options: dict[str, Any]) -> None:
    prompts = ["Once upon a time", "One day, a little"]
    whole, found = (lm.generate(prompts, max_new_tokens=12, **options) for lm in stories)
    assert [x.tokens for x in found] == [x.tokens for x in whole]


def test_served_texts_are_those_of_one_device(stories: Any) -> None:
    requests = [
        {"id": i, "prompt": prompt, "max_new_tokens": 6 + 2 * i, "temperature": 0.5 * i, "seed": i}
        for i, prompt in enumerate(["Once", "One day", "The cat"])
    ]
    whole, found = (dict(lm.serve(requests, rows=2, capacity=48)) for lm in stories)
    assert {i: x.tokens for i, x in found.items()} == {i: x.tokens for i, x in whole.items()}


def test_a_cache_on_a_mesh_is_cut_and_kept_like_another(tmp_path: Path) -> None:
    model, params = one("llama")
    over, shares = spread(model, params, "data=2,tensor=4")
    changes = [
        lambda cache: rewind(cache, to=4),
        lambda cache: keep(cache, np.arange(cache.slots)[None] != 1),
        lambda cache: compact(cache, capacity=24),
        lambda cache: select(cache, [1, 0, 0, 1]),
        lambda cache: fork(branch(cache, 1), 4, capacity=8),
    ]
    ends = []
    for m, p in ((model, params), (over, shares)):
        cache = jaxllm.prefill(m, p, jaxllm.init_cache(m, 2, 16), tokens(2, 6)).cache
        said = []
        for change in changes:
            cache = change(cache)
            logits, cache = jaxllm.decode_step(m, p, cache, np.arange(cache.batch) + 3)
            said.append(np.asarray(logits))
        save_cache(tmp_path / "kept", cache, m, p)
        again = load_cache(tmp_path / "kept", m, p)
        said.append(np.asarray(jaxllm.decode_step(m, p, again, np.arange(4)).logits))
        ends.append(said)
        k = jax.tree.leaves(cache.tail.k)[0]
        assert m is model or k.addressable_shards[0].data.shape[2] * 2 == k.shape[2]
    assert max(map(largest_difference, *ends)) < CLOSE
    with pytest.raises(CacheMismatchError):
        load_cache(tmp_path / "kept", model, params)


def test_no_device_has_more_than_its_share(tmp_path: Path) -> None:
    save_random(tmp_path, "llama", vocab_size=136)
    whole = jaxllm.load(tmp_path, dtype="float32")
    lm = jaxllm.load(tmp_path, dtype="float32", mesh="tensor=8")
    found = bytes_per_device(lm.params)
    norms = sum(x.nbytes for path, x in flatten(whole.params) if "norm" in path)
    groups = sum(  # on four devices each
        x.nbytes for path, x in flatten(whole.params) if "k_proj" in path or "v_proj" in path
    )
    total = sum(x.nbytes for _, x in flatten(whole.params)) - norms - groups
    assert found == dict.fromkeys(range(8), total // 8 + groups // 2 + norms)
    cache = lm.init_cache(2, 16)
    assert max(bytes_per_device((cache.tail.k, cache.tail.v)).values()) * 2 == sum(
        x.nbytes for x in (*cache.tail.k, *cache.tail.v)
    )
    for path, x in flatten(whole.params):
        there = dict(flatten(lm.params))[path]
        np.testing.assert_array_equal(as_weight(there).to_dense(), as_weight(x).to_dense())


def test_quantizing_while_loading_gives_the_same_shares(tmp_path: Path) -> None:
    save_random(tmp_path, "gpt2", n_inner=64)
    lm = jaxllm.load(tmp_path, dtype="float32", quantize="int8", mesh="tensor=4")
    whole = dict(flatten(jaxllm.load(tmp_path, dtype="float32", quantize="int8").params))
    for path, leaf in flatten(lm.params):
        np.testing.assert_array_equal(
            as_weight(leaf).to_dense(), as_weight(whole[path]).to_dense(), path
        )


def test_adapters_are_split_beside_their_weights(tmp_path: Path) -> None:
    save_random(tmp_path / "model", "llama", eos_token_id=None, num_hidden_layers=1)
    base = jaxllm.load(tmp_path / "model")
    asked = {
        "x": LoraConfig(r=2, target_modules=("q_proj", "down_proj", "embed_tokens", "lm_head")),
        "y": LoraConfig(r=4, use_dora=True),
    }
    for seed, (name, lora) in enumerate(asked.items()):
        made = random_adapter(base.config, base.params, lora, seed)
        write_adapter(tmp_path / name, made, base.config)
    prompts = tokens(2, 5).tolist()
    for names in (["x"], ["y"], ["x", "y"]):
        files = [tmp_path / name for name in names]
        each: Any = {"adapter": ["y", "x"]} if len(names) == 2 else {}
        whole, found = (
            jaxllm.load(tmp_path / "model", adapters=files, mesh=mesh).generate(
                prompts, max_new_tokens=5, **each
            )
            for mesh in (None, "data=2,tensor=4")
        )
        assert [x.tokens for x in found] == [x.tokens for x in whole]


@pytest.mark.parametrize(
    ("mesh", "exact"), [("data=2", False), ("stage=2", False), ("tensor=2", True)]
)
def test_columns_that_no_axis_divides_need_not_come_apart(mesh: str, exact: bool) -> None:
    """GPTQ's columns in an order of their own: a mesh whose devices all have them takes them."""
    model, params = one("llama", num_hidden_layers=2, **WIDE["llama"])

    def ordered(path: str, x: Any) -> Any:
        if not path.endswith("_proj.weight"):
            return x
        order = np.random.default_rng(len(path)).permutation(x.shape[1]).astype(np.int32)
        return PermutedWeight(as_format(x, "int4-g32"), jnp.asarray(order))

    params = map_leaves(ordered, params)
    over, shares = spread(model, params, mesh, exact=exact)
    ids = tokens(2, 5)
    found = jaxllm.forward(over, shares, None, ids).logits
    assert largest_difference(found, jaxllm.forward(model, params, None, ids).logits) < 2e-5
    whole = over.gather(shares)["layers.1"]["mlp"]["down_proj"]["weight"]
    assert np.array_equal(whole.order, params["layers.1"]["mlp"]["down_proj"]["weight"].order)
    refused = r"down_proj.weight over tensor.*=2: columns .* cannot be sliced"
    with pytest.raises(ConfigError, match=refused):
        spread(model, params, "tensor=2")


def test_whole_parameters_are_refused_by_path() -> None:
    model, params = one("gpt2")
    over, _ = spread(model, params, "tensor=2")
    with pytest.raises(ConfigError, match=r"c_attn\.bias is not sharded.*model\.shared"):
        jaxllm.forward(over, params, None, [[1, 2]])


def test_a_memory_is_split_by_its_heads() -> None:
    kind = LongAttention(kind="infini", segment_length=4, update="delta")
    model, params = _with(one("llama"), kind)
    over, shares = spread(model, params, "data=2,tensor=4")
    ids, said = tokens(2, 11), []
    for m, p in ((model, params), (over, shares)):
        cache = jaxllm.prefill(m, p, jaxllm.init_cache(m, 2, 16), ids, chunk=8).cache
        said.append(np.asarray(jaxllm.decode_step(m, p, cache, np.array([1, 2])).logits))
    assert largest_difference(said[1], said[0]) < 4 * CLOSE


def _with(made: Any, kind: LongAttention) -> Any:
    """The model with such attention, and gates that are all different."""
    model, params = made
    c = dataclasses.replace(model.config, attention=kind)
    gates = np.random.default_rng(5).standard_normal((c.num_hidden_layers, 8)).astype(np.float32)
    changed = {
        path: {**x, "self_attn": {**x["self_attn"], "memory_gate": jnp.asarray(gates[i])}}
        for i in range(c.num_hidden_layers)
        for path, x in [(f"layers.{i}", params[f"layers.{i}"])]
    }
    return models.build(c, model.precision), {**params, **changed}


def test_attention_by_numbers_of_heads_is_refused_on_a_part_of_them() -> None:
    kind = LongAttention(kind="dilated", segment_lengths=(4, 8), dilated_ratios=(1, 2))
    model, params = one("llama")
    config = dataclasses.replace(model.config, attention=kind)
    with pytest.raises(ConfigError, match="depends on head numbers"):
        spread(model.clone(config=config), params, "tensor=2")


def test_programs_of_a_mesh_are_not_kept_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "_folder", tmp_path)
    model, params = one("llama")
    said = []
    for mesh in ("tensor=2", "tensor=4"):
        over, shares = spread(model, params, mesh)
        cache = jaxllm.init_cache(over, 1, 16)
        logits, cache = jaxllm.prefill(over, shares, cache, tokens(1, 3))
        assert len(cache.tail.k[0].sharding.device_set) == over.axes.num_devices
        said.append(np.asarray(logits))
    assert largest_difference(*said) < CLOSE
    assert not list(tmp_path.glob(f"*{compile_cache.SUFFIX}"))
