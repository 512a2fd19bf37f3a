"""Llama and Mistral checkpoints: the tables, and the two spellings of the rotary settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config import ROPE_FIELDS, Rope
from jaxllm.models.llama import LlamaConfig

from .tables import (
    COMMON_ALLOWED,
    COMMON_IGNORED,
    REQUIRED,
    Architecture,
    Field,
    read_fields,
    refuse,
    share,
    write_fields,
)

FIELDS = (
    Field("vocab_size", "vocab_size", REQUIRED),
    Field("hidden_size", "hidden_size", REQUIRED),
    Field("intermediate_size", "intermediate_size", REQUIRED),
    Field("num_hidden_layers", "num_hidden_layers", REQUIRED),
    Field("num_attention_heads", "num_attention_heads", REQUIRED),
    Field("num_key_value_heads", "num_key_value_heads", None),  # as many as query heads
    Field("head_dim", "head_dim", None),  # hidden_size / num_attention_heads
    Field("hidden_act", "hidden_act", "silu"),
    Field("max_position_embeddings", "max_position_embeddings", 2048),
    Field("rms_norm_eps", "norm_eps", 1e-6),
    Field("tie_word_embeddings", "tie_word_embeddings", False),
    Field("attention_bias", "attention_bias", False),
    Field("mlp_bias", "mlp_bias", False),
)

LLAMA = Architecture(
    architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
    fields=FIELDS,
    allowed={**COMMON_ALLOWED, "pretraining_tp": (1, None)},
    ignored=COMMON_IGNORED | {"attention_dropout", "rope_theta", "rope_scaling", "rope_parameters"},
    skipped=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    prefix="model.",
    writes_prefix=True,
)

MISTRAL = dataclasses.replace(
    LLAMA,
    architectures=("MistralForCausalLM", "MistralModel"),
    # Mistral's linears have no biases, and its configuration no words for them.
    fields=(
        *(f for f in FIELDS if f.theirs not in ("attention_bias", "mlp_bias")),
        Field("sliding_window", "sliding_window", None),
    ),
)


READS = {"llama": LLAMA, "mistral": MISTRAL}


def read_config(table: Architecture, data: Mapping[str, Any]) -> LlamaConfig:
    """config.json to LlamaConfig. Raises ConfigError with everything that is wrong."""
    fields, complaints = read_fields(table, data)
    rope = _read_rope(data, fields.get("max_position_embeddings"), complaints)
    refuse("config.json", complaints)
    assert rope is not None
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if fields["head_dim"] is None:
        fields["head_dim"] = share("hidden_size", fields, "num_attention_heads")
    return LlamaConfig(rope=rope, **fields)


def write_config(config: LlamaConfig) -> tuple[dict[str, Any], Architecture]:
    """config.json's fields, in the spelling that every transformers reads, and the table."""
    settings = {k: v for k, v in dataclasses.asdict(config.rope).items() if v is not None}
    theta = settings.pop("rope_theta")
    if config.rope.divisors is not None:  # what transformers calls so, with nothing but these
        settings = {
            "rope_type": "longrope",
            "short_factor": list(config.rope.divisors),
            "long_factor": list(config.rope.divisors),
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config.max_position_embeddings,
        }
    scaling = None if config.rope.rope_type == "default" else settings
    model_type, table = ("llama", LLAMA) if config.sliding_window is None else ("mistral", MISTRAL)
    data = {
        "architectures": [table.architectures[0]],
        "model_type": model_type,
        **write_fields(table, config),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    return data, table


def _read_rope(data: Mapping[str, Any], context: Any, complaints: list[str]) -> Rope | None:
    """`rope_theta` + `rope_scaling` (published files), or `rope_parameters` (transformers 5)."""
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = data.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            complaints.append(f"{name} must be an object, got {given!r:.60}")
            return None
        given = {k: v for k, v in given.items() if v is not None}
        spelled = given.pop("type", None)
        if spelled is not None and given.setdefault("rope_type", spelled) != spelled:
            complaints.append(f"{name} has both type {spelled!r} and another rope_type")
        for key, value in given.items():
            if settings.setdefault(key, value) != value:
                complaints.append(f"{key} differs between rope_scaling and rope_parameters")
    theta = data.get("rope_theta")
    if theta is not None and settings.setdefault("rope_theta", theta) != theta:
        complaints.append("rope_theta differs between rope_parameters and the top level")
    settings.setdefault("rope_theta", 10000.0)
    kind = settings.setdefault("rope_type", "default")
    if settings.pop("partial_rotary_factor", 1.0) != 1.0:
        complaints.append("partial_rotary_factor other than 1 is not supported")
    if not isinstance(kind, str) or kind not in ROPE_FIELDS or kind == "divisors":  # ours alone
        known = ", ".join(name for name in ROPE_FIELDS if name != "divisors")
        complaints.append(f"rope_type {kind!r:.40} is not supported (known: {known})")
        return None
    required, optional = ROPE_FIELDS[kind]
    if "original_max_position_embeddings" in required:
        settings.setdefault("original_max_position_embeddings", context)
    # Files carry leftovers of other types, and transformers reads only its type's own.
    used = {"rope_type", "rope_theta", *required, *optional}
    unknown = sorted(set(settings) - {f.name for f in dataclasses.fields(Rope)})
    if unknown:
        complaints.append(f"rope settings {', '.join(unknown)} are not known")
    missing = [name for name in required if name not in settings]
    if missing:
        complaints.append(f"rope_type {kind!r} needs {', '.join(missing)}")
    if complaints:
        return None
    return Rope(**{k: v for k, v in settings.items() if k in used})
