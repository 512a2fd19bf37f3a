"""Mixtures of experts: routing, files, quantization and capacity."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.lfm2_moe import modeling_lfm2_moe as lfm2_moe

import jaxllm
from jaxllm import models
from jaxllm.checkpoints.native import dequantize_checkpoint, open_native
from jaxllm.convert.hf import open_hf, read_config, write_hf
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.evaluate import bench
from jaxllm.lm import LM
from jaxllm.models.moe import Routing, apply_capacity, route
from jaxllm.weights.formats import to_dense
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.precision import match_precision
from jaxllm.weights.quantize import quantize
from tests.tiny_models import (
    Twin,
    assert_close,
    load_twin,
    random_model,
    save_random,
    theirs,
    tokens,
)

STACK = "layers.0.mlp.experts.{}.weight"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    directory = tmp_path_factory.mktemp("mixtral")
    save_random(directory, "mixtral", num_hidden_layers=1)
    return load_twin(directory)


def logits(model: Any, params: Any, ids: np.ndarray) -> np.ndarray:
    return np.asarray(jaxllm.forward(model, params, None, ids).logits)


def test_router_breaks_equal_scores_by_lowest_index() -> None:
    """torch takes any of equal scores, on a CPU often the last; the weights equal the softmax of
    the chosen scores.
    """
    scores = np.zeros((3, 8), np.float32)
    scores[1, [2, 5, 6]] = 1.0
    scores[2, 7] = -1.0
    weight, expert = route(jnp.asarray(scores), Routing(count=3))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(expert, order)
    of_torch = torch.topk(torch.tensor(scores).softmax(-1), 3, dim=-1)
    np.testing.assert_allclose(weight.sum(axis=1), 1, rtol=1e-6)
    # A softmax over all experts, renormalized, equals a softmax over the chosen ones.
    chosen = np.take_along_axis(scores, order, 1)
    np.testing.assert_allclose(weight, jax.nn.softmax(jnp.asarray(chosen)), rtol=1e-6)
    raw, _ = route(jnp.asarray(scores), Routing(count=3, normalized=False))
    np.testing.assert_allclose(raw, of_torch.values, rtol=1e-6)


def test_sigmoid_routing_equals_transformers() -> None:
    """The bias selects experts without changing their weights, and only the best groups take part:
    as in DeepSeek-V3; without groups and with another eps as in LFM2-MoE.
    """
    shared = {"num_experts_per_tok": 3, "hidden_size": 8, "routed_scaling_factor": 2.5}
    deepseek = transformers.DeepseekV3Config(
        n_routed_experts=12, n_group=4, topk_group=2, norm_topk_prob=True, **shared
    )
    lfm2 = transformers.Lfm2MoeConfig(num_experts=12, norm_topk_prob=True, **shared)
    settings = {"count": 3, "uses_sigmoid": True, "has_bias": True, "scale": 2.5}
    torch.manual_seed(0)
    x, bias = torch.randn(64, 8), torch.randn(12)
    for config, module, routing in (
        (deepseek, deepseek_v3.DeepseekV3TopkRouter, {"groups": 4, "top_groups": 2, "eps": 1e-20}),
        (lfm2, lfm2_moe.Lfm2MoeTopKRouter, {"eps": 1e-6}),
    ):
        router = module(config)
        with torch.no_grad():
            router.weight.normal_()
            if own := "groups" in routing:
                router.e_score_correction_bias.copy_(bias)
            scores, weights, experts = router(x) if own else router(x, bias)
        scores_TE, bias_E = jnp.asarray(scores.numpy()), jnp.asarray(bias.numpy())
        mine = route(scores_TE, Routing(**settings, **routing), bias_E)
        order = np.argsort(experts.numpy(), axis=1), np.argsort(mine[1], axis=1)
        np.testing.assert_array_equal(*(np.sort(e, axis=1) for e in (experts.numpy(), mine[1])))
        weight, expected = (
            np.take_along_axis(np.asarray(w), o, 1)
            for w, o in ((mine[0], order[1]), (weights, order[0]))
        )
        np.testing.assert_allclose(weight, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("groups", "top", "message"),
    [(5, 1, "in 5 groups"), (12, 12, "in 12 groups"), (4, 1, "from 1 of 4"), (4, 5, "from 5 of 4")],
)
def test_impossible_groups_are_refused(groups: int, top: int, message: str) -> None:
    assert message in Routing(count=4, groups=groups, top_groups=top).complaints(12)[0]
    assert Routing(count=4, groups=4, top_groups=2).complaints(12) == []


def rewrite_tensors(twin: Twin, directory: Path, change: Any) -> Path:
    """Write the checkpoint with changed tensors to a directory."""
    directory.mkdir()
    tensors = change(load_file(twin.directory / "model.safetensors"))
    save_file(tensors, directory / "model.safetensors")
    config = (twin.directory / "config.json").read_text(encoding="utf-8")
    (directory / "config.json").write_text(config, encoding="utf-8")
    return directory


def fuse_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors in transformers 5's fused form."""
    at = "model.layers.0.block_sparse_moe."
    each = [
        np.stack([tensors.pop(f"{at}experts.{e}.{n}.weight") for e in range(5)])
        for n in ("w1", "w3", "w2")
    ]
    mlp = "model.layers.0.mlp."
    tensors[f"{mlp}gate.weight"] = tensors.pop(f"{at}gate.weight")
    tensors[f"{mlp}experts.gate_up_proj"] = np.concatenate(each[:2], axis=1)
    return {**tensors, f"{mlp}experts.down_proj": each[2]}


