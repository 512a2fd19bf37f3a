"""Text models of multimodal checkpoints, compared with transformers' multimodal classes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import jaxllm
from jaxllm.convert.hf import read_config
from jaxllm.convert.text_tower import select_text_config
from jaxllm.errors import UnusedSettingsWarning
from tests.tiny_models import GEMMA, KINDS, LLAMA, ROPES, SQUARE, VOCAB, random_torch_model, tokens

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 8}
VISION |= {"num_hidden_layers": 1, "patch_size": 4}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
QWEN_VISION |= {"patch_size": 4}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 1]}
MINISTRAL = {**ROPES["yarn"], "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}
# Class of transformers -> (text model, vision model), and the family that reads the text model.
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "Gemma3": ({**GEMMA, "sliding_window_pattern": 3}, VISION, "gemma3_text"),
    "Gemma4": (
        KINDS["gemma4_text"][1],
        {**VISION, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8},
        "gemma4_text",
    ),
    "Gemma4Unified": (
        {
            **{k: v for k, v in KINDS["gemma4_text"][1].items() if "per_layer_input" not in k},
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
        },
        {},
        "gemma4_text",
    ),
    "Mistral3": ({**LLAMA, "model_type": "mistral"}, VISION, "llama"),
    "Mistral3 of Ministral": (
        {**LLAMA, "model_type": "ministral3", "rope_parameters": MINISTRAL},
        VISION,
        "ministral3",
    ),
    "Qwen2_5_VL": (
        {**SQUARE, "rope_parameters": MROPE},
        {**QWEN_VISION, "out_hidden_size": 48},
        "qwen2",
    ),
    "Exaone4_5_": (
        {**LLAMA, "model_type": "exaone4_5_text", "sliding_window_pattern": 2},
        {**QWEN_VISION, "num_key_value_heads": 1, "out_hidden_size": 40},
        "exaone4",
    ),
    "Qwen3VL": (
        {**LLAMA, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {**QWEN_VISION, "out_hidden_size": 40, "deepstack_visual_indexes": []},
        "qwen3",
    ),
}


def run(lm: jaxllm.LM, ids: np.ndarray) -> np.ndarray:
    """Return the logits of all tokens."""
    output = jaxllm.forward(lm.model, lm.params, lm.init_cache(len(ids), ids.shape[1]), ids)
    return np.asarray(output.logits)


def save_multimodal(name: str, directory: Path) -> Any:
    """Save a random multimodal model, and return it."""
    text, vision, _ = TOWERS[name]
    prefix = name.split()[0]
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision)
    model = random_torch_model(config, make=transformers.AutoModelForImageTextToText)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", TOWERS)
def test_text_model_of_multimodal_checkpoint_equals_transformers(name: str, tmp_path: Path) -> None:
    """Logits of text equal those of the whole model; the other towers are named as unread."""
    import torch

    model = save_multimodal(name, tmp_path)
    with pytest.warns(UnusedSettingsWarning, match="vision_config"):
        lm = jaxllm.load(tmp_path)
    assert lm.config.model_type == TOWERS[name][2]
    ids = tokens(2, 30)
    with torch.no_grad():
        expected = model(torch.tensor(ids.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(run(lm, ids), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_model_is_found_under_older_and_newer_names(prefix: str, tmp_path: Path) -> None:
    """Tensors of the text model may be stored under both prefixes, with the head beside them."""
    from safetensors.numpy import load_file, save_file

    save_multimodal("Mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace(
            "model.language_model.", prefix
        ): x
        for name, x in tensors.items()
    }
    with pytest.warns(UnusedSettingsWarning):
        expected = run(jaxllm.load(tmp_path), tokens(1, 9))
    save_file(renamed, file)
    with pytest.warns(UnusedSettingsWarning):
        np.testing.assert_array_equal(run(jaxllm.load(tmp_path), tokens(1, 9)), expected)


def test_published_multimodal_configurations_are_read() -> None:
    """Flat fields (Qwen2.5-VL), and fields that equal the text class's defaults (Gemma 3)."""
    gemma = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
    gemma |= {"num_hidden_layers": 34, "sliding_window": 1024}
    gemma |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config, _ = read_config({"model_type": "gemma3", "text_config": gemma, "vision_config": {}})
    assert (config.vocab_size, config.num_attention_heads, config.num_key_value_heads) == (
        262208,
        8,
        4,
    )
    assert config.tie_word_embeddings and config.layer_rope(5) != config.layer_rope(0)
    flat = {**SQUARE, "model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": 7}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    config, _ = read_config(json.loads(json.dumps(flat)))
    assert (config.model_type, config.vocab_size) == ("qwen2", VOCAB)
    assert config.ropes[0].rope_type == "default"


@pytest.mark.parametrize(("experts", "family"), [(0, ""), (8, "_moe")])
def test_granite_4_has_two_families_also_within_other_models(experts: int, family: str) -> None:
    data = {"model_type": "granitemoehybrid", "num_local_experts": experts}
    for given in (data, {"model_type": "any", "text_config": data}):
        assert select_text_config(given)["model_type"] == f"granitemoehybrid{family}"
