"""GPT-NeoX and Pythia checkpoints: the table; queries, keys and values are fused per head."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import make_table, set_rotary_share
from jaxllm.convert.fused_layouts import FusedLayout, qkv_rows
from jaxllm.convert.tables import Field, refuse
from jaxllm.models.gpt_neox import GPTNeoXConfig

ROPE_ALIASES = {
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}  # to common names


def _rename_rope_fields(data: Mapping[str, Any]) -> Mapping[str, Any]:
    own = {name: value for name, value in data.items() if name not in ROPE_ALIASES}
    for alias, name in ROPE_ALIASES.items():
        if (value := data.get(alias)) is None:
            continue
        if own.get(name) is None:
            own[name] = value
        elif own[name] != value:
            refuse("config.json", [f"{alias} {value!r:.40} differs from {name} {own[name]!r:.40}"])
    return set_rotary_share(own, 0.25)


def _write_rope_fields(config: GPTNeoXConfig, data: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: value for name, value in data.items() if name not in ROPE_ALIASES.values()},
        "rotary_emb_base": config.rope.rope_theta,
        "rotary_pct": config.rope.partial_rotary_factor or 1.0,
    }


GPT_NEOX = make_table(
    "GPTNeoX",
    GPTNeoXConfig,
    Field("hidden_act", "hidden_act", "gelu"),
    Field("layer_norm_eps", "norm_eps", 1e-5),
    Field("attention_bias", "attention_bias", True),
    Field("use_parallel_residual", "use_parallel_residual", True),
    omit=("num_key_value_heads", "head_dim"),  # neither GQA nor a separate head size
    allowed_values={"head_dim": (), "num_key_value_heads": ()},
    ignored_fields=frozenset({"classifier_dropout", "partial_rotary_factor"}),
    aliases=ROPE_ALIASES,  # `prepare` renames them
    layouts=(
        FusedLayout(
            "attention.query_key_value",
            ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            qkv_rows,
            repeats=lambda config: config.num_attention_heads,
        ),
    ),
    prefix="gpt_neox.",
    head="embed_out.weight",
    prepare=_rename_rope_fields,
    finish=_write_rope_fields,
)
TABLES = (GPT_NEOX,)
