"""Integer weights exported as GPTQ and compressed-tensors, and loaded again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import jaxllm
from jaxllm.convert.hf import open_hf
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.formats import to_dense, weight_format
from jaxllm.weights.paths import flatten
from tests.conftest import Run, succeed
from tests.convert import hub
from tests.convert.test_convert import edit_config, edit_tensors

LAYER = {"num_hidden_layers": 1, "vocab_size": 136}


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 words `[R, W]`, lowest bits first, to codes `[R, 32 W / bits]`."""
    bit = (words.to(torch.int64)[..., None] >> torch.arange(32)) & 1
    codes = bit.reshape(len(words), -1, bits) << torch.arange(bits)
    return codes.sum(-1)


def dequantize_gptq(
    state: dict[str, torch.Tensor], stem: str, settings: dict[str, Any]
) -> torch.Tensor:
    """Dequantize GPTQ tensors by their description, float32 `[O, I]`."""
    bits, less = settings["bits"], settings["checkpoint_format"] == "gptq"
    codes = unpack_words(state[f"{stem}.qweight"].T, bits)
    zeros = (unpack_words(state[f"{stem}.qzeros"], bits) + less) % 2**bits
    index, scales = state[f"{stem}.g_idx"].long(), state[f"{stem}.scales"].float()
    return (codes - zeros[index].T) * scales[index].T


def dequantize_compressed(state: dict[str, torch.Tensor], stem: str, bits: int) -> torch.Tensor:
    """Dequantize packed compressed-tensors weights, float32 `[O, I]`."""
    rows, columns = state[f"{stem}.weight_shape"].tolist()
    codes = unpack_words(state[f"{stem}.weight_packed"], bits)[:, :columns]
    scale = state[f"{stem}.weight_scale"].float()
    zeros = torch.full(scale.shape, 2 ** (bits - 1))
    if f"{stem}.weight_zero_point" in state:
        zeros = unpack_words(state[f"{stem}.weight_zero_point"].T, bits)[:, :rows].T
    size = columns // scale.shape[1]
    return (codes - zeros.repeat_interleave(size, 1)) * scale.repeat_interleave(size, 1)


def write_quantized(tmp_path: Path, family: str, rules: Any, **sizes: Any) -> Path:
    """Write a quantized random model in the native form."""
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 1, "vocab_size": 136}
    hub.random_model(family, **{**layers, **sizes}).save_pretrained(tmp_path / "hf")
    jaxllm.load(tmp_path / "hf", dtype="float32", quantize=rules).save(tmp_path / "ours")
    return tmp_path / "ours"


def assert_equal_params(one: Path, other: Path) -> set[str]:
    """Assert equal parameters and return the formats of the layers' matrices in `other`."""
    expected, found = (dict(flatten(jaxllm.load(path).params)) for path in (one, other))
    assert expected.keys() == found.keys()
    for path, weight in expected.items():
        np.testing.assert_array_equal(to_dense(found[path]), to_dense(weight), path)
    return {weight_format(x) for path, x in found.items() if x.ndim > 1 and not is_table(path)}


CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gptq, 4 bits": ("gptq", "llama", "int4-g32", {}),
    "gptq, zero points": ("gptq", "llama", "int4-g64-zp-f16", {}),
    "gptq, 3 bits": ("gptq", "llama", "int3-g32", {}),
    "gptq, 2 bits": ("gptq", "llama", "int2-g32-zp", {}),
    "gptq, 8 bits": ("gptq", "llama", "int8", {}),
    "gptq, 8 bits in groups": ("gptq", "llama", "int8-g32-zp", {}),
    "gptq, Conv1D": ("gptq", "gpt2", "int4-g32-f16", {}),
    "gptq, several in one": ("gptq", "phi3", "int4-g32-zp", {}),
    "packed, 4 bits": ("compressed-tensors", "llama", "int4-g32", {}),
    "packed, zero points": ("compressed-tensors", "llama", "int4-g32-zp-f16", {}),
    "packed, 8 bits": ("compressed-tensors", "llama", "int8-f16", {}),
    "packed, 8 bits in groups": ("compressed-tensors", "llama", "int8-g32-zp", {}),
    "packed, several in one": ("compressed-tensors", "gpt_neox", "int4-g32-zp", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_exported_integers_equal_original_values(case: str, tmp_path: Path, run: Run) -> None:
    """Exported integer weights, decoded from the file's own description or loaded again, equal the
    original values bit for bit.
    """
    method, family, format, sizes = CASES[case]
    rules = [(r".*(proj|attention|mlp|attn)\..*weight", format), (r"lm_head|embed_out", "int8")]
    if family == "llama":
        rules = format  # embeddings and head too, which are exported as floats
    ours, back = write_quantized(tmp_path, family, rules, **sizes), tmp_path / "back"
    succeed(run, "convert", ours, back, "--to-hf", "--keep-quantized", method)
    assert assert_equal_params(ours, back) == {format}
    settings = json.loads((back / "config.json").read_text())["quantization_config"]
    state, expected = load_file(back / "model.safetensors"), {}
    ending = ".qweight" if method == "gptq" else ".weight_packed"
    for stem in (name.removesuffix(ending) for name in state if name.endswith(ending)):
        bits = int(format[3])
        value = dequantize_gptq(state, stem, settings) if method == "gptq" else None
        expected[stem] = dequantize_compressed(state, stem, bits) if value is None else value
    params = {p: np.asarray(to_dense(x)) for p, x in flatten(jaxllm.load(ours).params)}
    rows = sorted(
        map(bytes, np.concatenate([x.numpy() for x in expected.values() if x.shape[1] == 64]))
    )
    quantized = [
        x for p, x in params.items() if x.ndim == 2 and x.shape[1] == 64 and not is_table(p)
    ]
    assert rows == sorted(map(bytes, np.concatenate(quantized)))


def is_table(path: str) -> bool:
    return any(name in path for name in ("embed", "wte", "wpe", "lm_head", "norm"))


def test_column_order_round_trips_through_gptq(tmp_path: Path, run: Run) -> None:
    """Weights with a column order (act-order) are exported as GPTQ with desc_act, and load with the
    same values.
    """
    expected = hub.write(tmp_path / "hub", hub.random_model("llama", **LAYER), act_order=True)
    succeed(
        run, "convert", tmp_path / "hub", tmp_path / "back", "--to-hf", "--keep-quantized", "gptq"
    )
    state = load_file(tmp_path / "back/model.safetensors")
    settings = json.loads((tmp_path / "back/config.json").read_text())["quantization_config"]
    assert settings["desc_act"] is True
    for path, array in expected.items():
        stem = f"model.{path.removesuffix('.weight')}"
        np.testing.assert_array_equal(dequantize_gptq(state, stem, settings).numpy(), array)
    assert_equal_params(tmp_path / "hub", tmp_path / "back")


def test_mixed_bit_widths_become_compressed_tensors_groups(tmp_path: Path, run: Run) -> None:
    """Matrices of different bit widths become separate compressed-tensors config groups; gptq
    refuses them.
    """
    rules = [(r".*mlp.*", "int4-g32"), (r".*[qk]_proj.*", "int8")]
    ours, back = write_quantized(tmp_path, "llama", rules), tmp_path / "back"
    convert = ("convert", ours, back, "--to-hf", "--keep-quantized")
    status, _, log = run(*convert, "gptq")
    assert status and "expected 4 bits in groups of" in log
    succeed(run, *convert, "compressed-tensors")
    assert assert_equal_params(ours, back) == {"int4-g32", "int8", "float32"}
    settings = json.loads((back / "config.json").read_text())["quantization_config"]
    groups = settings["config_groups"].values()
    assert {len(group["targets"]) for group in groups} == {2, 3}
    assert {x.rpartition(".")[2] for x in settings["ignore"]} == {"v_proj", "o_proj", "lm_head"}


@pytest.mark.parametrize(
    ("rules", "method", "message"),
    [
        ("nf4", "gptq", r"q_proj.weight is nf4, which gptq does not support"),
        ("int3-g32", "compressed-tensors", "int3-g32, which compressed-tensors does not support"),
        ("int4-g64", "compressed-tensors", "96 columns are not whole groups of 64"),
        ("bfloat16", "gptq", "requires integer weights, but no linear of this model has any"),
        ("int4-g32", "awq", "'awq' is not a format: expected gptq or compressed-tensors"),
    ],
)
def test_export_refuses_unsupported_formats(
    rules: str, method: str, message: str, tmp_path: Path, run: Run
) -> None:
    """--keep-quantized refuses formats that the method cannot represent, unknown methods and a
    missing --to-hf, and writes nothing.
    """
    ours = write_quantized(tmp_path, "llama", rules)
    status, _, error = run(
        "convert", ours, tmp_path / "back", "--to-hf", "--keep-quantized", method
    )
    assert status and message in error, error
    assert not (tmp_path / "back").exists()
    status, _, error = run("convert", ours, tmp_path / "back", "--keep-quantized", "gptq")
    assert status and "requires --to-hf" in error


def write_int_quantized(directory: Path, symmetric: bool, strategy: str) -> dict[str, np.ndarray]:
    """Write a random model with int8 linears in the int-quantized form; return their values."""
    model = hub.random_model("llama", **LAYER)
    model.save_pretrained(directory)
    state, expected = load_file(directory / "model.safetensors"), {}
    rng = torch.Generator().manual_seed(0)
    for name in [name for name in state if "proj.weight" in name]:
        rows = state[name].shape[0]
        codes = torch.randint(-128, 128, state[name].shape, generator=rng, dtype=torch.int8)
        scale = torch.rand((rows, 1) if strategy == "channel" else (1,), generator=rng).bfloat16()
        zero = torch.zeros(scale.shape, dtype=torch.int8)
        state[name], state[f"{name}_scale"] = codes, scale
        if not symmetric:
            zero = torch.randint(-128, 128, scale.shape, generator=rng, dtype=torch.int8)
            state[f"{name}_zero_point"] = zero
        expected[name.removeprefix("model.")] = ((codes.int() - zero.int()) * scale.float()).numpy()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": symmetric}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None, "sparsity_config": {},
    }  # fmt: skip
    edit_config(directory, quantization_config=settings)
    return expected


