"""Shards and tied heads of each family, and unsupported configurations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import jaxllm
from jaxllm.convert.hf import open_hf
from jaxllm.errors import ConfigError, JaxllmError
from tests.models.test_families import NEW
from tests.tiny_models import assert_close, load_twin, save_random, theirs, tokens

# transformers always ties the head of these.
TIED = {"gemma2", "gemma3_text"}


@pytest.mark.parametrize("family", [*NEW, "llama"])
def test_sharded_checkpoint_equals_single_file(family: str, tmp_path: Path) -> None:
    """With the other setting of tied embeddings: shards and one file load as the same tensors, and
    a missing shard is named.
    """
    tied = family in TIED or not theirs(family).tie_word_embeddings
    save_random(tmp_path / "one", family, num_hidden_layers=1, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) >= 2
    one, several = open_hf(tmp_path / "one"), open_hf(tmp_path / "shards")
    assert one.config == several.config
    assert one.config.tie_word_embeddings is tied
    assert set(one.tensors) == set(several.tensors)
    assert ("lm_head.weight" in one.tensors) is not tied
    for path, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor.read(), several.tensors[path].read(), path)
    shards[0].unlink()
    with pytest.raises(JaxllmError, match=f"{shards[0].name} is missing"):
        open_hf(tmp_path / "shards")
    if family in ("qwen2", "gpt_neox"):  # the other families share the head's code
        twin, ids = load_twin(tmp_path / "one"), tokens(2, 9)
        assert_close(jaxllm.forward(twin.model, twin.params, None, ids).logits, twin.logits(ids))


def config_error(family: str, directory: Path, changes: dict[str, Any]) -> str:
    """Return the error for a config.json with these fields, in a directory without weights."""
    directory.mkdir()
    config = json.loads(theirs(family).to_json_string(use_diff=False))
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError) as caught:
        open_hf(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", NEW)
def test_unsupported_config_is_refused_before_weights(family: str, tmp_path: Path) -> None:
    """Unsupported fields, RoPE types and heads raise a one-line error, although there is no weight
    file.
    """
    error = config_error(family, tmp_path / "a", {"attention_chunk_size": 4, "use_mrope": True})
    assert "attention_chunk_size must be null, got 4" in error
    assert "use_mrope must be False, got True" in error
    key = "full_attention" if family in ("gemma3_text", "gemma4_text") else None
    for number, (settings, message) in enumerate(
        (
            ({"rope_type": "spiral", "rope_theta": 1e4}, "'spiral' is not supported"),
            ({"rope_type": "linear", "rope_theta": 1e4}, "'linear' requires factor"),
            ({"rope_theta": 1e4, "mrope_section": [1]}, "mrope_section must be []"),
        )
    ):
        if family.startswith(("qwen3_5", "qwen3_next")) and "mrope_section" in settings:
            continue  # of text alone the sections are equal
        changes = {"rope_parameters": {key: settings} if key else settings}
        assert message in config_error(family, tmp_path / str(number), changes)
    head = {"architectures": [f"{family}ForSequenceClassification"]}
    assert "expected a plain causal model" in config_error(family, tmp_path / "b", head)


FAMILY_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping must be null"),
    ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ("phi3", {"attention_bias": True}, "attention_bias must be False"),
    ("smollm3", {"no_rope_layers": [1]}, "1 entries for 3"),
    ("granite", {"embedding_multiplier": 0}, "embedding_multiplier"),
    ("olmo2", {"hidden_act": "quick_gelu"}, "hidden_act"),
    ("gpt_neox", {"num_key_value_heads": 1}, "num_key_value_heads must be null"),
    ("gpt_neox", {"use_parallel_residual": "yes"}, "use_parallel_residual"),
]


@pytest.mark.parametrize(("family", "changes", "message"), FAMILY_FIELDS)
def test_unsupported_family_fields_are_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in config_error(family, tmp_path / "a", changes)
