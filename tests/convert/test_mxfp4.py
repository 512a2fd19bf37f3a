"""Experts in MXFP4: gpt-oss' published files and GGUF, kept in 4 bits and read exactly."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import jaxllm
from jaxllm.checkpoints.native import dequantize_checkpoint
from jaxllm.convert.gguf.writer import write_gguf
from jaxllm.convert.hf import read_config, write_hf
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.formats import as_format, to_dense, weight_format
from jaxllm.weights.paths import flatten
from tests.convert.gguf.gguf_files import dequantized, raw_of, raw_tensors, write
from tests.tiny_models import assert_close, save_random, tokens

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 16,
    "swiglu_limit": 7.0,
}  # fmt: skip
STACK = "layers.{}.mlp.experts.{}_proj.weight"
IDS = tokens(2, 9)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint as published, and the same in floats as transformers dequantizes it."""
    plain, packed = (tmp_path_factory.mktemp(name) for name in ("plain", "packed"))
    save_random(plain, "gpt_oss", **SIZES)
    shutil.copytree(plain, packed, dirs_exist_ok=True)
    rng, dense = np.random.default_rng(3), load_file(plain / "model.safetensors")
    stored = dict(dense)
    for name in [n for n in dense if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = dense[name].shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16)).astype(np.uint8)
        scales = rng.integers(120, 126, blocks.shape[:3]).astype(np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del stored[name]
        dense[name] = convert_moe_packed_tensors(
            torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
        ).numpy()
        assert dense[name].shape == (experts, columns, rows)
    save_file({n: np.ascontiguousarray(x) for n, x in dense.items()}, plain / "model.safetensors")
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return plain, packed


def stacks(lm: Any) -> dict[str, Any]:
    return {path: x for path, x in flatten(lm.params) if x.ndim == 3}


def logits(directory: Path) -> np.ndarray:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor(IDS)).logits.numpy())


def test_published_experts_stay_in_four_bits(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Every weight is transformers' bit for bit, also once saved; logits are those of floats; and
    written back to Hugging Face, the weights are bfloat16 without rounding.
    """
    plain, packed = pair
    exact, lm = jaxllm.load(plain), jaxllm.load(packed)
    lm.save(tmp_path / "native")
    for model in (lm, jaxllm.load(tmp_path / "native")):
        for path, weight in stacks(model).items():
            assert weight_format(weight) == "mxfp4"
            np.testing.assert_array_equal(to_dense(weight), dict(flatten(exact.params))[path])
    for path, weight in stacks(jaxllm.load(packed, quantize="int8-g32")).items():
        assert weight_format(weight) == "int8-g32"  # without rounding
        np.testing.assert_array_equal(to_dense(weight), dict(flatten(exact.params))[path])
    bits = [8 * x.nbytes / x.size for path, x in stacks(lm).items() if "gate" in path]
    assert max(bits) == 8.5  # 4.25, and twice as many columns as there are, to whole chunks of 128
    assert_close(jaxllm.forward(lm.model, lm.params, None, IDS).logits, logits(plain))
    write_hf(tmp_path / "hf", dequantize_checkpoint(open_checkpoint(packed)))
    written = load_file(tmp_path / "hf" / "model.safetensors")
    for name, array in load_file(plain / "model.safetensors").items():
        np.testing.assert_array_equal(np.asarray(written[name], np.float32), array, name)


def test_gguf_experts_stay_in_four_bits(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """GGUF's blocks are read exactly, and written unchanged, from GGUF and from Hugging Face."""

    def raw(name: str, array: np.ndarray) -> Any:
        kind = gguf.GGMLQuantizationType.MXFP4 if "exps.weight" in name else None
        if kind is None:
            return raw_of(gguf.GGMLQuantizationType.Q8_0)(name, array)
        return gguf.quants.quantize(array.astype(np.float32), kind), kind

    plain, packed = pair
    file = write(tmp_path / "a.gguf", plain, raw)
    lm = jaxllm.load(file)
    theirs = dequantized(file)
    for layer in range(2):
        for name in ("gate", "up", "down"):
            weight = stacks(lm)[STACK.format(layer, name)]
            assert weight_format(weight) == "mxfp4"
            np.testing.assert_array_equal(
                to_dense(weight), theirs[f"blk.{layer}.ffn_{name}_exps.weight"]
            )
    write_gguf(tmp_path / "b.gguf", open_checkpoint(file), "Q8_0")
    assert raw_tensors(tmp_path / "b.gguf") == raw_tensors(file)
    write_gguf(tmp_path / "c.gguf", open_checkpoint(packed), "Q8_0")
    found = {n: t for n, t in raw_tensors(tmp_path / "c.gguf").items() if "exps.weight" in n}
    assert {kind for kind, _, _ in found.values()} == {"MXFP4"}


def test_wrong_pieces_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A stack without scales, a wrong shape, and quantizing to MXFP4, which only files have."""
    shutil.copytree(pair[1], tmp_path / "a")
    stored = load_file(tmp_path / "a" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    for change, message in (
        ({name: stored[name][:, :-1]}, "down_proj_scales has shape"),
        ({}, r"layers\.0\.mlp\.experts\.down_proj\.weight\.scale is missing"),
    ):
        rest = {n: x for n, x in stored.items() if n != name}
        save_file({**rest, **change}, tmp_path / "a" / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            jaxllm.load(tmp_path / "a")
    with pytest.raises(ConfigError, match="mxfp4 cannot be made by quantizing"):
        as_format(jnp.ones((4, 32)), "mxfp4")


def test_defaults_of_gpt_oss_are_those_of_transformers() -> None:
    """Without settings, rotary positions are scaled by YaRN, and every other layer has a window."""
    made = transformers.GptOssConfig(num_hidden_layers=3).to_dict()
    needed = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads")  # fmt: skip
    config, _ = read_config({name: made[name] for name in needed})
    assert config == read_config(made)[0]
    rope = config.layer_rope(0)
    assert rope is not None and (rope.rope_type, rope.truncate) == ("yarn", False)
    assert [config.window(i) for i in range(3)] == [128, None, 128]
