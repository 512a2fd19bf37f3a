"""OLMo 3 checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.config.model import Rope
from jaxllm.convert.decoders import (
    ATTENTION_BIAS,
    LAYER_TYPES,
    make_table,
    read_rope,
    resolve_layer_types,
    split_ropes,
    write_ropes,
)
from jaxllm.convert.tables import Field
from jaxllm.models.olmo3 import Olmo3Config

THETA = 500000.0


def _resolve_layers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    resolve_layer_types(fields, lambda i: (i + 1) % 4 != 0)
    context = fields["max_position_embeddings"]
    local = split_ropes(data, data.get("rope_theta", THETA))[1]
    fields["local_rope"] = read_rope(local, context, complaints, theta=THETA)


def _write_ropes(config: Olmo3Config, data: dict[str, Any]) -> dict[str, Any]:
    plain = Rope(rope_type="default", rope_theta=config.rope.rope_theta)
    return data if config.local_rope == plain else write_ropes(config, data)


TABLES = (
    make_table(
        "Olmo3",
        Olmo3Config,
        ATTENTION_BIAS,
        LAYER_TYPES,
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field("sliding_window", "sliding_window", 4096),
        theta=THETA,
        prepare=lambda data: split_ropes(data, THETA)[0],
        derive=_resolve_layers,
        finish=_write_ropes,
    ),
)
