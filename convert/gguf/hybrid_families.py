"""The GGUF architectures of families with recurrent layers, and of their siblings with experts."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxllm.convert.gguf import names
from jaxllm.convert.gguf.architecture import (
    DENSE_LAYERS,
    EXPERTS,
    KV_HEADS,
    MULTIPLIERS,
    NEXT_TOKEN_LAYERS,
    RECURRENT_LAYERS,
    RMS_NORM,
    ROUTING,
    SILU,
    GGUFArchitecture,
    derive_dense_layers,
    layer_range,
    without_next_tokens,
)
from jaxllm.convert.gguf.recurrent import RecurrentLayout
from jaxllm.convert.qwen3_next import FUSED_BETA_AND_ALPHA
from jaxllm.convert.tables import REQUIRED, Field
from jaxllm.models import FAMILIES

_ROPE_SWITCH = "rope.scaling.finetuned"
EXPERT_SIZE = "expert_feed_forward_length"
SHARED_EXPERT_SIZE = Field(
    "expert_shared_feed_forward_length", "shared_expert_intermediate_size", REQUIRED
)


def _omit(*keys: str) -> tuple[Field, ...]:
    """Return the common fields without these keys."""
    return tuple(field for field in RMS_NORM if field.key not in keys)


def _derive_qwen3_5(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Each `full_attention_interval`th layer has attention, or those that a list leaves out.

    llama.cpp has one size for heads of keys and of values.
    """
    count = without_next_tokens(fields["num_hidden_layers"], data)
    every, listed = data.get("full_attention_interval", 4), data.get(RECURRENT_LAYERS)
    if listed is None and type(every) is int and every > 0:
        listed = [(i + 1) % every != 0 for i in layer_range(count)]
    kinds = ("full_attention", "linear_attention")
    H, N = (fields[f"linear_num_{x}_heads"] for x in ("key", "value"))
    return {
        "num_hidden_layers": count,
        "layer_types": tuple(kinds[bool(x)] for x in (listed or ())[:count]),
        "linear_value_head_dim": fields["linear_key_head_dim"],
        "value_heads_tiled": fields.get("value_heads_tiled", H != N),
    }


