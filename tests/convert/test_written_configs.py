"""config.json exported from the native form: equal to the original, valid in transformers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from jaxllm import models
from jaxllm.convert.hf import read_config, write_config, write_hf
from jaxllm.convert.registry import open_path
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.models import config_from_dict
from jaxllm.research.pruning.structured_pruning import cut_groups, narrow_config
from tests.conftest import Run
from tests.tiny_models import (
    KINDS,
    LATENTS,
    RECURRENT,
    assert_close,
    load_twin,
    save_random,
    theirs,
    tokens,
)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000, "factor": 8, "low_freq_factor": 2,
    "high_freq_factor": 5, "original_max_position_embeddings": 40,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500, "short_factor": [1, 1.5], "long_factor": [2, 3.5],
    "partial_rotary_factor": 0.75, "original_max_position_embeddings": 40, "factor": 3,
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}
# Overrides that make every field differ from its class's default. Numbers are integers where
# published files have integers.
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {**BIASES, "rope_parameters": LLAMA3},
    "mistral": {"sliding_window": 7, "head_dim": 10},
    "gpt2": {
        "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True,
        "activation_function": "relu",
    },
    "qwen2": {},
    "qwen3": {
        "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 2,
    },
    "gemma2": {
        "num_attention_heads": 4, "query_pre_attn_scalar": 7, "attention_bias": True,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"],
    },
    "gemma3_text": {
        "num_attention_heads": 4, "query_pre_attn_scalar": 7, "attention_bias": True,
        "final_logit_softcapping": 10.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 500, "factor": 8},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300},
        },
    },
    "gemma4_text": {
        "num_key_value_heads": 2, "attention_bias": True, "sliding_window": 6,
        "num_attention_heads": 4, "final_logit_softcapping": 10.0, "global_head_dim": 10,
        "num_kv_shared_layers": 1,  "vocab_size_per_layer_input": 140, "attention_k_eq_v": True,
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 11,
        "hidden_size_per_layer_input": 9, "num_global_key_value_heads": 2,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 500, "factor": 8},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300},
        },
    },
    "phi3": {"rope_parameters": LONGROPE, "sliding_window": 9},
    "olmo2": {"attention_bias": True},
    "olmo3": {
        "attention_bias": True, "sliding_window": 6,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 500, "factor": 8},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300},
        },
    },
    "ministral3": {
        "sliding_window": 6,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 700, "factor": 8, "llama_4_scaling_beta": 0.2,
            "original_max_position_embeddings": 40,
        },
    },
    "smollm3": {
        **BIASES, "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": False,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 3},
    "qwen3_moe": {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5},
    "gpt_oss": {
        "num_local_experts": 5, "num_experts_per_tok": 3, "attention_bias": False,
        "swiglu_alpha": 1.5, "swiglu_limit": 5.0, "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "granite": {
        **BIASES, "embedding_multiplier": 12, "residual_multiplier": 2, "logits_scaling": 8,
        "attention_multiplier": 3,
    },
    "glm4": {"attention_bias": False, "num_key_value_heads": 4},
    "glm4_moe": {
        "n_group": 2, "topk_group": 2, "num_key_value_heads": 4, "norm_topk_prob": False,
    },
    "seed_oss": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "ernie4_5": {"use_bias": True, "num_key_value_heads": 4},
    "exaone4": {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
    "cohere2": {
        "attention_bias": True, "logit_scale": 2.0,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"],
    },
    "granitemoehybrid": {
        "attention_bias": True, "residual_multiplier": 2, "mamba_n_heads": 6, "mamba_n_groups": 3,
        "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "granitemoehybrid_moe": {
        "attention_bias": True, "residual_multiplier": 2, "mamba_n_heads": 6, "mamba_n_groups": 3,
        "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True,
        "layer_types": ["full_attention", "linear_attention"], "position_embedding_type": "rope",
    },
    "gpt_neox": {"attention_bias": False, "use_parallel_residual": False},
    "qwen3_5_text": {
        "attention_bias": True, "num_key_value_heads": 2, "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    },
    "lfm2": {
        "conv_L_cache": 5, "conv_bias": True, "num_key_value_heads": 4,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "lfm2_moe": {
        "conv_L_cache": 5, "conv_bias": True, "num_key_value_heads": 4, "num_dense_layers": 1,
        "norm_topk_prob": False, "use_expert_bias": False,
    },
    "qwen3_5_moe_text": {
        "attention_bias": True, "num_key_value_heads": 4, "linear_conv_kernel_dim": 3,
    },
    "qwen3_next": {
        "attention_bias": True, "num_key_value_heads": 4, "linear_conv_kernel_dim": 3,
        "norm_topk_prob": False,
    },
    "deepseek_v2": {"n_group": 2, "n_shared_experts": 3, "first_k_dense_replace": 2},
    "deepseek_v3": {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "q_lora_rank": None},
    "glm4_moe_lite": {
        "n_group": 2, "norm_topk_prob": False, "attention_bias": True,
        "mlp_layer_types": ["sparse", "dense"],
    },
    "minicpm3": {**BIASES, "scale_depth": 2, "q_lora_rank": None},
}  # fmt: skip
# Granite 4 has experts by default; GLM-4-MoE no head size that fits its heads.
REQUIRED: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"num_local_experts": 0},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "lfm2_moe": {"layer_types": ["conv"] * 32},
}
# jaxllm's own fields, and those of other classes (tests/test_heads.py)
NATIVE_FIELDS = {"attention", "capacity_factor", "score", "value_heads_tiled"}
FIXED_FIELDS = {
    **{family: {"num_key_value_heads"} for family in LATENTS},
    "deepseek_v2": {"norm_topk_prob", "num_key_value_heads"},
    "lfm2": {"hidden_act"},
    "lfm2_moe": {"hidden_act"},
    "llama": {"sliding_window"},
    "mistral": {"attention_bias", "mlp_bias"},
}


def nondefault_config(family: str) -> Any:
    """Return transformers' config with every field that jaxllm reads off its default."""
    act = {"hidden_act": "relu", "hidden_activation": "relu"}
    base = {k: v for k, v in act.items() if hasattr(theirs(family), k)}
    tie = not type(theirs(family))().tie_word_embeddings
    rope = {"rope_type": "default", "rope_theta": 700}
    rotary = {} if family in ("gpt2", "gpt_neox") else {"rope_parameters": rope}
    return theirs(family, **{**base, "tie_word_embeddings": tie, **rotary, **OVERRIDES[family]})


