"""Published config.json files: read as transformers reads them, ignoring neutral fields.

`published_configs.json` has whole files, copied from public code and pages of the Hub, or as
transformers prints them, without `_name_or_path`. These are put together from fields that public
code and pages quote: SmolLM3-3B and its base, Granite 4.0 Micro, H 350M, H Tiny and H Small,
4.1 and 4.2, EXAONE 4.0 1.2B, GLM-4, GLM-4.5, 4.7 and 4.7-Flash, MiniCPM3-4B, Command R7B,
Qwen3.5-0.8B, 2B and 4B, Qwen3.6, Qwen3.8, LFM2-1.2B and 8B-A1B, Ministral 3 3B and
Gemma 4 31B.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import modeling_auto

import jaxllm
from jaxllm.convert.hf import TABLES, open_hf, read_config, unread_fields
from jaxllm.convert.text_tower import OTHER_TOWERS, select_text_config
from jaxllm.errors import ConfigError, UnusedSettingsWarning
from jaxllm.ops import ACTIVATIONS
from jaxllm.ops.rope import inverse_frequencies
from tests.conftest import Run
from tests.tiny_models import (
    VOCAB,
    assert_close,
    load_twin,
    random_torch_model,
    save_random,
    theirs,
    tokens,
)

Row = dict[str, Any]
PUBLISHED: dict[str, Row] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8")
)
# Fields of published files that no conversion table lists.
UNREAD = {
    "auto_map", "custom_pipelines", "document_attention", "internal_version", "sliding_window_size",
    "unsloth_version", *OTHER_TOWERS,
}  # fmt: skip
SHRUNK = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "joelewing/Llama-3.2-1B-Instruct-Capybara",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-30B-A3B",
    "google/gemma-2-2b-it",
    "Codingstark/gemma3-270m-leetcode",
    "microsoft/Phi-4-mini-instruct",
    "allenai/OLMo-2-1124-13B",
    "HuggingFaceTB/SmolLM3-3B",
    "ibm-granite/granite-3.3-8b-instruct",
    "THUDM/GLM-4-9B-0414",
    "zai-org/GLM-4.5-Air",
    "zai-org/GLM-4.7-Flash",
    "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "baidu/ERNIE-4.5-0.3B-PT",
    "LGAI-EXAONE/EXAONE-4.0-32B",
    "CohereLabs/c4ai-command-r7b-12-2024",
    "ibm-granite/granite-4.0-micro",
    "openai-community/gpt2-medium",
    "iamplus/gpt-neoxt-20b-v2",
    "openai/gpt-oss-20b",
)


def config_class(row: Row) -> Any:
    """Return transformers' config class for a config.json."""
    return transformers.CONFIG_MAPPING[row["model_type"]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_read_config_equals_transformers_on_published_files(name: str) -> None:
    """A published config.json, and the same file after a round trip through transformers' config
    class, give equal configurations; every field is known.
    """
    row = PUBLISHED[name]
    config, _ = read_config(row)
    assert set(unread_fields(row)) <= UNREAD
    made = config_class(row)(**row).to_dict()
    assert config == read_config(made)[0]


def test_published_configs_cover_every_family() -> None:
    """At least 131 published files cover every model type that has a reader."""
    assert len(PUBLISHED) >= 131
    kinds = {select_text_config(row)["model_type"] for row in PUBLISHED.values()}
    assert kinds == set(TABLES)


def shrink(row: Row) -> Row:
    """Return the config with tiny sizes and the settings of its last two layers."""
    sizes = {
        "shared_intermediate_size": 24, "mamba_n_heads": 1, "n_routed_experts": 5,
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "head_dim": 16, "n_embd": 64, "n_head": 4, "n_layer": 2,
        "n_positions": 32, "n_ctx": 32, "num_experts": 5, "num_local_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 12, "query_pre_attn_scalar": 16,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
        "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
        "v_head_dim": 8, "block_ff_dim": 24, "block_multiple_of": 8, "full_attn_idxs": [1],
    }  # fmt: skip
    tiny = {key: sizes.get(key, value) if value else value for key, value in row.items()}
    if "num_key_value_heads" in row:
        shared = row["num_key_value_heads"] != row["num_attention_heads"]
        tiny["num_key_value_heads"] = 2 if shared else 4
    if row.get("sliding_window") is not None:
        tiny["sliding_window"] = 7
    for key in ("layer_types", "no_rope_layers"):
        if key in row:
            tiny[key] = row[key][-2:]
    tiny.pop("quantization_config", None)
    if "experts_per_token" in row:
        tiny["experts_per_token"] = sizes["num_experts_per_tok"]
    scaling = row.get("rope_scaling") or {}
    if "short_factor" in scaling:
        pairs = int(16 * row.get("partial_rotary_factor", 1.0)) // 2
        lists = {key: scaling[key][:pairs] for key in ("short_factor", "long_factor")}
        tiny["rope_scaling"] = {**scaling, **lists}
    return tiny


@pytest.mark.parametrize("name", SHRUNK)
def test_shrunk_published_model_equals_transformers(name: str, tmp_path: Path) -> None:
    """A tiny random model with a published file's settings has the same logits as transformers."""
    row = shrink(PUBLISHED[name])
    random_torch_model(config_class(row)(**row), spread=0.2).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(row))
    twin, ids = load_twin(tmp_path), tokens(1, 19)
    found = jaxllm.forward(twin.model, twin.params, None, ids).logits
    assert_close(found, twin.logits(ids))


