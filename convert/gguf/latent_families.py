"""The GGUF architecture of families with latent attention: DeepSeek-V2 and V3, GLM-4.7-Flash."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.convert.gguf import names
from jaxllm.convert.gguf.architecture import (
    DENSE_LAYERS,
    EXPERTS,
    NEXT_TOKEN_LAYERS,
    RMS_NORM,
    ROUTING,
    SILU,
    GGUFArchitecture,
    derive_dense_layers,
)
from jaxllm.convert.gguf.rotary import LOG_MULTIPLIER
from jaxllm.convert.tables import REQUIRED, Field
from jaxllm.errors import ConfigError
from jaxllm.models import FAMILIES

_QUERY_SIZE = "attention.key_length_mla"
_GROUPS = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}


def _derive(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the sizes of heads, and YaRN's scales.

    The multiplier is a tenth of `mscale_all_dim`, which scales scores; rotated dimensions keep
    their magnitude. Raises ConfigError for older files, in which keys and values are one matrix.
    """
    size, turned = data.get(_QUERY_SIZE), fields["qk_rope_head_dim"]
    if type(size) is not int or type(turned) is not int:
        raise ConfigError(f"{_QUERY_SIZE} is missing. Convert the model again: the file is too old")
    rope, multiplier = fields["rope"], data.get(LOG_MULTIPLIER)
    if rope.rope_type == "yarn":
        scale = round(10 * multiplier, 5) if multiplier else None
        rope = dataclasses.replace(
            rope, mscale=scale, mscale_all_dim=scale, attention_factor=None if scale else 1.0
        )
    return {
        **derive_dense_layers(fields, data),
        "rope": rope,
        "qk_nope_head_dim": size - turned,
    }


def _write_keys(config: Any) -> dict[str, Any]:
    scale = config.rope.mscale_all_dim
    return {
        _QUERY_SIZE: config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "expert_gating_func": 1 + config.routing.uses_sigmoid,
        DENSE_LAYERS: config.mlp_layer_types.count("dense"),
        LOG_MULTIPLIER: scale and 0.1 * scale,
    }


DEEPSEEK_V2 = GGUFArchitecture(
    family=FAMILIES["deepseek_v2"],
    modules=names.LATENT_MOE,
    fields=(
        *RMS_NORM,
        *EXPERTS,
        Field("expert_feed_forward_length", "moe_intermediate_size", REQUIRED),
        Field("expert_shared_count", "n_shared_experts", REQUIRED),
        Field("expert_weights_norm", "norm_topk_prob", False),
        Field("expert_weights_scale", "routed_scaling_factor", 1.0),
        Field("attention.q_lora_rank", "q_lora_rank", None),
        Field("attention.kv_lora_rank", "kv_lora_rank", REQUIRED),
        Field("attention.value_length_mla", "v_head_dim", REQUIRED),
        Field("rope.dimension_count", "qk_rope_head_dim", REQUIRED),
    ),
    # llama.cpp ranks groups by their two best experts, DeepSeek-V2 by the best.
    constants={**SILU, "attention_bias": False, "mlp_bias": False, **dict.fromkeys(_GROUPS, 1)},
    derive=_derive,
    derive_keys=frozenset(
        {DENSE_LAYERS, LOG_MULTIPLIER, NEXT_TOKEN_LAYERS, _QUERY_SIZE, "attention.value_length"}
    ),
    write_keys=_write_keys,
    allowed_values=ROUTING,
)
DEEPSEEK_V3 = dataclasses.replace(
    DEEPSEEK_V2,
    family=FAMILIES["deepseek_v3"],
    fields=(*DEEPSEEK_V2.fields, *(Field(key, name, 1.0) for name, key in _GROUPS.items())),
    constants={**SILU, "attention_bias": False},
    allowed_values={"expert_gating_func": (2,)},  # sigmoid
)
GLM4_MOE_LITE = dataclasses.replace(DEEPSEEK_V3, family=FAMILIES["glm4_moe_lite"])