@pytest.mark.parametrize("family", KINDS)
def test_config_fields_round_trip_through_native_form(family: str) -> None:
    """HF -> native -> HF writes the same bytes as HF -> HF, and transformers reads the original
    configuration from them.
    """
    source = nondefault_config(family)
    data = json.loads(source.to_json_string(use_diff=False))
    config, _ = read_config(data)
    plain, _ = read_config(type(source)(**REQUIRED.get(family, {})).to_dict())
    same = {
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) == getattr(plain, field.name)
    }
    assert same <= NATIVE_FIELDS | FIXED_FIELDS.get(family, set())
    native = config_from_dict(json.loads(json.dumps(config.to_dict())))
    direct, again = (json.dumps(write_config(c)[0]) for c in (config, native))
    assert again == direct
    made = type(source)(**json.loads(again))
    assert read_config(made.to_dict())[0] == config


@pytest.mark.parametrize("family", ["glm4", "glm4_moe", "qwen3_5_text"])
def test_whole_heads_are_written_where_a_part_is_the_default(family: str) -> None:
    """A rotation of whole heads is read back as one, and not as the family's share."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
    config, _ = read_config(theirs(family, rope_parameters=rope).to_dict())
    assert config.layer_rope(1).rotary_dim(config.head_dim) == config.head_dim
    again, _ = read_config(write_config(config)[0])
    assert again == config


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_query_pre_attn_scalar_is_written_as_integer(family: str) -> None:
    """A whole float in older native files is written as an integer, since transformers refuses
    floats; 9.5 is an error.
    """
    config, _ = read_config(theirs(family).to_dict())
    data = {**config.to_dict(), "query_pre_attn_scalar": 9.0}
    old = config_from_dict(json.loads(json.dumps(data)))
    written = write_config(old)[0]
    assert json.dumps(written["query_pre_attn_scalar"]) == "9"
    type(theirs(family))(**json.loads(json.dumps(written)))
    half = dataclasses.replace(old, query_pre_attn_scalar=9.5)
    with pytest.raises(ConfigError, match=r"got 9\.5, expected a whole number"):
        write_config(half)


WHOLE = ("gpt2", "olmo2", "olmo3", "gemma4_text", *RECURRENT, *LATENTS)
HEADS = [name for name in KINDS if name not in WHOLE]


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("heads", [6, 4, 2])
def test_pruned_heads_export_only_if_transformers_accepts_them(family: str, heads: int) -> None:
    """A config pruned from 8 heads is written if transformers' class accepts it and is refused
    otherwise; GPT-NeoX and Cohere 2 are always refused.
    """
    single = family == "gpt_neox"  # no grouped heads; the head size is derived
    pairs = {} if single else {"num_key_value_heads": 4}
    width = {"hidden_size": 64} if single else {}
    data = theirs(family, num_attention_heads=8, **pairs, **width).to_dict()
    config = narrow_config(read_config(data)[0], "heads", heads if single else heads // 2)
    changed = {"num_attention_heads": heads, "head_dim": config.head_dim}
    changed |= {name: heads // 2 for name in pairs}
    refused = single or family == "cohere2"  # transformers derives the head size
    try:
        type(theirs(family))(**{**data, **changed})
    except Exception:  # classes raise different errors
        refused = True
    if refused:
        with pytest.raises(ConfigError, match="num_attention_heads is invalid in the Hugging"):
            write_config(config)
        return
    made = type(theirs(family))(**json.loads(json.dumps(write_config(config)[0])))
    assert read_config(made.to_dict())[0] == config


@pytest.mark.parametrize("family", WHOLE)
def test_heads_that_cannot_be_pruned_are_refused(family: str) -> None:
    """narrow_config refuses to drop heads of GPT-2, OLMo, and layers of several kinds."""
    with pytest.raises(ConfigError, match=f"heads of {family} cannot be dropped"):
        narrow_config(read_config(theirs(family).to_dict())[0], "heads", 1)


def save_three_of_four(family: str, tmp_path: Path) -> LM:
    """Save a model with 3 of its 4 key-value heads as `small`, and return it."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4}
    save_random(tmp_path / "whole", family, **sizes)
    lm = jaxllm.load(tmp_path / "whole")
    config, params = cut_groups(lm.config, lm.params, "heads", [[0, 1, 3]])
    lm = dataclasses.replace(lm, config=config, params=params, model=models.build(config))
    lm.save(tmp_path / "small")
    return lm


def test_uneven_pruned_heads_equal_transformers(tmp_path: Path) -> None:
    """Qwen2 with 3 of its 4 key-value heads is exported and has the same logits in transformers."""
    lm = save_three_of_four("qwen2", tmp_path)
    write_hf(tmp_path / "theirs", open_path(tmp_path / "small"))
    ids = tokens(1, 19)
    twin = load_twin(tmp_path / "theirs")
    assert twin.torch_model.config.num_attention_heads == 6
    assert_close(jaxllm.forward(lm.model, lm.params, None, ids).logits, twin.logits(ids))


def test_convert_refuses_uneven_llama_without_output(tmp_path: Path, run: Run) -> None:
    """convert --to-hf refuses a Llama with 6 heads, lists the counts that transformers accepts, and
    leaves no output directory.
    """
    save_three_of_four("llama", tmp_path)
    status, _, err = run("convert", tmp_path / "small", tmp_path / "theirs", "--to-hf")
    assert status == 1 and "got 6, expected one of 2, 4" in err
    assert not (tmp_path / "theirs").exists()
