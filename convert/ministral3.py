"""Ministral 3 checkpoints: the table, and the growth of queries among the rotary settings."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import ROPE_FIELD_NAMES, SLIDING_WINDOW, make_table
from jaxllm.convert.tables import Field
from jaxllm.models.ministral3 import Ministral3Config

BETA = "llama_4_scaling_beta"
# transformers' settings for a file without any.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}


def _move_growth(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move the growth out of the rotary settings."""
    if not any(data.get(name) for name in ROPE_FIELD_NAMES):
        data = {**data, "rope_parameters": YARN}
    moved = dict(data)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(settings := data.get(name), Mapping):
            moved[name] = {key: value for key, value in settings.items() if key != BETA}
            moved.setdefault(BETA, settings.get(BETA))
    return moved


def _write_growth(config: Ministral3Config, data: dict[str, Any]) -> dict[str, Any]:
    theta, scaling = data.pop("rope_theta"), data.pop("rope_scaling") or {"rope_type": "default"}
    rope = {"rope_theta": theta, **scaling, BETA: data.pop(BETA)}
    return {**data, "rope_parameters": rope}


TABLES = (
    make_table(
        "Ministral3",
        Ministral3Config,
        SLIDING_WINDOW,
        Field("head_dim", "head_dim", 128),
        Field("num_key_value_heads", "num_key_value_heads", 8),
        Field("max_position_embeddings", "max_position_embeddings", 262144),
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field(BETA, BETA, 0.0),
        theta=1000000.0,
        prepare=_move_growth,
        finish=_write_growth,
    ),
)
