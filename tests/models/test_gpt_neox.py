"""Features of GPT-NeoX only; test_families.py covers all families."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.convert.hf import open_hf, read_config
from jaxllm.errors import CheckpointError, ConfigError
from tests.tiny_models import assert_close, load_twin, save_random, theirs, tokens

VARIANTS: list[dict[str, Any]] = [
    {"use_parallel_residual": False},
    {"tie_word_embeddings": True, "attention_bias": False, "rotary_pct": 1.0},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=["sequential", "tied-without-biases"])
def test_gpt_neox_variants_equal_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    save_random(tmp_path, "gpt_neox", num_hidden_layers=1, **changes)
    twin = load_twin(tmp_path)
    ids = tokens(2, 11)
    assert_close(jaxllm.forward(twin.model, twin.params, None, ids).logits, twin.logits(ids))


def test_qkv_rows_are_interleaved_per_head(tmp_path: Path) -> None:
    """On disk rows are `[N, 3, H]`: the second head's key begins at row 3 H + H; a bias of wrong
    length is refused.
    """
    save_random(tmp_path, "gpt_neox", num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    rows = load_file(file)["gpt_neox.layers.0.attention.query_key_value.weight"]
    split = open_hf(tmp_path).tensors
    for part, letter in enumerate("qkv"):
        found = split[f"layers.0.attention.{letter}_proj.weight"].read()
        np.testing.assert_array_equal(found, rows.reshape(5, 3, 8, 40)[:, part].reshape(40, 40))
    tensors = load_file(file)
    name = "gpt_neox.layers.0.attention.query_key_value.bias"
    save_file({**tensors, name: tensors[name][:-1]}, file)
    with pytest.raises(CheckpointError, match=r"query_key_value.bias has shape \(119,\), .* 120"):
        open_hf(tmp_path)


def test_lm_head_is_read_under_both_names(tmp_path: Path) -> None:
    """The head is embed_out or lm_head; a file with both is refused."""
    save_random(tmp_path, "gpt_neox", num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("embed_out.weight")
    save_file({**tensors, "lm_head.weight": head}, file)
    np.testing.assert_array_equal(open_hf(tmp_path).tensors["lm_head.weight"].read(), head)
    save_file({**tensors, "lm_head.weight": head, "embed_out.weight": head}, file)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is stored twice"):
        open_hf(tmp_path)


def test_rotary_settings_accept_every_spelling() -> None:
    """The settings of the published files and of transformers 4 give the same config; contradictory
    ones are refused.
    """
    config = theirs("gpt_neox").to_dict()
    del config["rope_parameters"]
    published = {"rotary_pct": 0.75, "rotary_emb_base": 500}
    both = {**published, "rope_theta": 500, "partial_rotary_factor": 0.75}  # by transformers 4
    expected = read_config(theirs("gpt_neox").to_dict())[0]
    for spelling in (published, both):
        assert read_config({**config, **spelling})[0] == expected
    with pytest.raises(ConfigError, match=r"rotary_pct 0.75 differs from partial_rotary_factor"):
        read_config({**config, **both, "partial_rotary_factor": 0.5})
    with pytest.raises(ConfigError, match=r"rotates 3 dimensions; expected an even number"):
        read_config({**config, "rotary_pct": 0.4})
