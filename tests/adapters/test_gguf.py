"""LoRA adapters in GGUF files: reading, writing, and equality with PEFT."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import jaxllm
from jaxllm.adapters import LoraConfig, read_adapter, write_gguf_adapter
from jaxllm.adapters.attach import Adapter
from jaxllm.cli.options import _parse_adapters
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.paths import flatten, map_leaves
from tests.adapters.random_adapters import random_adapter, with_one
from tests.convert.gguf.gguf_files import permuted
from tests.tiny_models import assert_close, random_model, tokens

NAMES = {  # llama.cpp's names
    "llama": {
        "model.embed_tokens": "token_embd", "lm_head": "output",
        "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
        "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    },
    "gpt2": {"transformer.h.0.attn.c_attn": "blk.0.attn_qkv", "transformer.wte": "token_embd"},
}  # fmt: skip
ALPHA, IDS = 6.0, tokens(1, 7)


def model_and_adapter(family: str) -> tuple[Any, Any, Adapter]:
    """Return a one-layer model and an adapter of two ranks for the modules in NAMES."""
    layers = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    model, params = random_model(family, **layers, tie_word_embeddings=False)
    last = "c_attn" if family == "gpt2" else "down_proj"
    lora = LoraConfig(
        r=3, lora_alpha=ALPHA, target_modules=list(NAMES[family]), rank_pattern={last: 5}
    )
    return model, params, random_adapter(model.config, params, lora)


def write(
    path: Path, family: str, adapter: Adapter, config: Any,
    also: Callable[[gguf.GGUFWriter], object] = lambda _: None,
) -> Path:  # fmt: skip
    """Write PEFT's matrices as llama.cpp's `convert_lora_to_gguf` does."""
    writer = gguf.GGUFWriter(path, "gpt2" if family == "gpt2" else "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for module, matrices in adapter.matrices.items():
        a, b = np.asarray(matrices.a), np.asarray(matrices.b)
        name = next(theirs for ours, theirs in NAMES[family].items() if ours.endswith(module))
        if name == "token_embd":
            a, b = b, a.T  # PEFT's embedding_A transposed, and its embedding_B
        if name in ("blk.0.attn_q", "blk.0.attn_k"):
            q = name == "blk.0.attn_q"
            b = permuted(b, config.num_attention_heads if q else config.num_key_value_heads)
        writer.add_tensor(f"{name}.weight.lora_a", np.ascontiguousarray(a))
        writer.add_tensor(f"{name}.weight.lora_b", np.ascontiguousarray(b))
    also(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gguf_adapter_equals_peft_adapter(family: str, tmp_path: Path) -> None:
    """A GGUF adapter gives PEFT's matrices, and the logits of weights with alpha / r B A added."""
    model, params, adapter = model_and_adapter(family)
    found = read_adapter(write(tmp_path / "a.gguf", family, adapter, model.config), model.config)
    assert found.matrices.keys() == adapter.matrices.keys()
    for module, pieces in adapter.matrices.items():
        np.testing.assert_array_equal(found.matrices[module].a, pieces.a, module)
        np.testing.assert_array_equal(found.matrices[module].b, pieces.b, module)
    # LoRA by definition: alpha / r times B A added to the weights.
    weights = {path: np.asarray(x, np.float64) for path, x in flatten(params)}
    for module, (a, b, _) in adapter.matrices.items():
        scale = ALPHA / a.shape[0]
        weights[f"{module}.weight"] += scale * np.asarray(b, np.float64) @ np.asarray(a)
    changed = {path: array.astype(np.float32) for path, array in weights.items()}
    merged = map_leaves(lambda path, _: changed[path], params)
    with_adapter = with_one(model.config, params, found)
    expected = jaxllm.forward(model, merged, None, IDS).logits
    assert_close(jaxllm.forward(model, with_adapter, None, IDS).logits, np.asarray(expected))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_written_adapter_equals_llama_cpp(family: str, tmp_path: Path) -> None:
    """A written adapter has the tensors and keys that llama.cpp's converter writes."""
    model, _, adapter = model_and_adapter(family)
    write(tmp_path / "theirs.gguf", family, adapter, model.config)
    write_gguf_adapter(tmp_path / "ours.gguf", adapter, model.config)
    ours, theirs = (gguf.GGUFReader(tmp_path / f"{who}.gguf") for who in ("ours", "theirs"))
    found = {tensor.name: np.asarray(tensor.data) for tensor in ours.tensors}
    assert found.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(found[tensor.name], np.asarray(tensor.data), tensor.name)
    for key in ("general.architecture", "general.type", "adapter.type", "adapter.lora.alpha"):
        assert ours.fields[key].contents() == theirs.fields[key].contents()