@pytest.mark.parametrize(
    ("symmetric", "strategy", "format"),
    [(True, "channel", "int8"), (False, "channel", "int8-zp"), (True, "tensor", "int8")],
)
def test_int_quantized_matrices_load_exactly(
    symmetric: bool, strategy: str, format: str, tmp_path: Path
) -> None:
    """int-quantized matrices of compressed-tensors, per channel or per tensor, symmetric or not,
    load with exact values.
    """
    expected = write_int_quantized(tmp_path, symmetric, strategy)
    params = dict(flatten(jaxllm.load(tmp_path).params))
    for path, array in expected.items():
        assert weight_format(params[path]) == format
        np.testing.assert_array_equal(to_dense(params[path]), array, path)


def test_invalid_compressed_tensors_files_are_refused(tmp_path: Path) -> None:
    """Unsupported compressed-tensors settings and missing or misshapen scales raise errors that
    name them.
    """
    write_int_quantized(tmp_path, True, "channel")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    good = json.dumps(config)
    for old, new, message in (
        ('"int-quantized"', '"nvfp4-pack"', "format 'nvfp4-pack' is not supported"),
        ('"int-quantized"', '"float-quantized"', "weights.type 'int' is not supported"),
        ('"num_bits": 8, "type": "int", "strategy": "channel"', '"num_bits": 8, "type": "float"',
         "weights.type 'float' is not supported"),
        ('"dynamic": true', '"dynamic": false', "static input_activations"),
        ('"kv_cache_scheme": null', '"kv_cache_scheme": {"num_bits": 8}', "kv_cache_scheme is not"),
    ):  # fmt: skip
        assert old in good
        edit_config(tmp_path, quantization_config=json.loads(good.replace(old, new)))
        with pytest.raises(ConfigError, match=message):
            open_hf(tmp_path)
    edit_config(tmp_path, quantization_config=config)
    mlp = "model.layers.0.mlp."
    edit_tensors(tmp_path, lambda state: state.pop(f"{mlp}up_proj.weight_scale"))
    wrong = {f"{mlp}gate_proj.weight_scale": torch.ones(7, 1)}
    edit_tensors(tmp_path, lambda state: state.update(wrong))
    with pytest.raises(CheckpointError) as caught:
        open_hf(tmp_path)
    assert "up_proj.weight_scale is missing" in str(caught.value)
    assert "gate_proj.weight_scale has shape (7, 1)" in str(caught.value)