def test_both_spellings_load_same_tensors(twin: Twin, tmp_path: Path) -> None:
    """The published w1, w3, w2, the fused form of transformers 5 and sharded files load as the same
    tensors.
    """
    names = set(load_file(twin.directory / "model.safetensors"))
    assert "model.layers.0.block_sparse_moe.experts.4.w3.weight" in names  # the published spelling
    other = open_hf(rewrite_tensors(twin, tmp_path / "fused", fuse_experts))
    ours = open_hf(twin.directory)
    assert set(other.tensors) == set(ours.tensors)
    for path, tensor in other.tensors.items():
        np.testing.assert_array_equal(tensor.read(), ours.tensors[path].read(), path)
        np.testing.assert_array_equal(np.concatenate([*tensor.blocks(3)]).reshape(-1),
                                      ours.tensors[path].read().reshape(-1))  # fmt: skip
    twin.torch_model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    sharded = load_twin(tmp_path / "shards")
    np.testing.assert_array_equal(*(dict(flatten(t.params))[STACK.format("up_proj")]
                                    for t in (sharded, twin)))  # fmt: skip


def without(name: str) -> Any:
    return lambda tensors: {k: v for k, v in tensors.items() if name not in k}


def test_mismatched_expert_tensors_are_refused(twin: Twin, tmp_path: Path) -> None:
    """Missing, surplus, repeated and misshapen expert tensors raise errors that name them."""
    one = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    whole = {"model.layers.0.mlp.experts.down_proj": np.zeros((5, 48, 56), np.float32)}
    narrow = {"model.layers.0.mlp.experts.gate_up_proj": np.zeros((5, 56, 48), np.float32)}
    cases = {
        "missing": (without("experts.3.w2"), r"experts \[0, 1, 2, 4\], but config.json sets 5"),
        "shape": (lambda t: {**t, one: t[one][:, :-1].copy()}, "expert 3 is float32 .48, 55., exp"),
        "twice": (lambda t: {**t, **whole}, "down_proj.weight is stored twice"),
        "narrow": (lambda t: {**t, **narrow}, r"expected \(5, 112, 48\)"),
        "router": (without("block_sparse_moe.gate"), "layers.0.mlp.gate.weight is missing"),
        "more": (lambda t: {**t, one.replace("3", "7"): t[one]}, r"has experts \[0, .* 4, 7\]"),
    }
    for name, (change, message) in cases.items():
        with pytest.raises(CheckpointError, match=message):
            open_hf(rewrite_tensors(twin, tmp_path / name, change))


