"""GPTQ and AWQ checkpoints: integers load exactly, unsupported settings are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import jaxllm
from jaxllm.convert.gptq_awq import make_rules
from jaxllm.convert.hf import open_hf
from jaxllm.convert.quantization_config import Scheme, read_scheme
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.formats import weight_format
from jaxllm.weights.paths import flatten
from tests.conftest import succeed
from tests.convert import hub
from tests.convert.test_convert import edit_config, edit_tensors
from tests.tiny_models import tokens

# Options of hub.write, and the expected weight formats.
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "gptq": ({}, {"int4-g32-zp-f16"}),
    "gptq, symmetric": ({"symmetric": True}, {"int4-g32-f16"}),
    "gptq, second version": ({"less": 0}, {"int4-g32-zp-f16"}),
    "gptq, act-order": ({"act_order": True}, {"ordered/int4-g32-zp-f16"}),
    "gptq, a row": ({"group": -1, "act_order": True}, {"int4-g128-zp-f16"}),
    "gptq, 3 bits": ({"bits": 3}, {"int3-g32-zp-f16"}),
    "gptq, 2 bits, act-order": (
        {"bits": 2, "symmetric": True, "act_order": True}, {"ordered/int2-g32-f16"},
    ),
    "gptq, 8 bits, a row": ({"bits": 8, "group": -1, "symmetric": True}, {"int8-f16"}),
    "gptq, 8 bits": ({"bits": 8}, {"int8-g32-zp-f16"}),
    "gptq, wide scales": ({"group": 64, "scales": np.float32}, {"int4-g64-zp"}),
    "gptq, odd groups": ({"group": 96}, {"int4-g32-zp-f16"}),
    "awq": ({"method": "awq"}, {"int4-g32-zp-f16"}),
    "awq, large groups": ({"method": "awq", "group": 256}, {"int4-g128-zp-f16"}),
    "awq, the head too": ({"method": "awq", "group": -1, "head": True}, {"int4-g128-zp-f16"}),
}  # fmt: skip


def unpack_codes(leaf: Any) -> np.ndarray:
    """Unpack the integer codes of a leaf's bytes, in the layout of weights.types.bitpack."""
    data, bits = np.asarray(leaf.data), leaf.bits
    i = np.arange(data.shape[1] * 8 // bits)
    block, j, shift = i // 32 % 4, i % 16, (4 * (i // 16 % 2)).astype(np.uint8)
    if bits == 8:
        return data.astype(np.int16) + (128 if data.dtype == np.int8 else 0)
    if bits == 4:
        return data[:, 16 * (i // 32) + j] >> shift & 15
    begin = i // 128 * 16 * bits
    lower = data[:, begin + 16 * (block // 2) + j] >> shift + (2 * (block % 2)).astype(np.uint8) & 3
    if bits == 2:
        return lower
    return lower | (data[:, begin + 32 + j] >> shift + block.astype(np.uint8) & 1) << 2


def dequantize_leaf(leaf: Any) -> np.ndarray:
    """Dequantize a leaf in NumPy by the formula of its class."""
    if leaf.is_composite:
        out = np.empty(leaf.shape, np.float32)
        out[:, np.asarray(leaf.order)] = dequantize_leaf(leaf.weight)
        return out
    q, scale = unpack_codes(leaf).astype(np.float32), np.asarray(leaf.scale)
    midpoint = 2 ** (leaf.bits - 1)
    zero = np.full(scale.shape, midpoint) if leaf.zero is None else np.asarray(leaf.zero)
    repeated = [np.repeat(x.astype(np.float32), q.shape[1] // x.shape[1], 1) for x in (zero, scale)]
    weight = (q - repeated[0]) * repeated[1]
    assert not weight[:, leaf.shape[1] :].any(), "padding must decode to zero"
    return weight[:, : leaf.shape[1]]


def assert_exact(directory: Path, expected: dict[str, np.ndarray]) -> dict[str, Any]:
    """Check every quantized matrix of a checkpoint, bit for bit; return them by path."""
    found = {p: x for p, x in flatten(jaxllm.load(directory).params) if not hasattr(x, "at")}
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        np.testing.assert_array_equal(dequantize_leaf(leaf), expected[path], err_msg=path)
    return found


@pytest.mark.parametrize("case", CASES)
def test_loaded_codes_decode_to_exact_values(case: str, tmp_path: Path) -> None:
    """Every GPTQ or AWQ matrix has the expected format and decodes bit for bit to the values that
    its file encodes.
    """
    options, formats = CASES[case]
    model = hub.random_model("llama", num_hidden_layers=1, vocab_size=136)
    expected = hub.write(tmp_path, model, **options)
    found = assert_exact(tmp_path, expected)
    assert {weight_format(leaf) for leaf in found.values()} == formats


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"act_order": True, "shards": True}),
        pytest.param("llama", {"method": "awq", "group": 64}, marks=pytest.mark.full),
        ("gpt2", {"bits": 3, "group": -1, "symmetric": True}),
        ("phi3", {"act_order": True}),  # its fused matrices are split here
        ("gpt_neox", {"method": "awq"}),
    ],
)
def test_logits_equal_transformers_on_dequantized_weights(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Logits of a GPTQ or AWQ checkpoint equal transformers' logits with the
    dequantized weights.
    """
    model = hub.random_model(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 1})
    hub.write(tmp_path, model, **options)
    lm = jaxllm.load(tmp_path, dtype="float32")
    token_BT = tokens(2, 19)
    with torch.no_grad():
        theirs = model(torch.tensor(token_BT)).logits.numpy()
    ours = np.asarray(jaxllm.forward(lm.model, lm.params, None, token_BT).logits)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("method", ["gptq", pytest.param("awq", marks=pytest.mark.full)])
def test_commands_accept_quantized_directories(
    method: str, tmp_path: Path, shallow: Any, run: Any
) -> None:
    """info, generate and convert read GPTQ and AWQ: greedy text equals transformers, native files
    are bit-identical, --to-hf writes the exact values.
    """
    source, theirs, ours, back = shallow("llama"), *(tmp_path / n for n in ("hub", "own", "back"))
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    expected = hub.write(theirs, model, method, act_order=method == "gptq")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / file, theirs)
    out, _ = succeed(run, "info", theirs, "--json")
    name = "ordered/int4-g32-zp-f16" if method == "gptq" else "int4-g32-zp-f16"
    assert dict(json.loads(out)["quantized"])[r"layers\.\d+\.mlp\.up_proj\.weight"] == name

    prompt = "Once upon a time"
    tokenizer = Tokenizer.from_directory(source)
    ids = torch.tensor([tokenizer.encode(prompt, bos=True)])
    greedy = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    text, _ = succeed(run, "generate", theirs, "-p", prompt, "-n", 12, "--dtype", "float32")
    assert text.strip() == tokenizer.decode(greedy).strip()

    assert run("convert", theirs, ours)[0] == 0
    own, first = jaxllm.load(ours), jaxllm.load(theirs)
    assert own.model == first.model
    for a, b in zip(jax.tree.leaves(own.params), jax.tree.leaves(first.params), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    _, log = succeed(run, "convert", theirs, back, "--to-hf")
    assert "float32" in log
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    written = load_file(back / "model.safetensors")
    for path, array in expected.items():
        np.testing.assert_array_equal(written[f"model.{path}"].numpy(), array)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 5}, r"bits 5 is not supported \(known for gptq: 2, 3, 4, 8\)"),
        ({"bits": None}, "bits is missing"),
        ({"bits": True}, "bits True is not supported"),
        ({"group_size": 0}, "group_size must be -1 or a positive number, got 0"),
        ({"sym": 1}, "sym must be true or false, got 1"),
        ({"desc_act": "yes"}, "desc_act must be true or false"),
        ({"checkpoint_format": "marlin"}, "'marlin' is not supported .known: gptq, gptq_v2"),
        ({"format": "gptq_v2"}, "checkpoint_format 'gptq' differs from format 'gptq_v2'"),
        ({"is_marlin_format": True}, "is_marlin_format must be False"),
        ({"pack_dtype": "int8"}, "pack_dtype must be 'int32'"),
        ({"dynamic": {"+:.*mlp.*": {"bits": 8}}}, "dynamic sets options per module"),
        ({"rotation": "hadamard"}, "rotation is not supported"),
        ({"quant_method": "bitsandbytes"}, r"quant_method 'bitsandbytes' .*known: gptq, awq"),
        ({"quant_method": None}, "has no quant_method: MLX writes such"),
        ({"quant_method": "awq", "version": "gemv", "bits": 4}, "version must be 'gemm'"),
        ({"quant_method": "awq", "bits": 8}, r"bits 8 is not supported \(known for awq: 4\)"),
        ({"quant_method": "awq", "desc_act": True}, "desc_act must be False"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "'llm-awq' has another layout"),
    ],
)
def test_read_scheme_refuses_unsupported_settings(changes: dict[str, Any], reason: str) -> None:
    """read_scheme raises a ConfigError that names each unsupported or inconsistent setting."""
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
    if changes.get("quant_method") == "awq":
        del settings["checkpoint_format"]
    with pytest.raises(ConfigError, match=reason):
        read_scheme({**settings, **changes})


def test_read_scheme_ignores_irrelevant_settings() -> None:
    """Settings that do not affect decoding are ignored; quantization_config must be an object."""
    settings = {
        "quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False, "format": "gptq_v2",
        "meta": {"quantizer": ["gptqmodel:4.2"]}, "damp_percent": 0.05, "lm_head": False,
        "dynamic": {"-:lm_head": {}}, "exllama_config": {"version": 1}, "rotation": None,
    }  # fmt: skip
    assert read_scheme(settings) == Scheme(method="gptq", bits=4, group_size=None)
    with pytest.raises(ConfigError, match="quantization_config must be an object"):
        read_scheme([4])  # type: ignore[arg-type]


def test_tensor_errors_are_reported_together(tmp_path: Path) -> None:
    """All tensor errors of a damaged GPTQ checkpoint are listed in one CheckpointError."""
    hub.write(tmp_path, hub.random_model("llama", num_hidden_layers=1), act_order=True)
    layer = "model.layers.0."

    def damage(state: dict[str, torch.Tensor]) -> None:
        del state[f"{layer}self_attn.q_proj.scales"]
        del state[f"{layer}self_attn.k_proj.g_idx"]
        state[f"{layer}self_attn.v_proj.qweight"] = torch.zeros(9, 32, dtype=torch.int32)
        state[f"{layer}self_attn.v_proj.scales"] = torch.zeros(2, 32, dtype=torch.int32)
        state[f"{layer}self_attn.o_proj.g_idx"][3] = 7
        state[f"{layer}mlp.gate_proj.g_idx"][:] = 0
        state[f"{layer}mlp.up_proj.weight"] = torch.zeros(96, 64)
        state["model.embed_tokens.qweight"] = torch.zeros(8, 8, dtype=torch.int32)
        state[f"{layer}mlp.down_proj.bias"] = torch.ones(64)
        del state["model.norm.weight"]

    edit_tensors(tmp_path, damage)
    with pytest.raises(CheckpointError) as caught:
        open_hf(tmp_path)
    errors = str(caught.value).splitlines()[1:]
    assert sorted(line.strip() for line in errors) == sorted(
        [
            "layers.0.self_attn.q_proj.scales is missing",
            "layers.0.self_attn.k_proj.g_idx is missing",
            "layers.0.self_attn.v_proj.qweight has shape (9, 32), expected (8, 32) for 4 bits in"
            " groups of 32",
            "layers.0.self_attn.v_proj.scales is int32, expected float16 or bfloat16 or float32",
            "layers.0.self_attn.o_proj.g_idx names groups 0 to 7, but there are 2",
            "layers.0.mlp.gate_proj.g_idx does not give each group 32 columns",
            "layers.0.mlp.up_proj.weight and layers.0.mlp.up_proj.qweight are both stored",
            "model.embed_tokens.qweight is not part of this model",
            "layers.0.mlp.down_proj.bias is not part of this model",
            "norm.weight is missing",
        ]
    )


def test_invalid_groups_and_zero_points_are_refused(tmp_path: Path) -> None:
    """Group indices or zero points that contradict the settings, small groups, infinite scales and
    missing quantized tensors raise CheckpointError.
    """
    model = hub.random_model("llama", num_hidden_layers=1)
    hub.write(tmp_path / "order", model, act_order=True)
    scheme = json.loads((tmp_path / "order/config.json").read_text())["quantization_config"]
    edit_config(tmp_path / "order", quantization_config={**scheme, "desc_act": False})
    with pytest.raises(CheckpointError, match="g_idx is not in order"):
        open_hf(tmp_path / "order")
    hub.write(tmp_path / "zeros", model, sym=True)  # although the weights are asymmetric
    with pytest.raises(CheckpointError, match=r"qzeros are not all 8, which symmetric"):
        open_hf(tmp_path / "zeros")
    hub.write(tmp_path / "small", model, group=16)
    with pytest.raises(CheckpointError, match="got 16, expected a multiple of 32"):
        open_hf(tmp_path / "small")
    hub.write(tmp_path / "endless", model)
    scales = "model.layers.0.mlp.up_proj.scales"
    edit_tensors(
        tmp_path / "endless", lambda state: state[scales].view(-1)[5:6].fill_(float("inf"))
    )
    with pytest.raises(CheckpointError, match=r"up_proj\.weight\.scale holds NaN or infinity"):
        jaxllm.load(tmp_path / "endless")
    hub.write(tmp_path / "none", model)
    edit_tensors(
        tmp_path / "none", lambda state: [state.pop(k) for k in list(state) if "proj" in k]
    )
    with pytest.raises(CheckpointError, match="no tensor is quantized"):
        open_hf(tmp_path / "none")


def test_writer_quirks_are_accepted(tmp_path: Path) -> None:
    """An all-zero bias that the model lacks, and second-version zero points under the first
    version's name, are accepted.
    """
    model = hub.random_model("llama", num_hidden_layers=1)
    expected = hub.write(tmp_path, model, symmetric=True, less=0, checkpoint_format="gptq")
    path = "model.layers.0.self_attn.k_proj.bias"
    edit_tensors(tmp_path, lambda state: state.update({path: torch.zeros(32)}))
    opened = open_hf(tmp_path)
    assert set(opened.formats.values()) == {"int4-g32-f16"}
    assert all(tensor.dtype != np.float64 for tensor in opened.tensors.values())
    assert_exact(tmp_path, expected)


def test_quantize_config_json_is_read_as_fallback(tmp_path: Path) -> None:
    """quantize_config.json is read if config.json has no quantization_config."""
    expected = hub.write(tmp_path, hub.random_model("llama", num_hidden_layers=1))
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    del scheme["quant_method"]
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"q_proj\.qweight is not part of this model"):
        open_hf(tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps(scheme))
    assert open_hf(tmp_path).formats.keys() == expected.keys()
    (tmp_path / "quantize_config.json").write_text(json.dumps({**scheme, "bits": 5}))
    with pytest.raises(ConfigError, match=r"quantize_config\.json: bits 5 is not supported"):
        open_hf(tmp_path)


@pytest.mark.parametrize(
    ("options", "settings", "base"),
    [
        ({"act_order": True}, {"desc_act": True, "sym": False}, "gptq_model-4bit-32g"),
        (
            {"group": -1, "symmetric": True, "bits": 8},
            {"sym": True, "model_file_base_name": None, "quant_method": "gptq"},
            "gptq_model-8bit--1g",
        ),
        ({"shards": True}, {"desc_act": False, "sym": False}, "gptq_model-4bit-32g"),
        ({}, {"sym": False, "model_file_base_name": "of-its-own"}, "of-its-own"),
        ({}, {"sym": False, "awq_gemm_checkpoint": False}, "model"),
    ],
)
def test_autogptq_folders_load_exactly(
    options: dict[str, Any], settings: dict[str, Any], base: str, tmp_path: Path
) -> None:
    """AutoGPTQ folders load exactly: settings from quantize_config.json, AutoGPTQ's weight file
    names, and first-version zero points by default.
    """
    expected = hub.write(tmp_path, hub.random_model("llama", num_hidden_layers=1), **options)
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path, quantization_config="delete")
    sizes = {"bits": scheme["bits"], "group_size": scheme["group_size"], "damp_percent": 0.01}
    (tmp_path / "quantize_config.json").write_text(json.dumps({**sizes, **settings}))
    for file in [*tmp_path.glob("model*.safetensors*")]:
        new = file.rename(tmp_path / file.name.replace("model", base, 1))
        if new.suffix == ".json":
            new.write_text(new.read_text().replace('"model-', f'"{base}-'))
    assert_exact(tmp_path, expected)


def test_missing_weights_error_lists_expected_files(tmp_path: Path) -> None:
    """If no weight file is found, the error lists the expected names and suggests a rename; a
    pickle is refused.
    """
    hub.write(tmp_path, hub.random_model("llama", num_hidden_layers=1))
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-32g.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_hf(tmp_path)
    assert "got gptq_model-4bit-32g.safetensors, expected model.safetensors" in str(caught.value)
    assert "AutoGPTQ's files need quantize_config.json" in str(caught.value)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    with pytest.raises(CheckpointError) as caught:
        open_hf(tmp_path)
    assert "expected gptq_model-4bit-128g.safetensors, " in str(caught.value)
    assert "Rename gptq_model-4bit-32g.safetensors to model.safetensors" in str(caught.value)
    (tmp_path / "gptq_model-4bit-32g.safetensors").rename(tmp_path / "gptq_model-4bit-128g.pt")
    with pytest.raises(CheckpointError, match=r"gptq_model-4bit-128g\.pt is a pickle"):
        open_hf(tmp_path)


def test_make_rules_splits_layers_that_differ() -> None:
    """make_rules uses one pattern for matrices that are alike in all layers, and one rule per layer
    for the rest.
    """
    paths = [f"layers.{i}.mlp.{n}.weight" for i in range(12) for n in ("up_proj", "down_proj")]
    formats = {path: "int4-g128" for path in paths if path != "layers.11.mlp.up_proj.weight"}
    found = dict(make_rules(formats, paths))
    assert found.pop(r"layers\.\d+\.mlp\.down_proj\.weight") == "int4-g128"
    assert found == {rf"layers\.{i}\.mlp\.up_proj\.weight": "int4-g128" for i in range(11)}


def test_heads_that_split_packed_words_are_refused(tmp_path: Path) -> None:
    """A 32-bit word holds 10 2/3 zero points of 3 bits, so a fused matrix with 16 rows per head
    cannot be split and is refused.
    """
    model = hub.random_model("gpt_neox", num_hidden_layers=1)
    hub.write(tmp_path, model, bits=3)
    with pytest.raises(
        CheckpointError, match=r"query_key_value.qzeros has shape .* in whole words"
    ):
        open_hf(tmp_path)
