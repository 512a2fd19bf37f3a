"""Gemma 4 text checkpoints: the table, and the names of experts."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import (
    ATTENTION_BIAS,
    LAYER_TYPES,
    make_table,
    read_rope,
    resolve_layer_types,
    split_ropes,
    write_ropes,
)
from jaxllm.convert.fused_layouts import FusedLayout, RenamedLayout
from jaxllm.convert.tables import Field
from jaxllm.models.gemma4_text import Gemma4Config

LOCAL_THETA = 10000.0
EXPERT_FIELDS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k_experts",
    "moe_intermediate_size": "moe_intermediate_size",
}
LAYOUTS = (
    RenamedLayout(
        {
            "layers.*.moe": "layers.*.router",
            "layers.*.moe.proj": "layers.*.router.proj",
            "layers.*.moe.experts.gate_up_proj.weight": "layers.*.experts.gate_up_proj",
            "layers.*.moe.experts.down_proj.weight": "layers.*.experts.down_proj",
        }
    ),
    FusedLayout(
        "moe.experts.gate_up_proj",
        ("moe.experts.gate_proj", "moe.experts.up_proj"),
        lambda config: (config.expert_size,) * 2,
    ),
)
KV_HEADS = "num_global_key_value_heads"
GLOBAL = {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}


def _split_ropes(data: Mapping[str, Any]) -> Mapping[str, Any]:
    ropes = data.get("rope_parameters")
    return split_ropes({**data, "rope_parameters": GLOBAL} if ropes is None else data, None)[0]


def _resolve_layers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    """Fill in what depends on the kinds of layers; the last one is full, as in transformers."""
    resolve_layer_types(fields, lambda i: (i + 1) % 6 != 0)
    fields["layer_types"] = (*fields["layer_types"][:-1], "full_attention")
    local = split_ropes(data, LOCAL_THETA)[1]
    fields["local_rope"] = read_rope(local, fields["max_position_embeddings"], complaints)
    if not fields["attention_k_eq_v"] or fields[KV_HEADS] is None:
        fields[KV_HEADS] = fields["num_key_value_heads"]
    for name in EXPERT_FIELDS:
        if not fields["enable_moe_block"]:
            fields[name] = 1
        elif fields[name] is None:
            complaints.append(f"enable_moe_block requires {EXPERT_FIELDS[name]}")
    if (layers := data.get("per_layer_config")) is None:
        return
    full = [str(i) for i, kind in enumerate(fields["layer_types"]) if kind == "full_attention"]
    if isinstance(layers, Mapping):  # a file may write 5 as "05"
        layers = {i.lstrip("0") or "0": own for i, own in layers.items()}
    own = layers.get(full[0], {}) if isinstance(layers, Mapping) else None
    if (
        own is None
        or any(layers[i] for i in layers if i not in full)
        or any(layers.get(i, {}) != own for i in full)
        or not own.keys() <= {"head_dim", "num_key_value_heads"}
    ):
        complaints.append(
            "per_layer_config must set head_dim and num_key_value_heads of full_attention layers,"
            f" the same for all, got {layers!r:.60}"
        )
        return
    fields["global_head_dim"] = own.get("head_dim", fields["head_dim"])
    fields[KV_HEADS] = own.get("num_key_value_heads", fields["num_key_value_heads"])


def _write_layers(config: Gemma4Config, data: dict[str, Any]) -> dict[str, Any]:
    """Write what depends on the kinds of layers as published files and as transformers 5 have it.

    transformers reads the number of global heads of published files only with attention_k_eq_v.
    """
    own = {
        "head_dim": config.global_head_dim,
        "num_key_value_heads": config.num_global_key_value_heads,
    }
    full = [i for i in range(config.num_hidden_layers) if not config.is_sliding(i)]
    dense = {} if config.enable_moe_block else dict.fromkeys(EXPERT_FIELDS.values())
    data = {**write_ropes(config, data), **dense}
    data["per_layer_config"] = {str(i): own for i in full}
    return {k: v for k, v in data.items() if k not in ("rope_theta", "rope_scaling")}


TABLES = (
    make_table(
        "Gemma4",
        Gemma4Config,
        ATTENTION_BIAS,
        LAYER_TYPES,
        Field("vocab_size", "vocab_size", 262144),
        Field("hidden_size", "hidden_size", 2304),
        Field("intermediate_size", "intermediate_size", 9216),
        Field("num_hidden_layers", "num_hidden_layers", 30),
        Field("num_attention_heads", "num_attention_heads", 8),
        Field("num_key_value_heads", "num_key_value_heads", 4),
        Field("head_dim", "head_dim", 256),
        Field("global_head_dim", "global_head_dim", 512),
        Field("num_global_key_value_heads", "num_global_key_value_heads", None),
        Field("hidden_activation", "hidden_act", "gelu_pytorch_tanh"),
        Field("max_position_embeddings", "max_position_embeddings", 131072),
        Field("sliding_window", "sliding_window", 512),
        Field("tie_word_embeddings", "tie_word_embeddings", True),
        Field("final_logit_softcapping", "final_logit_softcapping", None),
        Field("attention_k_eq_v", "attention_k_eq_v", False),
        Field("num_kv_shared_layers", "num_kv_shared_layers", 0),
        Field("use_double_wide_mlp", "use_double_wide_mlp", False),
        Field("hidden_size_per_layer_input", "hidden_size_per_layer_input", 256),
        Field("vocab_size_per_layer_input", "vocab_size_per_layer_input", 262144),
        Field("enable_moe_block", "enable_moe_block", False),
        *(Field(theirs, ours, None) for ours, theirs in EXPERT_FIELDS.items()),
        allowed_values={
            "expert_intermediate_size": (None,),
            # Images in a prompt attend to each other; text does not.
            "use_bidirectional_attention": (False, "vision"),
        },
        ignored_fields=frozenset(
            {
                "per_layer_config",
                "partial_rotary_factor",
            }
        ),
        layouts=LAYOUTS,
        architectures=("Gemma4ForCausalLM", "Gemma4TextModel"),
        classifier=None,
        prepare=_split_ropes,
        derive=_resolve_layers,
        finish=_write_layers,
    ),
)
