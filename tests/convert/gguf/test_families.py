"""Every family that llama.cpp names: files as its converter writes them, and as we write them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import jaxllm
from jaxllm.api import open_checkpoint
from jaxllm.convert.gguf.writing import write_gguf
from jaxllm.weights.formats import dense, format_of
from jaxllm.weights.paths import flatten
from tests.convert.gguf.made import ARCHS, raw_of, write
from tests.twins import assert_close, save_random, tokens

# Heads of other sizes than the stream's share where a family may have them; rows of whole blocks.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "rms_norm_eps": 1e-3, "max_position_embeddings": 97,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 8},
    # Of a layer that sees a window, and one that does not.
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
    "granite": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "qwen3_moe": {"head_dim": 8, "mlp_only_layers": [], "moe_intermediate_size": 32},
    "gpt_neox": {},
}  # fmt: skip
IDS = tokens(2, 9)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a tiny model, by its family."""
    made: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            sizes = {**SIZES, **FAMILIES[family]}
            if family == "gpt_neox":
                sizes["layer_norm_eps"] = sizes.pop("rms_norm_eps")
            save_random(made[family], family, spread=0.1, **sizes)
        return made[family]

    return find


def logits(directory: Path) -> np.ndarray:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor(IDS)).logits.numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, directory: Any, tmp_path: Path) -> None:
    source = directory(family)
    lm = jaxllm.load(write(tmp_path / "a.gguf", source))
    hf = jaxllm.load(source)
    assert lm.config == hf.config  # and so all else that follows from it
    expected = dict(flatten(hf.params))
    found = dict(flatten(lm.params))
    assert found.keys() == expected.keys()
    for path, weight in found.items():  # 1 + w in float32 has fewer bits than w
        atol = 2.0**-24 if family.startswith("gemma") and "norm" in path else 0
        np.testing.assert_allclose(weight, expected[path], rtol=0, atol=atol, err_msg=path)
    ours = jaxllm.forward(lm.model, lm.params, None, IDS).logits
    assert_close(ours, logits(source))


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_rows_lie_in_their_places(family: str, directory: Any, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    source = directory(family)
    lm = jaxllm.load(write(tmp_path / "a.gguf", source, raw_of(kind)))
    expected = dict(flatten(jaxllm.load(source).params))
    kept = {path for path, x in flatten(lm.params) if format_of(x) == "int8-g32-f16"}
    vectors = ("norm", "bias", "mlp.gate.weight")
    assert kept == {path for path in expected if not any(name in path for name in vectors)}
    for path, weight in flatten(lm.params):
        step = np.abs(expected[path]).max() / 127 if path in kept else 2.0**-24
        np.testing.assert_allclose(dense(weight), expected[path], rtol=0, atol=step, err_msg=path)


def raw_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The type, the shape and the bytes of every tensor of a file, as the package reads it."""
    return {
        t.name: (t.tensor_type.name, tuple(map(int, t.shape)), np.asarray(t.data).tobytes())
        for t in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("name", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_what_the_converter_writes(
    family: str, name: str, directory: Any, tmp_path: Path
) -> None:
    source = directory(family)
    there = write(tmp_path / "a.gguf", source, raw_of(gguf.GGMLQuantizationType[name]))
    checkpoint = open_checkpoint(source)
    write_gguf(tmp_path / "b.gguf", checkpoint, name)
    assert raw_tensors(tmp_path / "b.gguf") == raw_tensors(there)
    assert open_checkpoint(tmp_path / "b.gguf").config == checkpoint.config
    # Again, from the leaves: integers stay, and what lies in one tensor is joined.
    write_gguf(tmp_path / "c.gguf", open_checkpoint(there), name)
    assert raw_tensors(tmp_path / "c.gguf") == raw_tensors(there)
    first, second = (gguf.GGUFReader(tmp_path / f"{x}.gguf").fields for x in "ab")
    arch = gguf.MODEL_ARCH_NAMES[ARCHS[checkpoint.config.model_type]]
    for key, field in first.items():  # we write more: what others leave to be computed
        if key.startswith(f"{arch}."):
            assert second[key].contents() == field.contents(), key
