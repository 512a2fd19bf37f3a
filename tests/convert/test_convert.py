"""Checkpoint conversion: strict, complete, reversible, and confined to its directory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import jaxllm
from jaxllm.checkpoints.native import load_params, open_native, save
from jaxllm.cli.convert import cast_checkpoint, convert
from jaxllm.cli.quantize import quantize
from jaxllm.convert import gpt2, llama
from jaxllm.convert.hf import open_hf, write_hf
from jaxllm.convert.tables import REQUIRED
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision
from tests.tiny_models import ROPES, assert_close, load_twin, save_random, tokens

LLAMA3 = ROPES["llama3"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases, llama3": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama, yarn": (
        "llama",
        {"rope_parameters": {**ROPES["yarn"], "beta_fast": 20.0, "truncate": False}},
    ),
    "mistral": ("mistral", {"sliding_window": 7}),
    "gpt2": ("gpt2", {}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False}),
}


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({k: v for k, v in data.items() if v != "delete"}))


def edit_tensors(directory: Path, edit: Any) -> None:
    """Rewrite the weights with `edit(dict)` applied."""
    path = directory / "model.safetensors"
    state = {k: v.clone() for k, v in load_file(path).items()}
    edit(state)
    save_file(state, path, metadata={"format": "pt"})


def logits(directory: Path) -> np.ndarray:
    lm = jaxllm.load(directory)
    return np.asarray(jaxllm.forward(lm.model, lm.params, None, tokens(2, 19)).logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_hf_native_round_trip_is_exact(variant: str, tmp_path: Path) -> None:
    """Hugging Face -> native -> Hugging Face: equal bits, equal configuration, equal logits."""
    family, changes = VARIANTS[variant]
    save_random(tmp_path / "hf", family, **changes)
    opened = open_hf(tmp_path / "hf")
    save(tmp_path / "native", opened)
    native = open_native(tmp_path / "native")
    assert native.config == opened.config
    write_hf(tmp_path / "back", native)
    assert open_hf(tmp_path / "back").config == opened.config
    first, last = (load_file(tmp_path / n / "model.safetensors") for n in ("hf", "back"))
    for name, tensor in last.items():
        assert torch.equal(tensor, first.get(name, first.get(f"transformer.{name}")))
    np.testing.assert_array_equal(logits(tmp_path / "hf"), logits(tmp_path / "native"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert_close(
            logits(tmp_path / "native"), theirs(torch.tensor(tokens(2, 19))).logits.numpy()
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_conversion_equals_loading_as_half(dtype: str, tmp_path: Path) -> None:
    save_random(tmp_path / "hf", "llama")
    save(tmp_path / "half", cast_checkpoint(open_hf(tmp_path / "hf"), dtype))
    loaded = jaxllm.load(tmp_path / "hf", dtype=dtype)
    native = jaxllm.load(tmp_path / "half")
    assert native.model == loaded.model
    for (path, a), (_, b) in zip(flatten(native.params), flatten(loaded.params), strict=True):
        assert a.dtype == b.dtype == dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


@pytest.mark.parametrize(("name", "dtype"), [("int4-zp", "float32"), ("bf16-packed", "bfloat16")])
def test_quantized_checkpoint_exports_dequantized(name: str, dtype: str, tmp_path: Path) -> None:
    """transformers on the result of --to-hf equals the quantized weights computed here; half and
    native conversions agree.
    """
    hf, small, back, half, same = (tmp_path / n for n in ("hf", "small", "back", "half", "same"))
    save_random(hf, "llama", num_hidden_layers=2)
    quantize(str(hf), small, name=name, dtype=dtype)
    convert(str(small), back, to_hf=True)
    ours = jaxllm.load(small, dtype="float32")
    assert {type(leaf).__name__ for _, leaf in flatten(ours.params)} >= {
        "PackedBf16Weight" if name == "bf16-packed" else "IntWeight"
    }
    found = jaxllm.forward(ours.model, ours.params, None, tokens(2, 19)).logits
    assert_close(found, load_twin(back).logits(tokens(2, 19)))

    written = load_file(back / "model.safetensors")
    if name == "bf16-packed":  # lossless
        for path, tensor in load_file(hf / "model.safetensors").items():
            assert torch.equal(written[path], tensor.bfloat16()), path
    convert(str(small), half, dtype="float16")
    assert not open_native(half).formats
    for path, tensor in load_file(half / "model.safetensors").items():
        if not path.startswith("__"):
            theirs = written[path if path.startswith("lm_head") else f"model.{path}"]
            assert torch.equal(tensor, theirs.half()), path
    convert(str(small), same)
    assert (same / "config.json").read_text() == (small / "config.json").read_text()
    before, after = (load_file(d / "model.safetensors") for d in (small, same))
    for path, tensor in before.items():
        assert torch.equal(tensor, after[path]), path


def test_precision_table_is_saved_in_native_format(tmp_path: Path) -> None:
    """--precision stores each tensor in its listed format, in native checkpoints only."""
    hf, mixed, table = tmp_path / "hf", tmp_path / "mixed", tmp_path / "formats.json"
    save_random(hf, "llama", num_hidden_layers=2)
    rows = [
        ["layers.1", {"weights": "bfloat16"}],
        ["lm_head", {"weights": "int8"}],
        [".*mlp", {"activations": "float16"}],
    ]
    table.write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match="--precision cannot be combined"):
        convert(str(hf), mixed, precision=table, to_hf=True)
    assert not mixed.exists()
    convert(str(hf), mixed, precision=table)
    opened = open_native(mixed)
    assert opened.formats == {"lm_head.weight": "int8"}
    assert [[r, o.weights or o.activations] for r, o in opened.precision.overrides] == [
        ["layers.1", "bfloat16"], ["lm_head", "int8"], [".*mlp", "float16"],
    ]  # fmt: skip
    first, last = (load_file(d / "model.safetensors") for d in (hf, mixed))
    for path, tensor in first.items():
        ours = path.removeprefix("model.")
        if ours != "lm_head.weight":
            wanted = tensor.bfloat16() if ours.startswith("layers.1.") else tensor
            assert torch.equal(last[ours], wanted), path
    with pytest.raises(CheckpointError, match="already holds"):
        convert(str(hf), mixed, precision=table)
    table.write_text('"int8"')
    with pytest.raises(ConfigError, match="an object or a list of rows"):
        convert(str(hf), tmp_path / "other", precision=table)


def test_old_and_new_rope_fields_are_read(tmp_path: Path) -> None:
    """rope_parameters and the older rope_scaling give equal configurations; contradicting fields
    raise an error.
    """
    save_random(tmp_path, "llama", rope_parameters=LLAMA3)
    expected = open_hf(tmp_path).config
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    edit_config(tmp_path, rope_parameters="delete", rope_theta=1e3, rope_scaling=scaling)
    assert open_hf(tmp_path).config == expected
    old = {"type": "linear", "factor": 2.0}  # the oldest spelling
    edit_config(tmp_path, rope_theta="delete", rope_scaling=old)
    rope = open_hf(tmp_path).config.rope  # type: ignore[attr-defined]
    assert (rope.rope_type, rope.rope_theta, rope.factor) == ("linear", 10000.0, 2.0)
    edit_config(tmp_path, rope_theta=500.0, rope_parameters={"rope_theta": 1e4})
    with pytest.raises(ConfigError, match="rope_theta differs"):
        open_hf(tmp_path)


def test_published_gpt2_names_and_masks_are_read(tmp_path: Path) -> None:
    """Names without the transformer prefix and mask buffers, as in published GPT-2 files, are
    accepted.
    """
    save_random(tmp_path, "gpt2")
    expected = logits(tmp_path)

    def publish(state: dict[str, torch.Tensor]) -> None:
        for name in list(state):
            state[name.removeprefix("transformer.")] = state.pop(name)
        state["h.0.attn.bias"] = torch.ones(1, 1, 97, 97)
        state["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    edit_tensors(tmp_path, publish)
    np.testing.assert_array_equal(logits(tmp_path), expected)


def test_all_tensor_errors_are_reported_together(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")

    def damage(state: dict[str, torch.Tensor]) -> None:
        del state["model.norm.weight"]
        state["model.layers.9.mlp.up_proj.weight"] = torch.ones(3)
        state["model.layers.0.mlp.up_proj.weight"] = torch.ones(7, 40)
        state["model.layers.1.input_layernorm.weight"] = torch.ones(40, dtype=torch.int32)

    edit_tensors(tmp_path, damage)
    with pytest.raises(CheckpointError) as caught:
        open_hf(tmp_path)
    for part in (
        "norm.weight is missing",
        "model.layers.9.mlp.up_proj.weight is not part of this model",
        "layers.0.mlp.up_proj.weight has shape (7, 40), expected (56, 40)",
        "layers.1.input_layernorm.weight has dtype int32",
    ):
        assert part in str(caught.value)


def test_head_must_match_tying(tmp_path: Path) -> None:
    """An untied head must exist, and the stored copy of a tied head must equal the embedding."""
    save_random(tmp_path / "untied", "llama")
    edit_tensors(tmp_path / "untied", lambda state: state.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing"):
        open_hf(tmp_path / "untied")
    save_random(tmp_path / "tied", "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")

    def repeat(state: dict[str, torch.Tensor]) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()

    edit_tensors(tmp_path / "tied", repeat)
    open_hf(tmp_path / "tied")
    edit_tensors(tmp_path / "tied", lambda state: state["lm_head.weight"][3].mul_(2))
    with pytest.raises(CheckpointError, match="ties the head"):
        open_hf(tmp_path / "tied")


@pytest.mark.parametrize(
    ("fields", "theirs"),
    [(llama.LLAMA.fields, transformers.LlamaConfig), (gpt2.FIELDS, transformers.GPT2Config)],
)
def test_field_defaults_equal_transformers_config(fields: Any, theirs: Any) -> None:
    defaults = {f.key: f.default for f in fields if f.default is not REQUIRED}
    known = theirs().to_dict()
    derived = {"num_key_value_heads", "head_dim", "n_inner"}  # derived from other fields
    assert len(defaults) > 5
    assert defaults == {
        **{k: known.get(k, defaults[k]) for k in defaults},
        **dict.fromkeys(derived & defaults.keys()),
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_weights_are_refused(value: float, tmp_path: Path) -> None:
    save_random(tmp_path, "gpt2")
    edit_tensors(tmp_path, lambda s: s["transformer.h.1.ln_2.bias"].__setitem__(5, value))
    with pytest.raises(CheckpointError, match=r"h\.1\.ln_2\.bias holds (nan|inf) at index 5"):
        jaxllm.load(tmp_path)


def test_overflow_in_target_format_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "gpt2")
    edit_tensors(tmp_path, lambda s: s["transformer.ln_f.bias"].__setitem__(0, 1e5))
    jaxllm.load(tmp_path, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"ln_f\.bias overflows float16"):
        jaxllm.load(tmp_path, dtype="float16")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_interleaved": True}, "rope_interleaved must be False, got True"),
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "swish9"}, "hidden_act must be one of silu, .*got 'swish9'"),
        (
            {"num_attention_heads": 7, "head_dim": "delete"},
            "hidden_size .* is not a multiple of num_attention_heads 7",
        ),
        ({"num_key_value_heads": 3}, "not a multiple of"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a whole number"),
        ({"vocab_size": 2**40}, "vocab_size must be"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"vocab_size": "delete"}, "vocab_size is missing"),
        ({"rms_norm_eps": "small"}, "norm_eps must be"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "requires factor"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta must be a number >= 1e-12"),
        ({"rope_parameters": {"rope_theta": 2e12}}, "rope_theta must be a number <= 1000000000000"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, r"rope_type \['linear'\]"),
        ({"rope_parameters": {"rope_theta": [1e4]}}, "rope_theta must be a number, got \\["),
        ({"model_type": ["llama"]}, "model_type must be a string, got"),
        ({"architectures": ["LlamaForTokenClassification"]}, "expected a plain causal model"),
        ({"hidden_size": [40]}, r"hidden_size must be a whole number, got \[40\]"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": "fast"}, "rope_parameters must be an object"),
    ],
)
def test_impossible_configurations_are_refused(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_random(tmp_path, "llama")
    edit_config(tmp_path, **change)
    with pytest.raises(ConfigError, match=reason):
        open_hf(tmp_path)


def test_missing_fields_take_transformers_defaults(tmp_path: Path) -> None:
    save_random(tmp_path, "llama", head_dim=5 * 2, num_key_value_heads=4, num_attention_heads=4)
    for name in ("head_dim", "num_key_value_heads", "hidden_act", "tie_word_embeddings"):
        edit_config(tmp_path, **{name: "delete"})
    twin = load_twin(tmp_path)
    assert_close(logits(tmp_path), twin.logits(tokens(2, 19)))


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "link", "pipe"]
)
def test_shards_outside_directory_are_refused(name: str, tmp_path: Path) -> None:
    """Shard names that lead outside the directory, to links or to pipes are never opened."""
    home = tmp_path / "model"
    save_random(home, "gpt2")
    shutil.move(home / "model.safetensors", tmp_path / "elsewhere.safetensors")
    (home / "sub").mkdir()
    shutil.copy(tmp_path / "elsewhere.safetensors", home / "sub" / "x.safetensors")
    (home / "link").symlink_to(tmp_path / "elsewhere.safetensors")
    os.mkfifo(home / "pipe")
    names = load_file(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": dict.fromkeys(names, name)}
    (home / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"plain file name|leaves|regular"):
        open_hf(home)


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    save_random(snapshot, "gpt2")
    (tmp_path / "blobs").mkdir()
    shutil.move(snapshot / "model.safetensors", tmp_path / "blobs" / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    open_hf(snapshot)


def test_pickles_and_damaged_files_are_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "gpt2")
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", b"\xff" * 64, whole + b"x"):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="safetensors"):
            open_hf(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors, "):
        open_hf(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pickle.*save_pretrained"):
        open_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        open_hf(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        jaxllm.load(tmp_path / "nowhere")


def test_native_weights_are_memory_mapped_without_copy(tmp_path: Path) -> None:
    """Every tensor starts on a 64-byte boundary, odd sizes included, so XLA copies no matrix."""
    save_random(tmp_path / "hf", "llama", attention_bias=True, intermediate_size=53)
    save(tmp_path / "native", open_hf(tmp_path / "hf"))
    native = open_native(tmp_path / "native")
    params = load_params(native, Precision())
    for path, leaf in flatten(params):
        array = native.tensors[path].read()
        assert array.ctypes.data % 64 == 0
        mapped = leaf.unsafe_buffer_pointer() == array.ctypes.data
        assert mapped == (array.ndim > 1), path
    reread = load_file(tmp_path / "native" / "model.safetensors")  # any reader can read it
    assert {name for name in reread if not name.startswith("__align")} == set(native.tensors)


def test_user_convert_module_does_not_shadow_package(tmp_path: Path) -> None:
    """A module named convert in the working directory does not shadow jaxllm.convert."""
    (tmp_path / "convert.py").write_text("raise SystemExit('the wrong convert')")
    code = (
        "from jaxllm.convert.registry import open_checkpoint;"
        " print(open_checkpoint('demo:llama').config)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "LlamaConfig" in ran.stdout