def test_expert_count_is_read_from_either_name() -> None:
    """num_experts and num_local_experts are equivalent; contradictory and impossible settings are
    refused.
    """
    mixtral, qwen = (theirs(kind).to_dict() for kind in ("mixtral", "qwen3_moe"))
    qwen = {k: v for k, v in qwen.items() if k not in ("num_experts", "num_local_experts")}
    read = [read_config({**qwen, name: 7})[0] for name in ("num_experts", "num_local_experts")]
    assert read[0] == read[1] and read[0].num_experts == 7
    assert [read[0].is_moe_layer(i) for i in range(2)] == [False, True]
    sparse = read_config({**qwen, "num_experts": 7, "decoder_sparse_step": 2})[0]
    assert sparse.mlp_layer_types == ("dense", "sparse")
    for change, message in (
        ({"num_experts": 6}, "num_experts 6 and num_local_experts 5 differ|num_local_experts"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) exceeds num_local_experts \(5\)"),
        ({"num_local_experts": 0}, "num_local_experts must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config({**mixtral, **change})
    with pytest.raises(ConfigError, match="decoder_sparse_step must be a whole number >= 1"):
        read_config({**qwen, "num_experts": 7, "decoder_sparse_step": 0})


@pytest.mark.parametrize("format", ["int4-g64", pytest.param("int8", marks=pytest.mark.full)])
def test_quantized_stacks_round_trip_and_export(twin: Twin, tmp_path: Path, format: str) -> None:
    """Quantized stacks are saved and loaded with identical logits and exported as dense weights;
    the router stays float32.
    """
    ids, path = tokens(1, 9), STACK.format("gate_proj")
    lm = jaxllm.load(twin.directory, quantize=format)
    leaves = dict(flatten(lm.params))
    assert leaves[path].shape == (5, 56, 48) and leaves["layers.0.mlp.gate.weight"].ndim == 2
    assert isinstance(leaves["layers.0.mlp.gate.weight"], jax.Array)  # the router is not quantized
    bytes_each = {"int8": 128 + 4, "int4-g64": 64 + 8}[format]  # rows of 48 are padded to 128
    assert leaves[path].nbytes == 5 * 56 * bytes_each
    lm.save(tmp_path / "own")
    again = jaxllm.load(tmp_path / "own")
    np.testing.assert_array_equal(
        logits(again.model, again.params, ids), logits(lm.model, lm.params, ids)
    )
    write_hf(tmp_path / "hf", dequantize_checkpoint(open_native(tmp_path / "own")))
    wide = map_leaves(lambda _, leaf: to_dense(leaf, jnp.float32), lm.params)
    back = load_twin(tmp_path / "hf")
    jax.tree.map(np.testing.assert_array_equal, dict(flatten(back.params)), dict(flatten(wide)))
    assert_close(logits(lm.model, lm.params, ids), back.logits(ids))


def test_tokens_are_batch_independent_and_padding_is_skipped(
    twin: Twin,
) -> None:
    """A row has the same logits in any batch, and padding runs no expert."""
    ids = tokens(3, 5)
    at = np.where(np.arange(5) < [[5], [3], [0]], np.arange(5), -1).astype(np.int32)
    length = np.array([5, 3, 0], np.int32)
    read = frozenset({"mlp.output"})
    run = jax.jit(lambda *given: twin.model.apply({"params": twin.params}, *given, read=read))
    batched, single = run(ids, at, length), run(ids[:1], at[:1], length[:1])
    np.testing.assert_allclose(batched.logits[:1], single.logits, rtol=1e-5, atol=1e-5)
    mlp = np.asarray(batched.layers[0].sites["mlp.output"])
    np.testing.assert_array_equal(mlp.any(axis=2), at >= 0)


def test_unnormalized_topk_weights_equal_transformers(tmp_path: Path) -> None:
    """With norm_topk_prob false, logits equal transformers'; with true they differ."""
    changes = {"norm_topk_prob": False, "mlp_only_layers": [], "sliding_window": 4}
    save_random(tmp_path, "qwen3_moe", num_hidden_layers=1, use_sliding_window=True, **changes)
    raw = load_twin(tmp_path)
    ids = tokens(2, 11)
    assert_close(logits(raw.model, raw.params, ids), raw.logits(ids))
    same = models.build(replace(raw.config, norm_topk_prob=True))
    assert np.abs(logits(same, raw.params, ids) - raw.logits(ids)).max() > 1e-2


def test_weight_bytes_count_only_selected_experts(twin: Twin) -> None:
    """Each token reads 2 of 5 experts: weight_bytes counts 2/5 of the stacks for one row, 4/5 for
    two and all for three.
    """
    lm = LM(twin.config, twin.model, twin.params, None, {}, Path("mixture"))
    sizes = {path: leaf.nbytes for path, leaf in flatten(twin.params) if "embed" not in path}
    stacks = sum(size for path, size in sizes.items() if ".experts." in path)
    assert stacks == 3 * 5 * 56 * 48 * 4
    rest = sum(sizes.values()) - stacks
    assert bench.weight_bytes(lm) == rest + stacks * 2 // 5
    assert bench.weight_bytes(lm, 2) == rest + stacks * 4 // 5  # at most
    assert bench.weight_bytes(lm, 3) == rest + stacks


def test_capacity_takes_first_choices_first() -> None:
    """Experts take first choices before second ones, up to ceil(factor x tokens x 2 / experts);
    padding takes no room.
    """
    rng = np.random.default_rng(0)
    expert_Tk = np.stack([rng.permutation(4)[:2] for _ in range(19)]).astype(np.int32)
    for factor in (0.5, 1.0, 4.0):
        room, wanted = int(np.ceil(factor * 19 * 2 / 4)), expert_Tk.copy()
        count = np.zeros(4, int)
        for choice in range(2):
            for token in range(19):
                expert = expert_Tk[token, choice]
                count[expert] += 1
                if count[expert] > room:
                    wanted[token, choice] = -1
        found = apply_capacity(jnp.asarray(expert_Tk), 4, factor)
        np.testing.assert_array_equal(found, wanted)
    assert (np.asarray(found) == expert_Tk).all()
    padded = jnp.asarray(expert_Tk).at[:10].set(-1)  # takes no room
    np.testing.assert_array_equal(apply_capacity(padded, 4, 1.0), padded)


def test_dropped_tokens_pass_through_residual() -> None:
    """A token beyond the capacity has the residual stream as its output."""
    model, params = random_model("mixtral", num_hidden_layers=1)
    tight = models.build(replace(model.config, capacity_factor=1e-9))  # one token per expert
    ids = tokens(1, 30)
    at, length = np.arange(30, dtype=np.int32)[None], np.full(1, 30, np.int32)
    read = frozenset({"mlp.output"})
    free, bound = (
        m.apply({"params": params}, ids, at, length, read=read).layers[0] for m in (model, tight)
    )
    dropped = ~np.asarray(bound.sites["mlp.output"]).any(axis=2)[0]
    assert 20 <= dropped.sum() < 30
    stream = np.asarray(free.x - free.sites["mlp.output"])
    np.testing.assert_allclose(np.asarray(bound.x)[0, dropped], stream[0, dropped], atol=1e-5)


def test_native_config_stores_capacity_factor() -> None:
    model, _ = random_model("mixtral")
    config = replace(model.config, capacity_factor=1.25)
    assert models.config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    directory = tmp_path_factory.mktemp("glm4_moe")
    save_random(directory, "glm4_moe")
    return load_twin(directory)


def test_layers_of_further_tokens_are_not_read(glm: Twin, tmp_path: Path) -> None:
    """A layer past the last one that predicts a further token is left out, but no other one; and
    so is the module of Qwen3-Next's.
    """

    def add_layer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        copy = {n.replace("layers.1.", "layers.2."): x for n, x in tensors.items() if "ers.1." in n}
        return {**tensors, **copy}

    def add_further(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = ("model.layers.2.eh_proj.weight", "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight")
        return {**add_layer(tensors), **dict.fromkeys(names, np.zeros((3, 4), np.float32))}

    read = open_hf(rewrite_tensors(glm, tmp_path / "mtp", add_further))
    assert read.tensors.keys() == open_hf(glm.directory).tensors.keys()
    with pytest.raises(CheckpointError, match=r"layers\.2\..* is not part of this model"):
        open_hf(rewrite_tensors(glm, tmp_path / "more", add_layer))


def test_selection_bias_stays_float32(glm: Twin) -> None:
    """In bfloat16, also after quantization, the numbers that select experts are exact."""
    path = "layers.1.mlp.selection.bias"
    exact = np.asarray(dict(flatten(glm.params))[path])
    lm = jaxllm.load(glm.directory, dtype="bfloat16")
    for params in (lm.params, quantize(lm.params, "int8")):
        bias = dict(flatten(params))[path]
        assert bias.dtype == jnp.float32
        np.testing.assert_array_equal(bias, exact)
    assert match_precision(lm.params, lm.model.precision) == lm.model.precision
