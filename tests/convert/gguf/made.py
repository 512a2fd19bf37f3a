"""GGUF files written by the `gguf` package from Hugging Face directories, as llama.cpp's converter
lays them out.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHS = {"llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA,
         "gpt2": gguf.MODEL_ARCH.GPT2}  # fmt: skip
CONV1D = re.compile(r"\.c_(attn|proj|fc)\.weight$")  # GPT-2's matrices that are `[in, out]`
Bytes = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's converter."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def hf_tensors(directory: Path) -> dict[str, np.ndarray]:
    """By their names in GGUF, in their layout there."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    known = gguf.get_tensor_name_map(ARCHS[kind], layers)
    found = {}
    for name, array in load_file(directory / "model.safetensors").items():
        if kind == "gpt2" and CONV1D.search(name):
            array = array.T
        if kind != "gpt2" and ("q_proj" in name or "k_proj" in name):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            array = permuted(array, config[heads])
        theirs = known.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        found[theirs] = np.ascontiguousarray(array)
    return found


def add_settings(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    if config["model_type"] == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def raw_of(kind: gguf.GGMLQuantizationType, seed: int = 0) -> Bytes:
    """Matrices in one type, vectors in F32: what llama.cpp writes. K types, which the package does
    not quantize, are random blocks of about the same size as the numbers.
    """
    rng = np.random.default_rng(seed)

    def made(name: str, array: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if array.ndim < 2 or "position_embd" in name:
            return array.astype(np.float32), gguf.GGMLQuantizationType.F32
        if not kind.name.endswith("_K"):
            return gguf.quants.quantize(array.astype(np.float32), kind), kind
        columns, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (array.size // columns, size), np.uint8)
        for at, spread in {"Q6_K": ((208, 2e-4),)}.get(kind.name, ((0, 1e-3), (2, 3e-3))):
            scale = (rng.standard_normal((len(raw), 1)) * spread).astype(np.float16)
            raw[:, at : at + 2] = scale.view(np.uint8)
        return raw.reshape(*array.shape[:-1], -1), kind

    return made


def write(
    path: Path,
    directory: Path,
    raw: Bytes | None = None,
    also: Callable[[gguf.GGUFWriter], object] = lambda _: None,
    **options: Any,
) -> Path:
    """A GGUF file of a Hugging Face directory. also: is given the writer, before the tensors."""
    raw = raw or raw_of(gguf.GGMLQuantizationType.F32)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    arch = gguf.MODEL_ARCH_NAMES[ARCHS[config["model_type"]]]
    writer = gguf.GGUFWriter(path, arch, **options)
    add_settings(writer, config)
    also(writer)
    for name, array in hf_tensors(directory).items():
        data, kind = raw(name, array)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file as the package dequantizes them, by their names there."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        found[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return found
