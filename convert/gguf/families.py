"""The table of GGUF architectures: what llama.cpp computes for each, as a configuration."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config.model import Rope
from jaxllm.convert.gguf import names
from jaxllm.convert.gguf.architecture import (
    DENSE_LAYERS,
    EXPERTS,
    LAYER_NORM,
    MULTIPLIERS,
    NEXT_TOKEN_LAYERS,
    RMS_NORM,
    ROUTING,
    SILU,
    GGUFArchitecture,
    derive_dense_layers,
    layer_range,
    layer_types,
    read_pattern,
)
from jaxllm.convert.gguf.gemma4 import GEMMA4
from jaxllm.convert.gguf.hybrid_families import GRANITE_4_MOE, HYBRIDS
from jaxllm.convert.gguf.latent_families import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from jaxllm.convert.gguf.rotary import LOG_MULTIPLIER
from jaxllm.convert.tables import REQUIRED, Field
from jaxllm.models import FAMILIES

SLIDING_WINDOW = Field("attention.sliding_window", "sliding_window", None)
BIAS_TENSORS = {"attention_bias": "blk.0.attn_q.bias"}
MLP_BIAS_TENSORS = {**BIAS_TENSORS, "mlp_bias": "blk.0.ffn_gate.bias"}
# Of Granite 4 without Mamba layers and experts, which is Granite to llama.cpp, and reads none.
UNUSED_OF_GRANITE_4 = frozenset(
    {
        "expert_shared_feed_forward_length",
        *(
            f"ssm.{name}"
            for name in ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")
        ),
    }
)


def _full_attention(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": layer_types(fields["num_hidden_layers"], lambda i: False)}


def _derive_gemma(
    fields: Mapping[str, Any], data: Mapping[str, Any], period: int, largest_layers: int
) -> dict[str, Any]:
    """Derive layer types and the query scale.

    Each `period`th layer has full attention. Queries are scaled by 1 / sqrt(head_dim), except in
    the model with `largest_layers` layers, where it is 1 / sqrt(hidden_size / heads).
    """
    count, share = fields["num_hidden_layers"], fields["head_dim"]
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if count == largest_layers and type(hidden) is int and type(heads) is int and heads > 0:
        share = hidden // heads
    return {"query_pre_attn_scalar": share, "layer_types": read_pattern(data, count, period)}


def _derive_gemma2(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    return _derive_gemma(fields, data, 2, 46)


def _derive_gemma3(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    theta = data.get("rope.freq_base_swa", 10000.0)
    local = Rope(rope_type="default", rope_theta=theta)
    return {**_derive_gemma(fields, data, 6, 62), "local_rope": local}


def _derive_olmo3(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Every fourth layer has full attention, and the scaling; the others plain rotary settings."""
    rope = fields["rope"]
    local = Rope(rope_type="default", rope_theta=rope.rope_theta) if rope else None
    types = read_pattern(data, fields["num_hidden_layers"], 4)
    return {"layer_types": types, "local_rope": local}


