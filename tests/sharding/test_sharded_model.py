"""A model on a mesh of eight devices: single-device results and minimal communication."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import models
from jaxllm.adapters import LoraConfig, write_adapter
from jaxllm.cache import (
    branch,
    compact,
    drop_range,
    fork,
    keep,
    load_cache,
    rewind,
    save_cache,
    select,
)
from jaxllm.config.model import ScoreHead
from jaxllm.errors import CacheMismatchError, ConfigError
from jaxllm.generation.embeddings import last_logits
from jaxllm.models import compiled_steps
from jaxllm.models.invariance import make_invariant
from jaxllm.models.sites import NO_EDITS
from jaxllm.ops import compile_cache, native
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.sharding.collective_stats import count_collectives
from jaxllm.sharding.shard_params import bytes_per_device
from jaxllm.weights.formats import as_format, as_weight
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.precision import Precision
from jaxllm.weights.types.permuted import PermutedWeight
from tests.adapters.random_adapters import random_adapter
from tests.sharding.tiny_models import WIDE, largest_difference, make_model, shard_model
from tests.tiny_models import save_random, tokens

pytestmark = pytest.mark.devices
FULL = pytest.mark.full
CLOSE = 2e-6  # relative to the largest value: sums run in another order
TEXTS = [tokens(1, n, seed=n)[0].tolist() for n in (9, 3, 14)]
FORMATS = {"int8": Precision(quantize="int8"), "int4": Precision(quantize="int4-g32")}


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", "tensor=8"),
        ("gpt2", "data=2,tensor=4"),
        pytest.param("olmo2", "tensor=4", marks=FULL),
        ("qwen3_moe", "data=2,tensor=4"),
    ],
)
def test_forward_outputs_equal_single_device(family: str, mesh: str) -> None:
    """Logits, hidden states, attention mass and attention weights equal one device."""
    model, params = make_model(family)
    over, shares = shard_model(model, params, mesh)
    ids = tokens(2, 5)
    for options in (
        {"hidden_states": True, "attention_mass": "layers"},
        {"attention_weights": True},
    ):
        whole: Any = jaxllm.forward(model, params, None, ids, **options)
        found: Any = jaxllm.forward(over, shares, None, ids, **options)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True)
        assert max(largest_difference(a, b) for a, b in pairs) < CLOSE


@pytest.mark.parametrize(("family", "name"), [("llama", "int4"), ("gpt2", "int8")])
def test_quantized_weights_split_at_group_boundaries(family: str, name: str) -> None:
    model, params = make_model(family, FORMATS[name], **WIDE[family])
    whole = jaxllm.forward(model, params, None, tokens(2, 3)).logits
    over, shares = shard_model(model, params, "data=2,tensor=4")
    found = jaxllm.forward(over, shares, None, tokens(2, 3)).logits
    assert largest_difference(found, whole) < CLOSE


def test_shard_refuses_to_split_quantization_group() -> None:
    """A mesh that splits a quantization group is refused, unless exact=True gathers the inputs
    instead.
    """
    model, params = make_model("llama", FORMATS["int4"], intermediate_size=64)
    with pytest.raises(
        ConfigError, match=r"o_proj\.weight over tensorxkv_replicas=2: columns 0 to 24 of"
    ):
        shard_model(model, params, "tensor=2")
    shard_model(model, params, "tensor=2", exact=True)


@pytest.mark.parametrize(("family", "mesh"), [("llama", "tensor=4"), ("olmo2", "data=2,tensor=2")])
def test_exact_mode_has_single_device_bits(family: str, mesh: str) -> None:
    """With exact=True and the kernels, logits and cache are bit-identical to one device."""
    if not native.is_enabled():
        pytest.skip("XLA's products depend on the shapes of their inputs")
    model, params = make_model(family)
    model = make_invariant(model)  # some processors run products of several rows without kernels
    over, shares = shard_model(model, params, mesh, exact=True)
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
def test_decode_step_sums_twice_per_layer(family: str, precision: Precision, mesh: str) -> None:
    """A decode step has two all-reduces per layer, one for the embeddings, and gathers only the
    logits.
    """
    model, params = make_model(family, precision, **WIDE[family])
    over, shares = shard_model(model, params, mesh)
    cache = jaxllm.init_cache(over, 2, 64)
    B = 2 // over.axes.data
    step = jax.jit(compiled_steps._decode_step, static_argnums=(2, 7, 8))
    two = np.zeros((2, 1), np.int32)
    given = (cache, (), over, shares, two, two, NO_EDITS, False, ())
    text = step.lower(*given).compile().as_text()
    found, c = count_collectives(text), model.config
    assert found.keys() == {"all-reduce", "all-gather"}
    # Embedding, two per layer, and, with split rows, whether any row has a token.
    assert found["all-reduce"].calls == 2 * c.num_hidden_layers + 1 + (over.axes.data > 1)
    assert found["all-reduce"].largest == 4 * B * c.hidden_size
    padded = -(-c.vocab_size // (over.axes.tensor * over.axes.kv_replicas)) * (
        over.axes.tensor * over.axes.kv_replicas
    )
    assert found["all-gather"][:2] == (1, 4 * B * padded)


TOKENS = ("sequence=4", "sequence=2:heads", "sequence=2,tensor=2:tokens")


@pytest.fixture(
    scope="module", params=["data=2,tensor=2", *(pytest.param(m, marks=FULL) for m in TOKENS)]
)
def stories(request: pytest.FixtureRequest, shallow_demos: Path) -> list[jaxllm.LM]:
    """Return a demo model on one device, and on a mesh."""
    path = shallow_demos / "llama"
    return [jaxllm.load(path, dtype="float32", mesh=mesh) for mesh in (None, request.param)]


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
def test_generated_texts_equal_single_device(stories: Any, options: dict[str, Any]) -> None:
    """Greedy, sampled, beam and speculative tokens equal one device."""
    prompts = ["Once upon a time", "One day, a little"]
    whole, found = (lm.generate(prompts, max_new_tokens=12, **options) for lm in stories)
    assert [x.tokens for x in found] == [x.tokens for x in whole]


def test_served_texts_equal_single_device(stories: Any) -> None:
    requests = [
        {"id": i, "prompt": prompt, "max_new_tokens": 6 + 2 * i, "temperature": 0.5 * i, "seed": i}
        for i, prompt in enumerate(["Once", "One day", "The cat"])
    ]
    whole, found = (dict(lm.serve(requests, rows=2, capacity=48)) for lm in stories)
    assert {i: x.tokens for i, x in found.items()} == {i: x.tokens for i, x in whole.items()}


@pytest.mark.parametrize("mesh", ["data=2,tensor=4", pytest.param("sequence=4", marks=FULL)])
def test_sharded_cache_edits_equal_single_device(mesh: str, tmp_path: Path) -> None:
    """Cache edits, saving and loading give the logits of one device; a model without a mesh refuses
    a file with repeated heads.
    """
    model, params = make_model("llama")
    over, shares = shard_model(model, params, mesh)
    changes = [
        lambda cache: rewind(cache, to=4),
        lambda cache: keep(cache, np.arange(cache.slots)[None] != 1),
        lambda cache: drop_range(cache, 2, 4),
        lambda cache: compact(cache, capacity=24),
        lambda cache: select(cache, [1, 0, 0, 1]),
        lambda cache: fork(branch(cache, 1), 4, capacity=8),
    ]
    ends = []
    for m, p in ((model, params), (over, shares)):
        cache = jaxllm.prefill(m, p, jaxllm.init_cache(m, 2, 16), tokens(2, 6)).cache
        outputs = []
        for change in changes:
            cache = change(cache)
            logits, cache = jaxllm.decode_step(m, p, cache, np.arange(cache.batch) + 3)
            outputs.append(np.asarray(logits))
        save_cache(tmp_path / "kept", cache, m, p)
        again = load_cache(tmp_path / "kept", m, p)
        outputs.append(np.asarray(jaxllm.decode_step(m, p, again, np.arange(4)).logits))
        ends.append(outputs)
        k = jax.tree.leaves(cache.tail.k)[0]
        if m is over and "tensor" in mesh:
            assert k.addressable_shards[0].data.shape[2] * 2 == k.shape[2]
    assert max(map(largest_difference, *ends)) < (CLOSE if "tensor" in mesh else 1e-5)
    if "tensor" in mesh:  # key/value heads are repeated
        with pytest.raises(CacheMismatchError):
            load_cache(tmp_path / "kept", model, params)


def test_device_holds_only_its_share(tmp_path: Path) -> None:
    """Every device holds 1/n of the matrices, replicated norms and its kv heads; the values equal
    one device.
    """
    save_random(tmp_path, "llama", vocab_size=136)
    whole = jaxllm.load(tmp_path, dtype="float32")
    lm = jaxllm.load(tmp_path, dtype="float32", mesh="tensor=8")
    found = bytes_per_device(lm.params)
    norms = sum(x.nbytes for path, x in flatten(whole.params) if "norm" in path)
    groups = sum(  # replicated on four devices each
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


def test_quantize_on_load_gives_same_shards(tmp_path: Path) -> None:
    """Quantizing while loading on a mesh gives the values of one device."""
    save_random(tmp_path, "gpt2", n_inner=64)
    lm = jaxllm.load(tmp_path, dtype="float32", quantize="int8", mesh="tensor=4")
    whole = dict(flatten(jaxllm.load(tmp_path, dtype="float32", quantize="int8").params))
    for path, leaf in flatten(lm.params):
        np.testing.assert_array_equal(
            as_weight(leaf).to_dense(), as_weight(whole[path]).to_dense(), path
        )


def test_adapters_are_sharded_with_their_weights(tmp_path: Path) -> None:
    """DoRA alone, and LoRA and DoRA per row, give the tokens of one device."""
    save_random(tmp_path / "model", "llama", eos_token_id=None, num_hidden_layers=1)
    base = jaxllm.load(tmp_path / "model")
    configs = {
        "x": LoraConfig(r=2, target_modules=("q_proj", "down_proj", "embed_tokens", "lm_head")),
        "y": LoraConfig(r=4, use_dora=True),
    }
    for seed, (name, lora) in enumerate(configs.items()):
        made = random_adapter(base.config, base.params, lora, seed)
        write_adapter(tmp_path / name, made, base.config)
    prompts = tokens(2, 5).tolist()
    for names in (["y"], ["x", "y"]):
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
def test_act_order_weight_is_replicated_or_refused(mesh: str, exact: bool) -> None:
    """A GPTQ column order works on meshes that do not split columns, and is refused where they
    would be split.
    """
    model, params = make_model("llama", num_hidden_layers=2, **WIDE["llama"])

    def ordered(path: str, x: Any) -> Any:
        if not path.endswith("_proj.weight"):
            return x
        order = np.random.default_rng(len(path)).permutation(x.shape[1]).astype(np.int32)
        return PermutedWeight(as_format(x, "int4-g32"), jnp.asarray(order))

    params = map_leaves(ordered, params)
    over, shares = shard_model(model, params, mesh, exact=exact)
    ids = tokens(2, 5)
    found = jaxllm.forward(over, shares, None, ids).logits
    assert largest_difference(found, jaxllm.forward(model, params, None, ids).logits) < 2e-5
    whole = over.gather(shares)["layers.1"]["mlp"]["down_proj"]["weight"]
    assert np.array_equal(whole.order, params["layers.1"]["mlp"]["down_proj"]["weight"].order)
    refused = r"down_proj.weight over tensor.*=2: columns .* cannot be sliced"
    with pytest.raises(ConfigError, match=refused):
        shard_model(model, params, "tensor=2")


def test_unsharded_parameters_are_refused_by_path() -> None:
    model, params = make_model("gpt2")
    over, _ = shard_model(model, params, "tensor=2")
    with pytest.raises(ConfigError, match=r"c_attn\.bias is not sharded.*model\.shard"):
        jaxllm.forward(over, params, None, [[1, 2]])


def test_infini_memory_is_split_by_head() -> None:
    """Infini-attention on a mesh gives the logits of one device."""
    kind = LongAttention(kind="infini", segment_length=4, update="delta")
    model, params = _with(make_model("llama"), kind)
    over, shares = shard_model(model, params, "data=2,tensor=4")
    ids, outputs = tokens(2, 11), []
    for m, p in ((model, params), (over, shares)):
        cache = jaxllm.prefill(m, p, jaxllm.init_cache(m, 2, 16), ids, chunk=8).cache
        outputs.append(np.asarray(jaxllm.decode_step(m, p, cache, np.array([1, 2])).logits))
    assert largest_difference(outputs[1], outputs[0]) < 4 * CLOSE


def _with(made: Any, kind: LongAttention) -> Any:
    """Return the model with the given attention and with distinct memory gates."""
    model, params = made
    c = dataclasses.replace(model.config, attention=kind)
    gates = np.random.default_rng(5).standard_normal((c.num_hidden_layers, 8)).astype(np.float32)
    changed = {
        path: {**x, "self_attn": {**x["self_attn"], "memory_gate": jnp.asarray(gates[i])}}
        for i in range(c.num_hidden_layers)
        for path, x in [(f"layers.{i}", params[f"layers.{i}"])]
    }
    return models.build(c, model.precision), {**params, **changed}


def test_dilated_attention_is_refused_with_split_heads() -> None:
    """Dilated attention depends on head numbers, so that a tensor axis is refused."""
    kind = LongAttention(kind="dilated", segment_lengths=(4, 8), dilated_ratios=(1, 2))
    model, params = make_model("llama")
    config = dataclasses.replace(model.config, attention=kind)
    with pytest.raises(ConfigError, match="depends on head numbers"):
        shard_model(model.clone(config=config), params, "tensor=2")


def test_mesh_programs_are_not_cached_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of a mesh are not stored in the compile cache, and another mesh compiles its own."""
    monkeypatch.setattr(compile_cache, "_folder", tmp_path)
    model, params = make_model("llama")
    outputs = []
    for mesh in ("tensor=2", "tensor=4"):
        over, shares = shard_model(model, params, mesh)
        cache = jaxllm.init_cache(over, 1, 16)
        logits, cache = jaxllm.prefill(over, shares, cache, tokens(1, 3))
        assert len(cache.tail.k[0].sharding.device_set) == over.axes.num_devices
        outputs.append(np.asarray(logits))
    assert largest_difference(*outputs) < CLOSE
    assert not list(tmp_path.glob(f"*{compile_cache.SUFFIX}"))


@pytest.mark.parametrize("mesh", ["data=2,sequence=2", "stage=2,tensor=2"])
def test_score_head_is_replicated(mesh: str) -> None:
    """Its outputs at the last tokens are those of one device."""
    model, params = make_model("llama")
    score = ScoreHead(labels=("a", "b", "c"))
    model = model.clone(config=dataclasses.replace(model.config, score=score))
    weight_LD = np.random.default_rng(0).standard_normal((3, model.config.hidden_size))
    del params["lm_head"]
    params["score"] = {"weight": jnp.asarray(weight_LD, jnp.float32)}
    expected = last_logits(model, params, TEXTS)
    found = last_logits(*shard_model(model, params, mesh), TEXTS)
    assert found.shape == (3, 3)
    assert largest_difference(found, expected) < CLOSE