def _derive_qwen3_next(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """All layers have experts."""
    result = _derive_qwen3_5(fields, data)
    types = ("sparse",) * len(layer_range(result["num_hidden_layers"]))
    return {**result, "value_heads_tiled": False, "mlp_layer_types": types}


def _write_qwen3_5(config: Any) -> dict[str, Any]:
    """Return the keys of recurrent layers; llama.cpp requires sections of multimodal positions."""
    pairs = config.rope.rotary_dim(config.head_dim) // 2
    return {
        RECURRENT_LAYERS: tuple(map(config.is_recurrent, range(config.num_hidden_layers))),
        "ssm.inner_size": config.linear_sizes[1],
        "rope.dimension_sections": (*((pairs + i) // 3 for i in (2, 1, 0)), 0),
    }


def _derive_kv_heads(
    fields: Mapping[str, Any], data: Mapping[str, Any], recurrent: str = "conv"
) -> dict[str, Any]:
    """Layers with 0 key/value heads are recurrent."""
    each = data.get(KV_HEADS, fields["num_attention_heads"])
    if not isinstance(each, tuple):
        each = tuple(each for _ in layer_range(fields["num_hidden_layers"]))
    heads = tuple(x for x in each if type(x) is int)
    return {
        "num_key_value_heads": max(heads, default=0),
        "layer_types": tuple("full_attention" if x else recurrent for x in heads),
    }


def _write_kv_heads(config: Any) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    return {KV_HEADS: tuple(config.kv_heads(i) for i in layers)}


def _derive_granite(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Mamba-2 layers have twice the hidden channels, for llama.cpp; a switch is for RoPE."""
    heads = fields["mamba_n_heads"]
    return {
        **_derive_kv_heads(fields, data, "linear_attention"),
        "uses_rope": data.get(_ROPE_SWITCH, True),
        "mamba_d_head": 2 * fields["hidden_size"] // heads if type(heads) is int and heads else 0,
    }


def _read_convolution_bias(tensors: Collection[str]) -> dict[str, Any]:
    return {"mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors)}


HYBRIDS: dict[str, GGUFArchitecture] = {
    "qwen35": GGUFArchitecture(
        family=FAMILIES["qwen3_5_text"],
        modules=names.QWEN3_5,
        fields=(
            *RMS_NORM,
            Field("ssm.conv_kernel", "linear_conv_kernel_dim", REQUIRED),
            Field("ssm.state_size", "linear_key_head_dim", REQUIRED),
            Field("ssm.group_count", "linear_num_key_heads", REQUIRED),
            Field("ssm.time_step_rank", "linear_num_value_heads", REQUIRED),
        ),
        derive=_derive_qwen3_5,
        derive_keys=frozenset(
            {
                NEXT_TOKEN_LAYERS,
                RECURRENT_LAYERS,
                "full_attention_interval",
                "rope.dimension_sections",
                "ssm.inner_size",
            }
        ),
        write_keys=_write_qwen3_5,
        constants={**SILU, "attention_bias": False},
        partial_rotary=True,
        layouts=(RecurrentLayout(),),
    ),
    "lfm2": GGUFArchitecture(
        family=FAMILIES["lfm2"],
        modules=names.LFM2,
        fields=(
            *_omit(KV_HEADS),
            Field("shortconv.l_cache", "conv_L_cache", REQUIRED),
        ),
        constants={**SILU, "conv_bias": False},
        derive=_derive_kv_heads,
        derive_keys=frozenset({KV_HEADS}),
        write_keys=_write_kv_heads,
        layouts=(RecurrentLayout(),),
    ),
}
_QWEN35, _LFM2 = HYBRIDS["qwen35"], HYBRIDS["lfm2"]
HYBRIDS |= {
    "qwen35moe": dataclasses.replace(
        _QWEN35,
        family=FAMILIES["qwen3_5_moe_text"],
        modules=names.QWEN3_5_MOE,
        fields=(
            *_omit("feed_forward_length"),
            *_QWEN35.fields[len(RMS_NORM) :],
            *EXPERTS,
            Field(EXPERT_SIZE, "intermediate_size", REQUIRED),
            SHARED_EXPERT_SIZE,
        ),
        derive_keys=_QWEN35.derive_keys | {"feed_forward_length"},  # of no layer
        allowed_values=ROUTING,
    ),
    "qwen3next": dataclasses.replace(
        _QWEN35,
        family=FAMILIES["qwen3_next"],
        modules=names.QWEN3_NEXT,
        fields=(
            *_QWEN35.fields,
            *EXPERTS,
            Field(EXPERT_SIZE, "moe_intermediate_size", REQUIRED),
            SHARED_EXPERT_SIZE,
        ),
        constants={**_QWEN35.constants, "norm_topk_prob": True},
        derive=_derive_qwen3_next,
        allowed_values=ROUTING,
        layouts=(RecurrentLayout(tiles=False), FUSED_BETA_AND_ALPHA),
    ),
    "lfm2moe": dataclasses.replace(
        _LFM2,
        family=FAMILIES["lfm2_moe"],
        modules=names.LFM2_MOE,
        fields=(
            *_LFM2.fields,
            *EXPERTS,
            Field(EXPERT_SIZE, "moe_intermediate_size", REQUIRED),
        ),
        constants={
            **_LFM2.constants,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
        derive=lambda fields, data: (
            derive_dense_layers(fields, data) | _derive_kv_heads(fields, data)
        ),
        derive_keys=_LFM2.derive_keys | {DENSE_LAYERS},
        write_keys=lambda config: {
            **_write_kv_heads(config),
            DENSE_LAYERS: config.mlp_layer_types.count("dense"),
            "expert_gating_func": 2,
        },
        allowed_values={**ROUTING, "expert_gating_func": (2,)},  # sigmoid
    ),
    "granitehybrid": GGUFArchitecture(
        family=FAMILIES["granitemoehybrid"],
        modules=names.GRANITE_HYBRID,
        fields=(
            *_omit(KV_HEADS),
            *MULTIPLIERS,
            Field("ssm.conv_kernel", "mamba_d_conv", REQUIRED),
            Field("ssm.state_size", "mamba_d_state", REQUIRED),
            Field("ssm.group_count", "mamba_n_groups", REQUIRED),
            Field("ssm.time_step_rank", "mamba_n_heads", REQUIRED),
        ),
        constants={**SILU, "attention_bias": False, "mamba_proj_bias": False},
        derive=_derive_granite,
        derive_keys=frozenset({KV_HEADS, _ROPE_SWITCH, SHARED_EXPERT_SIZE.key, "ssm.inner_size"}),
        write_keys=lambda config: {
            **_write_kv_heads(config),
            _ROPE_SWITCH: config.uses_rope,
            "ssm.inner_size": config.mamba_sizes[0],
        },
        read_names=_read_convolution_bias,
        layouts=(RecurrentLayout(),),
    ),
}
_GRANITE = HYBRIDS["granitehybrid"]
GRANITE_4_MOE = dataclasses.replace(
    _GRANITE,
    family=FAMILIES["granitemoehybrid_moe"],
    modules=names.GRANITE_HYBRID_MOE,
    fields=(
        *_GRANITE.fields,
        *EXPERTS,
        Field(SHARED_EXPERT_SIZE.key, "shared_intermediate_size", REQUIRED),
    ),
    derive_keys=_GRANITE.derive_keys - {SHARED_EXPERT_SIZE.key},
    allowed_values=ROUTING,
)
