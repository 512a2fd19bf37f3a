"""SmolLM3 checkpoints: the table, and the layers without RoPE (NoPE)."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import (
    ATTENTION_BIAS,
    LAYER_TYPES,
    MLP_BIAS,
    SLIDING_WINDOW,
    make_table,
    read_decoder,
    resolve_layer_types,
    write_decoder,
)
from jaxllm.convert.tables import Architecture, Field
from jaxllm.models.smollm3 import SmolLM3Config

SMOLLM3 = make_table(
    "SmolLM3",
    ATTENTION_BIAS,
    MLP_BIAS,
    SLIDING_WINDOW,
    LAYER_TYPES,
    Field("max_position_embeddings", "max_position_embeddings", 32768),
    Field("tie_word_embeddings", "tie_word_embeddings", True),
    Field("use_sliding_window", "use_sliding_window", False),
    Field("no_rope_layers", "turns", None),
    Field("no_rope_layer_interval", "no_rope_layer_interval", 4),
    ignored_fields=frozenset({"max_window_layers"}),
)

READS = {"smollm3": SMOLLM3}


def read_config(table: Architecture, data: Mapping[str, Any]) -> SmolLM3Config:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    return read_decoder(SmolLM3Config, table, data, theta=2000000.0, finish=_resolve_layers)


def _resolve_layers(fields: dict[str, Any], complaints: list[str]) -> None:
    count, interval = fields["num_hidden_layers"], fields.pop("no_rope_layer_interval")
    if fields["turns"] is None:
        if type(count) is not int or type(interval) is not int or interval < 1:
            complaints.append(f"no_rope_layer_interval must be positive, got {interval!r:.40}")
            return
        fields["turns"] = [(i + 1) % interval != 0 for i in range(count)]
    fields["turns"] = tuple(map(bool, fields["turns"]))  # 0 and 1 in the file
    if not fields.pop("use_sliding_window"):
        fields["sliding_window"] = None
    turns = fields["turns"]
    resolve_layer_types(lambda f, i: f["sliding_window"] is not None and not turns[i])(
        fields, complaints
    )


def write_config(config: SmolLM3Config) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields, and the table."""
    data = write_decoder(config, SMOLLM3, "smollm3")
    sliding = config.sliding_window is not None
    return {
        **data,
        "no_rope_layers": [int(turns) for turns in config.turns],
        "use_sliding_window": sliding,
    }, SMOLLM3