def _derive_exaone4(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """If there is a window, every fourth layer has full attention."""
    if fields["sliding_window"] is None:
        return _full_attention(fields, data)
    return {"layer_types": read_pattern(data, fields["num_hidden_layers"], 4)}


def _derive_cohere2(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": read_pattern(data, fields["num_hidden_layers"], 4)}


def _derive_smollm3(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Disable RoPE in every fourth layer."""
    count = fields["num_hidden_layers"]
    turns = tuple((i + 1) % 4 != 0 for i in layer_range(count))
    return {**_full_attention(fields, data), "turns": turns}


def _derive_qwen3_moe(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    count = fields["num_hidden_layers"]
    return {"mlp_layer_types": tuple("sparse" for _ in layer_range(count))}


def _derive_gpt_oss(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": read_pattern(data, fields["num_hidden_layers"], 2)}


ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(
        family=FAMILIES["llama"],
        modules=names.LLAMA,
        fields=(*RMS_NORM, SLIDING_WINDOW),
        tensor_flags=MLP_BIAS_TENSORS,
    ),
    "gpt2": GGUFArchitecture(
        family=FAMILIES["gpt2"],
        modules=names.GPT2,
        fields=LAYER_NORM,
        constants={
            "hidden_act": "gelu_new",  # ggml's GELU is the tanh approximation
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        uses_rope=False,
    ),
    "qwen2": GGUFArchitecture(
        family=FAMILIES["qwen2"],
        modules=names.QWEN2,
        fields=RMS_NORM,
        constants={**SILU, "sliding_window": None},
        derive=_full_attention,
    ),
    "qwen3": GGUFArchitecture(
        family=FAMILIES["qwen3"],
        modules=names.QWEN3,
        fields=RMS_NORM,
        constants={**SILU, "sliding_window": None},
        derive=_full_attention,
        tensor_flags=BIAS_TENSORS,
    ),
    "qwen3moe": GGUFArchitecture(
        family=FAMILIES["qwen3_moe"],
        modules=names.QWEN3_MOE,
        fields=(
            *RMS_NORM,
            *EXPERTS,
            Field("expert_feed_forward_length", "moe_intermediate_size", REQUIRED),
        ),
        constants={**SILU, "sliding_window": None, "norm_topk_prob": True},
        derive=_derive_qwen3_moe,
        tensor_flags=BIAS_TENSORS,
        allowed_values=ROUTING,
    ),
    "gpt-oss": GGUFArchitecture(
        family=FAMILIES["gpt_oss"],
        modules=names.GPT_OSS,
        fields=(
            *RMS_NORM,
            *EXPERTS,
            Field("expert_feed_forward_length", "intermediate_size", REQUIRED),
            Field("attention.sliding_window", "sliding_window", REQUIRED),
        ),
        constants={**SILU, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        derive=_derive_gpt_oss,
        derive_keys=frozenset({"attention.sliding_window_pattern"}),
        tensor_flags=BIAS_TENSORS,
        allowed_values={**ROUTING, "expert_gating_func": (0, 3)},  # 3: softmax of the chosen
        truncates_yarn=False,
    ),
    "gemma2": GGUFArchitecture(
        family=FAMILIES["gemma2"],
        modules=names.GEMMA2,
        fields=(
            *RMS_NORM,
            Field("attention.sliding_window", "sliding_window", 4096),
            Field("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
            Field("final_logit_softcapping", "final_logit_softcapping", 30.0),
        ),
        constants={"hidden_act": "gelu_pytorch_tanh"},
        derive=_derive_gemma2,
        tensor_flags=BIAS_TENSORS,
    ),
    "gemma3": GGUFArchitecture(
        family=FAMILIES["gemma3_text"],
        modules=names.GEMMA3,
        fields=(
            *RMS_NORM,
            Field("attention.sliding_window", "sliding_window", REQUIRED),
            Field("final_logit_softcapping", "final_logit_softcapping", None),
        ),
        constants={"hidden_act": "gelu_pytorch_tanh"},
        derive=_derive_gemma3,
        derive_keys=frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"}),
        tensor_flags=BIAS_TENSORS,
    ),
    "gemma4": GEMMA4,
    "mistral3": GGUFArchitecture(
        family=FAMILIES["ministral3"],
        modules=names.LLAMA,
        fields=(
            *RMS_NORM,
            SLIDING_WINDOW,
            Field("attention.temperature_scale", "llama_4_scaling_beta", 0.0),
        ),
        allowed_values={LOG_MULTIPLIER: (0.0, 1.0)},
    ),
    "phi3": GGUFArchitecture(
        family=FAMILIES["phi3"],
        modules=names.PHI3,
        fields=(*RMS_NORM, SLIDING_WINDOW),
        partial_rotary=True,
    ),
    "olmo2": GGUFArchitecture(
        family=FAMILIES["olmo2"],
        modules=names.OLMO2,
        fields=RMS_NORM,
        tensor_flags=BIAS_TENSORS,
    ),
    "smollm3": GGUFArchitecture(
        family=FAMILIES["smollm3"],
        modules=names.LLAMA,
        fields=RMS_NORM,
        constants={**SILU, "sliding_window": None},
        derive=_derive_smollm3,
        tensor_flags=MLP_BIAS_TENSORS,
    ),
    "granite": GGUFArchitecture(
        family=FAMILIES["granite"],
        modules=names.LLAMA,
        fields=(*RMS_NORM, *MULTIPLIERS),
        tensor_flags=MLP_BIAS_TENSORS,
        # For Granite this is a switch: without it llama.cpp applies no RoPE.
        allowed_values={"rope.scaling.finetuned": (True,)},
        derive_keys=UNUSED_OF_GRANITE_4,
    ),
    "glm4": GGUFArchitecture(
        family=FAMILIES["glm4"],
        modules=names.GLM4,
        fields=RMS_NORM,
        tensor_flags=BIAS_TENSORS,
        partial_rotary=True,
    ),
    "glm4moe": GGUFArchitecture(
        family=FAMILIES["glm4_moe"],
        modules=names.GLM4_MOE,
        fields=(
            *RMS_NORM,
            *EXPERTS,
            Field("expert_feed_forward_length", "moe_intermediate_size", REQUIRED),
            Field("expert_shared_count", "n_shared_experts", REQUIRED),
            Field("expert_weights_norm", "norm_topk_prob", False),
            Field("expert_weights_scale", "routed_scaling_factor", 1.0),
        ),
        constants={**SILU, "n_group": 1, "topk_group": 1},
        derive=derive_dense_layers,
        derive_keys=frozenset({DENSE_LAYERS, NEXT_TOKEN_LAYERS}),
        write_keys=lambda config: {
            DENSE_LAYERS: config.mlp_layer_types.count("dense"),
            "expert_gating_func": 2,
        },
        tensor_flags={**BIAS_TENSORS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
        allowed_values={**ROUTING, "expert_gating_func": (0, 2)},  # sigmoid, which is the default
        partial_rotary=True,
    ),
    "seed_oss": GGUFArchitecture(
        family=FAMILIES["seed_oss"],
        modules=names.SEED_OSS,
        fields=RMS_NORM,
        constants={**SILU, "attention_out_bias": False, "mlp_bias": False},
        tensor_flags=BIAS_TENSORS,
    ),
    "ernie4_5": GGUFArchitecture(
        family=FAMILIES["ernie4_5"],
        modules=names.LLAMA,
        fields=RMS_NORM,
        constants={**SILU, "use_bias": False},
    ),
    "exaone4": GGUFArchitecture(
        family=FAMILIES["exaone4"],
        modules=names.EXAONE4,
        fields=(*RMS_NORM, SLIDING_WINDOW),
        derive=_derive_exaone4,
        writes_pattern=True,
        derive_keys=frozenset({"attention.sliding_window_pattern"}),
    ),
    "cohere2": GGUFArchitecture(
        family=FAMILIES["cohere2"],
        modules=names.COHERE2,
        fields=(
            *LAYER_NORM,
            Field("attention.sliding_window", "sliding_window", REQUIRED),
            Field("logit_scale", "logit_scale", REQUIRED),
        ),
        constants={**SILU, "attention_bias": False},
        derive=_derive_cohere2,
        derive_keys=frozenset({"attention.sliding_window_pattern"}),
        writes_pattern=True,
    ),
    "gptneox": GGUFArchitecture(
        family=FAMILIES["gpt_neox"],
        modules=names.GPT_NEOX,
        fields=(*LAYER_NORM, Field("use_parallel_residual", "use_parallel_residual", True)),
        # Pythia's activation, which no key names; llama.cpp uses the tanh approximation.
        constants={"hidden_act": "gelu"},
        tensor_flags={"attention_bias": "blk.0.attn_qkv.bias"},
        partial_rotary=True,
    ),
}
ARCHITECTURES |= {**HYBRIDS, "deepseek2": DEEPSEEK_V2}
# The text models of Qwen's vision models: for text alone, the sections of positions are equal.
ARCHITECTURES |= {
    name: dataclasses.replace(
        ARCHITECTURES[text],
        derive_keys=frozenset({"rope.dimension_sections", "n_deepstack_layers"}),
    )
    for name, text in (("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"))
}
# Architectures that a positive number under a key, of those that the row allows, makes another
# family: name, key and row. Rows without a key are for writing only.
VARIANTS: tuple[tuple[str, str, GGUFArchitecture], ...] = (
    ("deepseek2", "expert_gating_func", DEEPSEEK_V3),
    ("deepseek2", "", GLM4_MOE_LITE),  # read as DeepSeek-V3
    ("granitehybrid", "expert_count", GRANITE_4_MOE),
    (
        "llama",
        "expert_count",
        GGUFArchitecture(
            family=FAMILIES["mixtral"],
            modules=names.MIXTRAL,
            fields=(*RMS_NORM, SLIDING_WINDOW, *EXPERTS),
            allowed_values=ROUTING,
        ),
    ),
    (
        "granite",
        "",  # read as Granite
        dataclasses.replace(
            ARCHITECTURES["granite"],
            family=FAMILIES["granitemoehybrid"],
            tensor_flags=BIAS_TENSORS,
            constants={**SILU, "uses_rope": True},
            derive=lambda fields, data: {
                "layer_types": ("full_attention",) * fields["num_hidden_layers"]
            },
        ),
    ),
    (
        "olmo2",
        "attention.sliding_window",
        GGUFArchitecture(
            family=FAMILIES["olmo3"],
            modules=names.OLMO2,
            fields=(*RMS_NORM, SLIDING_WINDOW),
            derive=_derive_olmo3,
            writes_pattern=True,
            derive_keys=frozenset({"attention.sliding_window_pattern"}),
            tensor_flags=BIAS_TENSORS,
        ),
    ),
)
