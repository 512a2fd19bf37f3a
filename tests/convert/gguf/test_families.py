"""Every family in GGUF: files of llama.cpp's converter are read, and written identically."""

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.config.model import Rope
from jaxllm.convert.gguf.reader import open_gguf
from jaxllm.convert.gguf.writer import write_gguf
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.formats import to_dense, weight_format
from jaxllm.weights.paths import flatten
from tests.convert.gguf.gguf_files import ARCHS, overwrite, raw_of, raw_tensors, write
from tests.tiny_models import ROPES, assert_close, save_random, saved_once, tokens

# Head sizes differ from hidden_size / heads if a family allows it; rows are whole blocks.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "rms_norm_eps": 1e-3, "max_position_embeddings": 97,
}  # fmt: skip
RARE, SCALES = ("lfm2_moe", "deepseek_v2", "deepseek_v3"), ("mscale", "mscale_all_dim")
LATENT = {
    "num_hidden_layers": 2, "num_key_value_heads": 4, "moe_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "attention_bias": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 8},
    # One layer with a sliding window, one without.
    "gemma2": {
        "head_dim": 8, "num_hidden_layers": 2, "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 8, "num_hidden_layers": 6, "query_pre_attn_scalar": 8,
        "sliding_window_pattern": 6,
    },
    "phi3": {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 500.0,
        "short_factor": [1.0, 1.1, 1.2, 1.5, 1.75, 2.0],
        "long_factor": [2.0, 3.5, 4.0, 5.0, 6.0, 7.0], "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 40,
    }},
    "mixtral": {"sliding_window": None},
    "olmo2": {},
    "olmo3": {
        "num_hidden_layers": 4,
        "rope_parameters": {
            "full_attention": ROPES["yarn"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "ministral3": {"head_dim": 8},
    "granite": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "qwen3_moe": {"head_dim": 8, "mlp_only_layers": [], "moe_intermediate_size": 32},
    "gpt_neox": {},
    "glm4": {"head_dim": 24, "rms_norm_eps": 1.5625e-7},
    "glm4_moe": {
        "num_hidden_layers": 2, "head_dim": 8, "moe_intermediate_size": 32, "n_group": 1,
        "topk_group": 1,
    },
    "seed_oss": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "exaone4": {"num_hidden_layers": 2, "sliding_window_pattern": 2},
    "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 4, "tie_word_embeddings": True},
    "gpt_oss": {
        "head_dim": 8, "num_hidden_layers": 2, "swiglu_limit": 7.0,
        "rope_parameters": {**ROPES["yarn"], "truncate": False},
    },
    "gemma4_text": {
        "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 32,
    },
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        "num_hidden_layers": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {**LATENT, "topk_method": "greedy", "mlp_bias": False},
    "deepseek_v3": {**LATENT, "rope_parameters": {**ROPES["yarn"], **dict.fromkeys(SCALES, 0.7)}},
    "mistral": {"head_dim": 8, "sliding_window": 5},
    "gpt2": {"n_layer": 1, "n_embd": 64, "n_inner": 96, "n_head": 4},
}  # fmt: skip
IDS = tokens(2, 9)


def mark_rare(family: str, *values: str) -> Any:
    """Return a test's parameters, marked for `make test-full` if others share the family's code."""
    return pytest.param(family, *values, marks=[pytest.mark.full] if family in RARE else [])


# Families whose tensor layout differs from Llama's; `make test-full` runs all.
EVERY_DAY = [
    pytest.param(
        family,
        marks=[] if family in ("gemma2", "phi3", "mixtral", "gpt_neox") else [pytest.mark.full],
    )
    for family in FAMILIES
    # tests/convert/gguf/test_reader.py, tests/convert/test_mxfp4.py; keys of heads are transposed
    if family not in ("gpt2", "gpt_oss", "deepseek_v2", "deepseek_v3")
]
TYPES = [
    *(mark_rare(family, "Q8_0") for family in FAMILIES),
    *((family, name) for family in ("mistral", "gpt2") for name in ("F32", "F16", "BF16", "Q4_0")),
    *(
        pytest.param(family, "F32", marks=pytest.mark.full)
        for family in FAMILIES
        if family not in ("mistral", "gpt2")
    ),
]


def sizes_of(family: str) -> dict[str, Any]:
    if family == "granitemoehybrid":
        dense = {"layer_types": ["full_attention"] * 6, "mamba_n_heads": 1, "mamba_n_groups": 1}
        return {**SIZES, **dense, "shared_intermediate_size": 96, "spread": 0.1}
    sizes = {**({} if family == "gpt2" else SIZES), **FAMILIES[family], "spread": 0.1}
    names = {"gpt_neox": "layer_norm_eps", "cohere2": "layer_norm_eps"}
    names |= dict.fromkeys(("lfm2", "lfm2_moe"), "norm_eps")
    if family in names:
        sizes[names[family]] = sizes.pop("rms_norm_eps")
    return sizes


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a tiny model, by its family."""
    return saved_once(tmp_path_factory, sizes_of)


def logits(directory: Path) -> np.ndarray:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor(IDS)).logits.numpy())


@pytest.mark.parametrize("family", [mark_rare(x) for x in FAMILIES])
def test_gguf_family_logits_equal_transformers(family: str, directory: Any, tmp_path: Path) -> None:
    """The GGUF file of each family has the configuration and weights of its Hugging Face
    checkpoint, and transformers' logits.
    """
    source = directory(family)
    lm = jaxllm.load(write(tmp_path / "a.gguf", source))
    hf = jaxllm.load(source)
    assert lm.config == hf.config  # and so everything derived from it
    expected = dict(flatten(hf.params))
    found = dict(flatten(lm.params))
    assert found.keys() == expected.keys()
    for path, weight in found.items():  # 1 + w in float32 has fewer bits than w
        plus = np.float32(family in ("gemma2", "gemma3_text") and "norm" in path)
        np.testing.assert_array_equal(weight + plus, expected[path] + plus, path)
        atol = 2.0**-24 if plus else 0
        np.testing.assert_allclose(weight, expected[path], rtol=0, atol=atol, err_msg=path)
    ours = jaxllm.forward(lm.model, lm.params, None, IDS).logits
    assert_close(ours, logits(source))


@pytest.mark.parametrize(("family", "arch"), [("qwen2", "QWEN2VL"), ("qwen3", "QWEN3VL")])
def test_text_models_of_vision_files_are_read(
    family: str, arch: str, directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For text alone, the sections of rotary positions of Qwen's vision models are equal."""
    monkeypatch.setitem(ARCHS, family, gguf.MODEL_ARCH[arch])
    source = directory(family)
    file = write(
        tmp_path / "a.gguf", source, also=lambda w: w.add_rope_dimension_sections([2, 1, 1, 0])
    )
    assert open_gguf(file).config == open_checkpoint(source).config


def test_layers_of_further_tokens_are_not_read(directory: Any, tmp_path: Path) -> None:
    """A GLM-4-MoE file counts the layer that predicts a further token as a block."""
    source = directory("glm4_moe")

    def also(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(3)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.2.nextn.eh_proj.weight", np.zeros((2, 3), np.float32))

    read = open_gguf(write(tmp_path / "a.gguf", source, also=overwrite(also)))
    assert read.config == open_checkpoint(source).config


@pytest.mark.full
def test_glm_flash_is_deepseek_v3_in_gguf(tmp_path: Path) -> None:
    """llama.cpp has one architecture for both."""
    save_random(source := tmp_path / "hf", "glm4_moe_lite", spread=0.1)
    write_gguf(tmp_path / "a.gguf", open_checkpoint(source), "F32")
    lm = jaxllm.load(tmp_path / "a.gguf")
    assert lm.config.model_type == "deepseek_v3"
    assert_close(jaxllm.forward(lm.model, lm.params, None, IDS).logits, logits(source))


def test_granite_4_is_granite_in_gguf(directory: Any, tmp_path: Path) -> None:
    """llama.cpp's converter writes Granite 4 without Mamba layers as Granite, with keys that only
    Mamba layers would read.
    """
    source = directory("granitemoehybrid")

    def also(writer: gguf.GGUFWriter) -> None:
        writer.add_ssm_conv_kernel(4)
        writer.add_expert_shared_feed_forward_length(96)

    there = write(tmp_path / "a.gguf", source, also=also)
    checkpoint = open_checkpoint(source)
    write_gguf(tmp_path / "b.gguf", checkpoint, "F32")
    assert raw_tensors(tmp_path / "b.gguf") == raw_tensors(there)
    for file in (there, tmp_path / "b.gguf"):
        lm = jaxllm.load(file)
        assert lm.config.model_type == "granite"
        assert_close(jaxllm.forward(lm.model, lm.params, None, IDS).logits, logits(source))
    still: Any = dataclasses.replace(checkpoint.config, uses_rope=False)
    with pytest.raises(ConfigError, match="uses_rope False"):
        write_gguf(tmp_path / "c.gguf", dataclasses.replace(checkpoint, config=still), "F32")


def snapped(source: Path, target: Path) -> Path:
    """Copy a model with its matrices rounded to values that Q8_0 holds exactly."""
    kind = gguf.GGMLQuantizationType.Q8_0
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for name, array in tensors.items():
        # Neither routers nor convolutions.
        if array.ndim > 1 and not name.endswith((".gate.weight", ".conv.weight")):
            raw = gguf.quants.quantize(array.astype(np.float32), kind)
            tensors[name] = gguf.quants.dequantize(raw, kind).reshape(array.shape)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("family", EVERY_DAY)
def test_q8_0_families_equal_transformers(family: str, directory: Any, tmp_path: Path) -> None:
    """Q8_0 matrices stay integers with the exact values, and the logits equal transformers'."""
    source = snapped(directory(family), tmp_path / "hf")
    raw = raw_of(gguf.GGMLQuantizationType.Q8_0)
    lm = jaxllm.load(write(tmp_path / "a.gguf", source, raw))
    expected = dict(flatten(jaxllm.load(source).params))
    kept = {path for path, x in flatten(lm.params) if weight_format(x) == "int8-g32-f16"}
    vectors = ("norm", "bias", "mlp.gate.weight", "conv.conv", "layer_scalar")
    assert kept == {path for path in expected if not any(name in path for name in vectors)}
    for path in kept:  # bit for bit, rows in order
        np.testing.assert_array_equal(
            to_dense(dict(flatten(lm.params))[path]), expected[path], path
        )
    assert_close(jaxllm.forward(lm.model, lm.params, None, IDS).logits, logits(source))


@pytest.mark.parametrize(("family", "name"), TYPES)
def test_written_gguf_equals_llama_cpp_converter(
    family: str, name: str, directory: Any, tmp_path: Path
) -> None:
    """A written file, also one rewritten from GGUF, has the bytes and settings that llama.cpp's
    converter writes.
    """
    source = directory(family)
    there = write(tmp_path / "a.gguf", source, raw_of(gguf.GGMLQuantizationType[name]))
    checkpoint = open_checkpoint(source)
    write_gguf(tmp_path / "b.gguf", checkpoint, name)
    assert raw_tensors(tmp_path / "b.gguf") == raw_tensors(there)
    assert open_checkpoint(tmp_path / "b.gguf").config == checkpoint.config
    # Again from the GGUF file: integers are kept, and fused tensors are joined.
    write_gguf(tmp_path / "c.gguf", open_checkpoint(there), name)
    assert raw_tensors(tmp_path / "c.gguf") == raw_tensors(there)
    first, second = (gguf.GGUFReader(tmp_path / f"{x}.gguf").fields for x in "ab")
    arch = gguf.MODEL_ARCH_NAMES[ARCHS[checkpoint.config.model_type]]
    for key, field in first.items():  # our files also contain derivable keys
        if key.startswith(f"{arch}."):
            assert second[key].contents() == field.contents(), key


def test_unsupported_expert_types_are_dequantized(directory: Any, tmp_path: Path) -> None:
    """Q4_1 experts, which cannot be stacked as integers, become the package's dequantized values;
    attention stays quantized.
    """
    kind, source = gguf.GGMLQuantizationType.Q4_1, directory("mixtral")
    lm = jaxllm.load(write(tmp_path / "a.gguf", source, raw_of(kind)))
    params, exact = dict(flatten(lm.params)), dict(flatten(jaxllm.load(source).params))
    path = "layers.0.mlp.experts.down_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(np.asarray(exact[path]), kind), kind)
    np.testing.assert_array_equal(np.asarray(params[path], np.float32), expected)
    assert weight_format(params["layers.0.self_attn.o_proj.weight"]).startswith("offset")
    assert np.isfinite(np.asarray(jaxllm.forward(lm.model, lm.params, None, IDS).logits)).all()


def test_gemma3_reads_sliding_window_pattern(directory: Any, tmp_path: Path) -> None:
    """A Gemma 3 file may list its sliding layers or their period, and a local RoPE base."""
    sliding = [False, True, True, False, True, True]

    def also(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window_pattern(sliding)
        writer.add_float32("gemma3.rope.freq_base_swa", 500.0)

    config: Any = open_gguf(write(tmp_path / "a.gguf", directory("gemma3_text"), also=also)).config
    assert [config.is_sliding(i) for i in range(6)] == sliding
    assert config.local_rope.rope_theta == 500

    def period(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)

    config = open_gguf(write(tmp_path / "b.gguf", directory("gemma3_text"), also=period)).config
    assert [config.is_sliding(i) for i in range(6)] == [True, False] * 3


BAD: dict[str, tuple[str, Callable[[gguf.GGUFWriter], object], str]] = {
    "Granite without RoPE": (
        "granite", lambda w: w.add_rope_scaling_finetuned(False), "finetuned must be True",
    ),
    "unnormalized experts": (
        "qwen3_moe", lambda w: w.add_expert_weights_norm(False), "expert_weights_norm must be True",
    ),
    "shared experts": (
        "mixtral", lambda w: w.add_expert_shared_count(1), "expert_shared_count must be 0",
    ),
    "more experts": ("mixtral", lambda w: w.add_expert_count(6), "experts.down_proj.weight"),
    "a sliding window in Qwen3": (
        "qwen3", lambda w: w.add_sliding_window(5), "qwen3.attention.sliding_window is not supp",
    ),
    "a window period of 0": (
        "gemma3_text", lambda w: w.add_uint32("gemma3.attention.sliding_window_pattern", 0),
        "layer_types has 0 entries",
    ),
    "a short window pattern": (
        "gemma3_text", lambda w: w.add_sliding_window_pattern([True, False]),
        "layer_types has 0 entries",
    ),
    "experts per layer": (
        "llama", lambda w: w.add_array("llama.expert_count", [4, 8]), "differs from layer",
    ),
    "a fused tensor with fewer rows": (
        "phi3", lambda w: w.add_head_count_kv(1), "blk.0.attn_qkv.weight has shape",
    ),
    "one of two factor lists": (
        "llama", lambda w: w.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)),
        "must both exist",
    ),
    "more rotated dimensions than the head": (
        "gpt_neox", lambda w: w.add_rope_dimension_count(18), "rope.dimension_count is 18",
    ),
    "an unknown key": (
        "llama", lambda w: w.add_uint32("llama.expert_feed", 3), "llama.expert_feed is not",
    ),
    "experts": ("llama", lambda w: w.add_expert_count(8), "llama.expert_used_count is missing"),
    "an attention scale": (
        "llama", lambda w: w.add_attention_scale(0.5), "attention.scale must be",
    ),
    "different layers": (
        "llama", lambda w: w.add_array("llama.attention.head_count_kv", [1, 2]),
        "differs from layer",
    ),
    "partial RoPE": (
        "llama", lambda w: w.add_uint32("llama.rope.dimension_count", 4), "supported: got 4",
    ),
    "longrope": (
        "llama", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        "'longrope' is not",
    ),
    "another yarn": (
        "llama",
        lambda w: (
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN), w.add_rope_scaling_factor(2.0),
            w.add_rope_scaling_yarn_attn_factor(1.5),
        ),
        "yarn_attn_factor must be 1.0, got 1.5",
    ),
    "a string for a number": (
        "llama", lambda w: w.add_string("llama.block_count", "two"), "num_hidden",
    ),
    "an adapter": ("llama", lambda w: w.add_type("adapter"), "is an adapter"),
    "another architecture": (
        "llama", lambda w: w.add_string("general.architecture", "mamba"), "'mamba'",
    ),
    "an invalid token id": (
        "llama", lambda w: w.add_int32("tokenizer.ggml.eos_token_id", -7), "eos_token",
    ),
    "more layers": (
        "llama", lambda w: w.add_uint32("llama.block_count", 2), "layers.1.input_layernorm",
    ),
    "fewer heads": (
        "llama", lambda w: w.add_uint32("llama.attention.head_count", 2),
        "blk.0.attn_q.weight has 32 rows",
    ),
    "an unknown tensor": (
        "llama", lambda w: w.add_tensor("blk.0.ssm.weight", np.zeros(3, np.float32)),
        "ssm.weight is not",
    ),
    "divisors of another head size": (
        "llama", lambda w: w.add_tensor("rope_freqs.weight", np.full(3, 2, np.float32)),
        "divisors has 3",
    ),
    "negative divisors": (
        "llama", lambda w: w.add_tensor("rope_freqs.weight", np.full(4, -1, np.float32)),
        "not positive",
    ),
    "keys and values in one matrix": (
        "deepseek_v2", lambda w: w.add_string("deepseek2.attention.key_length_mla", "x"),
        "the file is too old",
    ),
    "many layers": ("smollm3", lambda w: w.add_block_count(2**32 - 1), "<= 1024, got 4294967295"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_gguf_settings_are_refused(case: str, directory: Any, tmp_path: Path) -> None:
    family, change, message = BAD[case]
    file = write(tmp_path / "a.gguf", directory(family), also=overwrite(change))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        open_gguf(file)


def test_unknown_keys_are_ignored_unless_mathematical(directory: Any, tmp_path: Path) -> None:
    """Unknown keys are ignored and reported, unless strict; keys that affect the computation raise
    an error.
    """

    def harmless(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("llama.mystery", 3)
        writer.add_bool("llama.swin_norm", False)

    file = write(tmp_path / "a.gguf", directory("llama"), also=harmless)
    plain = open_gguf(write(tmp_path / "b.gguf", directory("llama")))
    opened = open_gguf(file)
    assert (opened.config, opened.ignored) == (plain.config, ("llama.mystery",))
    assert plain.ignored == ()
    with pytest.raises(ConfigError, match=r"unknown keys llama\.mystery"):
        open_gguf(file, strict=True)
    for key, reason in (
        ("llama.attention.mystery", "attention.mystery is not supported"),
        ("llama.router_logit_softcapping", "router_logit_softcapping must be 0.0, got 3"),
    ):
        also = partial(gguf.GGUFWriter.add_uint32, key=key, val=3)
        with pytest.raises(ConfigError, match=reason):
            open_gguf(write(tmp_path / "c.gguf", directory("llama"), also=also))


YARN = Rope(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=24)
UNWRITTEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "windows": ("qwen2", {"sliding_window": 5}, "sliding_window 5"),
    "other NoPE layers": ("smollm3", {"turns": (True,) * 4}, "turns"),
    "another local base": (
        "gemma3_text", {"local_rope": Rope(rope_type="default", rope_theta=500.0)}, "local_rope",
    ),
    "another scale": ("gemma2", {"query_pre_attn_scalar": 9}, "query_pre_attn_scalar 9"),
    "unnormalized probabilities": ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
    "an activation": ("gpt_neox", {"hidden_act": "relu"}, "hidden_act 'relu'"),
    "an exact GELU": ("gpt2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "attention scaled by layer": (
        "gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse",
    ),
    "dynamic RoPE": (
        "llama", {"rope": Rope(rope_type="dynamic", rope_theta=1e4, factor=2.0)}, "'dynamic'",
    ),
    "an attention factor": (
        "llama",
        {"rope": dataclasses.replace(YARN, attention_factor=1.3)},
        "attention_factor",
    ),
    "a magnitude of one, whose key llama.cpp reads for Ministral 3 only": (
        "llama",
        {"rope": dataclasses.replace(YARN, mscale=1.0, mscale_all_dim=1.0)},
        "mscale",
    ),
    "scales that change the magnitude": (
        "deepseek_v3", {"rope": dataclasses.replace(YARN, mscale=0.7, mscale_all_dim=1.0)},
        r"mscale=0\.7",
    ),
    "groups ranked by one expert": ("deepseek_v2", {"n_group": 2}, "n_group 2"),
    "partial RoPE": (
        "olmo2",
        {"rope": Rope(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)},
        "partial_rotary_factor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNWRITTEN)
def test_unsupported_settings_are_not_written(case: str, directory: Any, tmp_path: Path) -> None:
    """A setting that GGUF cannot express raises an error, and no file is written."""
    family, changes, message = UNWRITTEN[case]
    checkpoint = open_checkpoint(directory(family))
    config: Any = dataclasses.replace(checkpoint.config, **changes)
    with pytest.raises(ConfigError, match=message):
        write_gguf(tmp_path / "a.gguf", dataclasses.replace(checkpoint, config=config), "F32")
    assert not (tmp_path / "a.gguf").exists()