@pytest.mark.parametrize("kind", TABLES)
def test_class_names_are_those_that_transformers_writes(kind: str) -> None:
    """config.json may name the plain, the causal and the classifying class of transformers."""
    table = TABLES[kind]
    for mapping, name in (
        (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, table.architectures[0]),
        (modeling_auto.MODEL_MAPPING_NAMES, table.architectures[1]),
        (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, table.classifier),
    ):
        assert mapping.get(theirs(kind).model_type) == name


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", {"use_mrope": True}, "use_mrope must be False, got True"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved must be False, got True"),
    (
        "llama",
        {"model_type": "gemma3"},
        "model_type 'gemma3' is not supported",
    ),
    ("llama", {"model_type": "phi3_v"}, "model_type 'phi3_v' is not supported"),
    ("llama", {"is_causal": False}, "is_causal must be True, got False"),
    ("llama", {"sliding_window": 7}, "sliding_window must be null, got 7"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    ("llama", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1"),
    ("llama", {"rope_scaling": {"full_attention": {}}}, "full_attention is an object"),
    ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types must be null or 'full_a"),
    (
        "mistral",
        {"sliding_window": 7, "layer_types": ["full_attention"] * 3},
        "'sliding_attention'",
    ),
    ("qwen2", {"rope_scaling": {"mrope_section": [1, 1, 2]}}, "rope_scaling.mrope_section must be"),
    ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm must be True, got False"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate must be True, got False"),
    ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type must be 'swish' or"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod must be 1, got 2"),
    ("phi3", {"interpolate_factor": 4}, "interpolate_factor must be 1, got 4"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias must be False"),
    ("phi3", {"mlp_bias": True}, "mlp_bias must be False"),
    ("gpt2", {"num_hidden_layers": 9}, "n_layer 3 and num_hidden_layers 9 differ"),
    ("gpt_neox", {"head_dim": 16}, "head_dim must be null, got 16"),
    ("llama", {"transformers_weights": "other.safetensors"}, "transformers_weights must be null"),
]


@pytest.mark.parametrize(("family", "change", "reason"), CHANGES)
def test_read_config_refuses_fields_that_change_results(
    family: str, change: dict[str, Any], reason: str
) -> None:
    """A field value that would change the output and is not supported raises a ConfigError that
    names the field.
    """
    with pytest.raises(ConfigError, match=reason):
        read_config({**theirs(family).to_dict(), **change})


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "gemma3_text"])
def test_read_config_accepts_neutral_values_of_refused_fields(family: str) -> None:
    """With strict=True, a field that is otherwise refused is accepted at the value that changes
    nothing.
    """
    neutral = {
        "use_mrope": False, "rope_interleaved": False, "is_causal": True, "full_attn_mod": 1,
        "attention_chunk_size": None, "text_config": None, "lm_head_bias": False,
    }  # fmt: skip
    data = theirs(family).to_dict()
    assert read_config({**data, **neutral}, strict=True)[0] == read_config(data)[0]


def test_zero_magnitude_of_yarn_is_as_absent() -> None:
    """Devstral 2 has mscale_all_dim 0, for which transformers takes YaRN's own magnitude."""
    rope = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    rope |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    zero = {**theirs("llama").to_dict(), "rope_parameters": None, "rope_scaling": rope}
    config, _ = read_config(zero)
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config_class(zero)(**zero))
    _, magnitude = inverse_frequencies(config.ropes[0], head_dim=config.head_dim)
    assert magnitude == pytest.approx(expected) and magnitude > 1


def test_unknown_fields_raise_one_warning(tmp_path: Path, run: Run) -> None:
    """Unknown config fields give one warning that lists them, are errors if strict, and are listed
    by `info`.
    """
    save_random(tmp_path, "llama", num_hidden_layers=1)
    expected = open_hf(tmp_path).config
    data = json.loads((tmp_path / "config.json").read_text())
    data |= {"mystery": 3, "auto_map": {"AutoModel": "evil.Model"}}
    data["rope_parameters"]["odd"] = 1
    (tmp_path / "config.json").write_text(json.dumps(data))
    names = ("mystery", "auto_map", "rope_parameters.odd")
    with pytest.warns(UnusedSettingsWarning) as warned:
        lm = jaxllm.load(tmp_path)
    assert lm.config == expected and len(warned) == 1
    assert all(name in str(warned[0].message) for name in names)
    with pytest.raises(
        ConfigError, match=r"unknown fields mystery, auto_map, rope_parameters\.odd"
    ):
        jaxllm.load(tmp_path, strict=True)
    assert open_hf(tmp_path).ignored == names
    status, out, err = run("info", tmp_path, "--json")
    assert (status, json.loads(out)["ignored"]) == (0, list(names))
    assert err.count("mystery, auto_map, rope_parameters.odd") == 1
    assert "mystery, auto_map" in run("info", tmp_path)[1]
    status, _, err = run("info", tmp_path, "--strict")
    assert status == 1 and "unknown fields mystery" in err


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_equal_transformers(name: str) -> None:
    """Each activation name computes the function that transformers computes for it."""
    x = np.linspace(-6, 6, 97, dtype=np.float32)
    expected = transformers.activations.ACT2FN[name](torch.tensor(x)).numpy()
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), expected, atol=2e-6)
