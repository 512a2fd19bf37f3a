"""Recurrent layers in GGUF: Qwen3.5, whose value heads are tiled, its siblings, and Mamba-2."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import jaxllm
from jaxllm.convert.gguf.reader import open_gguf
from jaxllm.convert.gguf.writer import write_gguf
from jaxllm.convert.hf import write_hf
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import CheckpointError, ConfigError
from tests.convert.gguf.gguf_files import overwrite, raw_of, raw_tensors, write
from tests.tiny_models import assert_close, save_random, tokens

IDS = tokens(2, 9)


FAMILIES = [
    "qwen3_5_text",
    *(pytest.param(x, marks=pytest.mark.full) for x in ("qwen3_5_moe_text", "qwen3_next")),
]


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two value heads for each key head, whose rows are whole blocks."""
    directory = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "num_attention_heads": 4}
    channels = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    widths: dict[str, Any] = {"intermediate_size": 96}
    if request.param != "qwen3_5_text":
        widths = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 96}
    if request.param == "qwen3_next":
        widths |= {"hidden_act": "silu", "mlp_only_layers": [], "intermediate_size": 96}
    save_random(directory, request.param, spread=0.1, **sizes, **heads, **channels, **widths)
    return directory


def logits_of(file: Path) -> Any:
    lm = jaxllm.load(file)
    return jaxllm.forward(lm.model, lm.params, None, IDS).logits


def torch_logits(source: Path) -> np.ndarray:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor(IDS)).logits.numpy())


@pytest.fixture(scope="module")
def expected(source: Path) -> np.ndarray:
    return torch_logits(source)


def test_tiled_value_heads_equal_transformers(
    source: Path, expected: np.ndarray, tmp_path: Path
) -> None:
    """A file in the order of llama.cpp's converter runs in that order (grouped in Qwen3-Next), with
    equal logits. Gates of shared experts may be vectors, as earlier converters wrote them.
    """
    raw = raw_of(gguf.GGMLQuantizationType.F32)

    def store(name: str, array: np.ndarray) -> Any:
        return raw(name, array[0] if "gate_inp_shexp" in name else array)

    file = write(tmp_path / "a.gguf", source, store)
    config: Any = open_gguf(file).config
    assert config.value_heads_tiled == (config.model_type != "qwen3_next")
    assert dataclasses.replace(config, value_heads_tiled=False) == open_checkpoint(source).config
    assert_close(logits_of(file), expected)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_written_files_tile_value_heads(kind: str, source: Path, tmp_path: Path) -> None:
    """Files written from grouped heads, and again from those, are llama.cpp's."""
    there = write(tmp_path / "a.gguf", source, raw_of(gguf.GGMLQuantizationType[kind]))
    write_gguf(tmp_path / "b.gguf", open_checkpoint(source), kind)
    write_gguf(tmp_path / "c.gguf", open_checkpoint(there), kind)
    for file in ("b.gguf", "c.gguf"):
        found, wanted = raw_tensors(tmp_path / file), raw_tensors(there)
        assert found.keys() == wanted.keys()
        for name, (block, shape, data) in wanted.items():
            if name.endswith(("ssm_a", "norm.weight")):  # a logarithm and 1 + w round
                assert_close(
                    np.frombuffer(found[name][2], np.float32), np.frombuffer(data, np.float32)
                )
            else:
                assert found[name] == (block, shape, data), name
        first, second = (gguf.GGUFReader(x).fields for x in (there, tmp_path / file))
        for key, field in first.items():
            if key.startswith("qwen3"):
                assert second[key].contents() == field.contents(), key


def test_tiled_value_heads_are_grouped_in_hugging_face_files(source: Path, tmp_path: Path) -> None:
    """A model read from GGUF has its own tensors when it is written as it came."""
    checkpoint = open_gguf(write(tmp_path / "a.gguf", source))
    write_hf(tmp_path / "hf", checkpoint)
    found, wanted = (load_file(x / "model.safetensors") for x in (tmp_path / "hf", source))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6, err_msg=name)
    assert open_checkpoint(tmp_path / "hf").config == open_checkpoint(source).config


def test_growing_decays_are_refused(source: Path, tmp_path: Path) -> None:
    """ssm_a is -exp(A_log), so that a number from 0 on is none."""
    raw = raw_of(gguf.GGMLQuantizationType.F32)

    def store(name: str, array: np.ndarray) -> Any:
        return raw(name, np.zeros_like(array) if name.endswith("ssm_a") else array)

    with pytest.raises(CheckpointError, match="ssm_a must be negative"):
        jaxllm.load(write(tmp_path / "a.gguf", source, store))


def test_other_layers_are_refused(source: Path, tmp_path: Path) -> None:
    """The list of recurrent layers must match the tensors."""

    def also(writer: gguf.GGUFWriter) -> None:
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", [True, True])

    with pytest.raises(CheckpointError, match=r"layers\.[01]\."):
        open_gguf(write(tmp_path / "a.gguf", source, also=overwrite(also)))


@pytest.mark.parametrize(
    "family",
    [pytest.param(x, marks=pytest.mark.full) for x in ("granitemoehybrid", "granitemoehybrid_moe")],
)
def test_mamba2_files_have_llama_cpp_layout(family: str, tmp_path: Path) -> None:
    """Vectors of Mamba-2 layers are matrices in GGUF, scales are floats; what is read from a file
    equals transformers.
    """
    source, file = tmp_path / "hf", tmp_path / "a.gguf"
    save_random(source, family, spread=0.1, num_hidden_layers=2)
    checkpoint = open_checkpoint(source)
    write_gguf(file, checkpoint, "F32")
    tensors, reader = load_file(source / "model.safetensors"), gguf.GGUFReader(file)
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    where, groups = "model.layers.0.mamba.", 2
    for name, array in (
        ("ssm_a", -np.exp(tensors[f"{where}A_log"])[:, None]),
        ("ssm_d", tensors[f"{where}D"][:, None]),
        ("ssm_norm.weight", tensors[f"{where}norm.weight"].reshape(groups, -1)),
        ("ssm_conv1d.weight", tensors[f"{where}conv1d.weight"][:, 0]),
        ("ssm_dt.bias", tensors[f"{where}dt_bias"]),
    ):
        assert found[f"blk.0.{name}"].shape == array.shape
        np.testing.assert_allclose(found[f"blk.0.{name}"], array, rtol=1e-6)
    scale = reader.fields["granitehybrid.embedding_scale"]
    assert scale.types == [gguf.GGUFValueType.FLOAT32]
    assert reader.fields["granitehybrid.attention.head_count_kv"].contents() == [0, 2]
    assert open_gguf(file).config == checkpoint.config
    assert_close(logits_of(file), torch_logits(source))


def test_other_widths_of_mamba2_are_not_written(tmp_path: Path) -> None:
    """llama.cpp's Mamba-2 layers have twice the hidden channels."""
    save_random(tmp_path, "granitemoehybrid", num_hidden_layers=2, mamba_expand=1)
    with pytest.raises(ConfigError, match="mamba_d_head 8 "):
        write_gguf(tmp_path / "a.gguf", open_checkpoint(tmp_path), "F32")
