"""Gemma 4 in GGUF: sizes by kind of layer, and layers that read the keys of earlier ones."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxllm.config.model import Rope
from jaxllm.convert.gguf import names
from jaxllm.convert.gguf.architecture import (
    KV_HEADS,
    SIZE_FIELDS,
    GGUFArchitecture,
    read_pattern,
)
from jaxllm.convert.tables import REQUIRED, Field
from jaxllm.errors import ConfigError
from jaxllm.models import FAMILIES

_PATTERN, _MLP_SIZE = "attention.sliding_window_pattern", "feed_forward_length"
_LOCAL_THETA = "rope.freq_base_swa"
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_LOCAL_SIZES = ("attention.value_length_swa", "rope.dimension_count_swa")


def _derive(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the settings that differ between layers, or between kinds of layers.

    Raises ConfigError for layers of one kind that differ, and for scaled rotary settings.
    """
    rope, shared = fields["rope"], fields["num_kv_shared_layers"]
    if rope.rope_type not in ("default", "proportional"):
        raise ConfigError(f"rotary settings of type {rope.rope_type!r}, expected 'proportional'")
    types = read_pattern(data, fields["num_hidden_layers"], 0)
    if not types:
        raise ConfigError(f"{_PATTERN} is missing, or not a number for each layer")
    heads = _by_layer(data.get(KV_HEADS, fields["num_key_value_heads"]), types)
    sizes = _by_layer(data.get(_MLP_SIZE, fields["intermediate_size"]), types)
    own = len(types) - shared if type(shared) is int else len(types)
    local, full = (
        [n for n, kind in zip(heads, types, strict=True) if kind == name]
        for name in ("sliding_attention", "full_attention")
    )
    first, last = sizes[:own], sizes[own:]
    if any(len(set(values)) > 1 for values in (local, full, first, last)):
        raise ConfigError(
            f"{KV_HEADS} {heads} and {_MLP_SIZE} {sizes} must be equal in layers of one kind"
        )
    is_wide = bool(first and last) and last[0] == 2 * first[0]
    if first and last and not is_wide and first[0] != last[0]:
        raise ConfigError(f"{_MLP_SIZE} {sizes} must be equal, or twice as large in shared layers")
    has_experts = data.get(_EXPERTS["num_experts"], 0) != 0
    return {
        **{name: data.get(key) if has_experts else 1 for name, key in _EXPERTS.items()},
        "enable_moe_block": has_experts,
        "layer_types": types,
        "rope": dataclasses.replace(rope, rope_type="proportional"),
        "local_rope": Rope(rope_type="default", rope_theta=data.get(_LOCAL_THETA, 10000.0)),
        "num_key_value_heads": (local or full)[0],
        "num_global_key_value_heads": (full or local)[0],
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": fields.get("use_double_wide_mlp", is_wide),
        # The table has a row for each token; models without one have the field too.
        "vocab_size_per_layer_input": (
            fields["vocab_size"]
            if fields["hidden_size_per_layer_input"]
            else fields.get("vocab_size_per_layer_input", fields["vocab_size"])
        ),
    }


def _by_layer(value: Any, types: Sequence[str]) -> tuple[Any, ...]:
    """Return a value for each layer. Raises ConfigError for a list with another length."""
    values = value if isinstance(value, tuple) else (value,) * len(types)
    if len(values) != len(types):
        raise ConfigError(f"{value!r:.60} has {len(values)} entries for {len(types)} layers")
    return values


def _read_names(tensors: Collection[str]) -> dict[str, Any]:
    """Layers without a value projection have the key projection's values."""
    keys = [name for name in tensors if name.endswith(".attn_k.weight")]
    values = {name.replace(".attn_k.", ".attn_v.") for name in keys}
    return {"attention_k_eq_v": not values <= set(tensors)}


def _write_keys(config: Any) -> dict[str, Any]:
    """Return lists of what differs between layers; llama.cpp requires that of the windows."""
    layers = range(config.num_hidden_layers)
    slides = tuple(map(config.is_sliding, layers))
    heads = (config.num_global_key_value_heads, config.num_key_value_heads)
    keys: dict[str, Any] = {
        _PATTERN: slides,
        _LOCAL_THETA: float(config.local_rope.rope_theta),
        **dict.fromkeys(_LOCAL_SIZES, config.head_dim),
    }
    if heads[0] != heads[1]:
        keys[KV_HEADS] = tuple(heads[local] for local in slides)
    if config.use_double_wide_mlp:
        keys[_MLP_SIZE] = tuple(map(config.mlp_size, layers))
    if config.enable_moe_block:
        keys |= {key: getattr(config, name) for name, key in _EXPERTS.items()}
    return keys


GEMMA4 = GGUFArchitecture(
    family=FAMILIES["gemma4_text"],
    modules=names.GEMMA4,
    fields=(
        *(field for field in SIZE_FIELDS if field.name != "head_dim"),
        Field("attention.layer_norm_rms_epsilon", "norm_eps", REQUIRED),
        Field("attention.key_length", "global_head_dim", REQUIRED),
        Field("attention.key_length_swa", "head_dim", REQUIRED),
        Field("attention.sliding_window", "sliding_window", REQUIRED),
        Field("attention.shared_kv_layers", "num_kv_shared_layers", 0),
        Field("embedding_length_per_layer_input", "hidden_size_per_layer_input", 0),
        Field("final_logit_softcapping", "final_logit_softcapping", None),
    ),
    constants={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
    read_names=_read_names,
    head_dim="global_head_dim",
    derive=_derive,
    derive_keys=frozenset(
        {_PATTERN, KV_HEADS, _MLP_SIZE, _LOCAL_THETA, *_LOCAL_SIZES, *_EXPERTS.values()}
    ),
    write_keys=_write_keys,
)