def test_writing_folds_scales_into_matrices(tmp_path: Path) -> None:
    """Scales that GGUF cannot express (rsLoRA, alpha patterns) are folded into the matrices."""
    model, params, _ = model_and_adapter("llama")
    lora = LoraConfig(r=4, lora_alpha=6.0, target_modules=["q_proj", "o_proj"], use_rslora=True,
                      alpha_pattern={"o_proj": 3.0})  # fmt: skip
    adapter = random_adapter(model.config, params, lora)
    write_gguf_adapter(tmp_path / "a.gguf", adapter, model.config)
    found = read_adapter(tmp_path / "a.gguf", model.config)
    for module, (a, b, _) in adapter.matrices.items():
        alpha = 3.0 if "o_proj" in module else 6.0
        expected = alpha / 2 * np.asarray(b) @ np.asarray(a)
        given = found.matrices[module]
        mine = 6.0 / 4 * np.asarray(given.b) @ np.asarray(given.a)
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)


def test_dora_cannot_be_written_to_gguf(tmp_path: Path) -> None:
    model, params, _ = model_and_adapter("llama")
    lora = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    adapter = random_adapter(model.config, params, lora)
    with pytest.raises(ConfigError, match="DoRA"):
        write_gguf_adapter(tmp_path / "a.gguf", adapter, model.config)


def test_adapter_on_fused_matrix_is_refused(tmp_path: Path) -> None:
    """GGUF fuses Phi-3's queries, keys and values into one matrix, which would need one shared
    lora_a.
    """
    model, params = random_model("phi3", num_hidden_layers=1)
    for name, module in {"q_proj": "attn_qkv", "gate_proj": "ffn_up"}.items():
        lora = LoraConfig(r=2, target_modules=[name])
        adapter = random_adapter(model.config, params, lora)
        with pytest.raises(ConfigError, match=f"blk.0.{module}.weight is fused in GGUF"):
            write_gguf_adapter(tmp_path / "a.gguf", adapter, model.config)


def replace_b(writer: gguf.GGUFWriter, array: np.ndarray) -> None:
    """Replace the query's second matrix."""
    writer.tensors[0].pop("blk.0.attn_q.weight.lora_b")
    writer.add_tensor("blk.0.attn_q.weight.lora_b", array)


BAD: dict[str, tuple[Callable[[gguf.GGUFWriter], object], str]] = {
    "a model": (lambda w: w.add_type("model"), "not a LoRA adapter"),
    "another architecture": (lambda w: w.add_string("general.architecture", "gpt2"), "'gpt2'"),
    "no alpha": (
        lambda w: w.kv_data[0].pop("adapter.lora.alpha"),
        "alpha must be a finite number, got None",
    ),
    "a norm": (
        lambda w: w.add_tensor("blk.0.attn_norm.weight", np.ones(40, np.float32)),
        "blk.0.attn_norm cannot have an adapter",
    ),
    "an unknown module": (
        lambda w: w.add_tensor("blk.7.attn_q.weight.lora_a", np.ones((3, 40), np.float32)),
        r"blk\.7\.attn_q\.weight cannot have an adapter",
    ),
    "one matrix of two": (
        lambda w: w.tensors[0].pop("blk.0.ffn_down.weight.lora_b"), "lora_b is missing",
    ),
    "another shape": (lambda w: replace_b(w, np.ones((9, 3), np.float32)), "do not match weight"),
    "numbers that are not finite": (
        lambda w: replace_b(w, np.full((48, 3), np.nan, np.float32)), "NaN or infinity",
    ),
    "an activated LoRA": (
        lambda w: w.add_array("adapter.alora.invocation_tokens", [1, 2]), "alora",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_gguf_adapter_is_refused(case: str, tmp_path: Path) -> None:
    """A GGUF file that is not an adapter for this model raises an error that names the problem."""
    change, message = BAD[case]
    model, _, adapter = model_and_adapter("llama")

    def also(writer: gguf.GGUFWriter) -> None:
        given = dict(writer.kv_data[0])
        for key in ("general.type", "general.architecture"):  # allow overwriting
            writer.kv_data[0].pop(key)
        change(writer)
        for key in ("general.type", "general.architecture"):
            writer.kv_data[0].setdefault(key, given[key])

    with pytest.raises(CheckpointError, match=message):
        read_adapter(write(tmp_path / "a.gguf", "llama", adapter, model.config, also), model.config)


def test_gguf_file_works_as_adapter_path(shallow: Callable[[str], Path], tmp_path: Path) -> None:
    """A GGUF file is accepted where an adapter directory is, and its name comes from
    the file name.
    """
    lm = jaxllm.load(shallow("llama"))
    lora = LoraConfig(r=2, lora_alpha=64.0, target_modules=["q_proj", "down_proj"])
    adapter = random_adapter(lm.config, lm.params, lora)
    write_gguf_adapter(tmp_path / "other.gguf", adapter, lm.config)
    with_adapter = jaxllm.load(shallow("llama"), adapters=tmp_path / "other.gguf")
    assert with_adapter.adapters == ("other",) and with_adapter.adapter == "other"
    assert _parse_adapters([str(tmp_path / "other.gguf"), "x=there"]).keys() == {"other", "x"}
