"""SmolLM3 checkpoints: the table, and the layers without RoPE (NoPE)."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from jaxllm.convert.decoders import (
    ATTENTION_BIAS,
    LAYER_TYPES,
    MLP_BIAS,
    SLIDING_WINDOW,
    make_table,
    resolve_layer_types,
)
from jaxllm.convert.tables import Field, Interval
from jaxllm.models.smollm3 import SmolLM3Config

Flags = tuple[bool | Annotated[int, Meta(ge=0, le=1)], ...]


def _resolve_layers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    count, interval = fields["num_hidden_layers"], fields.pop("no_rope_layer_interval")
    uses_rope = fields["turns"]
    if uses_rope is None:
        uses_rope = ((i + 1) % interval for i in range(count))
    turns = fields["turns"] = tuple(map(bool, uses_rope))  # 0 and 1 in the file
    if len(turns) != count:
        complaints.append(f"no_rope_layers has {len(turns)} entries for {count} layers")
        return
    if not fields.pop("use_sliding_window"):
        fields["sliding_window"] = None
    resolve_layer_types(fields, lambda i: fields["sliding_window"] is not None and not turns[i])


def _write_layers(config: SmolLM3Config, data: dict[str, Any]) -> dict[str, Any]:
    return {
        **data,
        "no_rope_layers": [int(turns) for turns in config.turns],
        "use_sliding_window": config.sliding_window is not None,
    }


SMOLLM3 = make_table(
    "SmolLM3",
    SmolLM3Config,
    ATTENTION_BIAS,
    MLP_BIAS,
    SLIDING_WINDOW,
    LAYER_TYPES,
    Field("max_position_embeddings", "max_position_embeddings", 32768),
    Field("tie_word_embeddings", "tie_word_embeddings", True),
    Field("use_sliding_window", "use_sliding_window", False, bool),
    Field("no_rope_layers", "turns", None, Flags),
    Field("no_rope_layer_interval", "no_rope_layer_interval", 4, Interval),
    ignored_fields=frozenset({"max_window_layers"}),
    theta=2000000.0,
    derive=_resolve_layers,
    finish=_write_layers,
)
TABLES = (SMOLLM3,)
