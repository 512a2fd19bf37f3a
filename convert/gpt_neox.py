"""GPT-NeoX and Pythia checkpoints: the table; queries, keys and values are fused per head."""

from collections.abc import Mapping
from typing import Any

from jaxllm.models.gpt_neox import GPTNeoXConfig

from .decoders import read_decoder, table, write_decoder
from .layouts import Fused, heads_of
from .tables import Architecture, Field, refuse

ROTARY = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}  # to common names
GPT_NEOX = table(
    "GPTNeoX",
    Field("hidden_act", "hidden_act", "gelu"),
    Field("layer_norm_eps", "norm_eps", 1e-5),
    Field("attention_bias", "attention_bias", True),
    Field("use_parallel_residual", "use_parallel_residual", True),
    but=("num_key_value_heads", "head_dim"),  # neither GQA nor a separate head size
    allowed={"head_dim": (), "num_key_value_heads": ()},
    ignored=frozenset({"classifier_dropout", "partial_rotary_factor", *ROTARY}),
    layouts=(
        Fused(
            "attention.query_key_value",
            ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            heads_of,
            runs=lambda config: config.num_attention_heads,
        ),
    ),
    prefix="gpt_neox.",
    head="embed_out.weight",
)

READS = {"gpt_neox": GPT_NEOX}


def read_config(table: Architecture, data: Mapping[str, Any]) -> GPTNeoXConfig:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    own = {name: value for name, value in data.items() if name not in ROTARY}
    for theirs, name in ROTARY.items():
        if (value := data.get(theirs)) is None:
            continue
        if own.get(name) is None:
            own[name] = value
        elif own[name] != value:
            refuse("config.json", [f"{theirs} {value!r:.40} differs from {name} {own[name]!r:.40}"])
    settings = [own, own.get("rope_scaling"), own.get("rope_parameters")]
    if not any(isinstance(s, Mapping) and s.get("partial_rotary_factor") for s in settings):
        own["partial_rotary_factor"] = 0.25
    return read_decoder(GPTNeoXConfig, table, own)


def write_config(config: GPTNeoXConfig) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields, and the table."""
    data = write_decoder(config, GPT_NEOX, "gpt_neox")
    return {
        **{name: value for name, value in data.items() if name not in ROTARY.values()},
        "rotary_emb_base": config.rope.rope_theta,
        "rotary_pct": config.rope.partial_rotary_factor or 1.0,
    }, GPT_NEOX
