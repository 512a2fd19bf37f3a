"""Gemma 3 text checkpoints: the table, and rotary settings of local and global layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config.model import Rope
from jaxllm.convert.decoders import make_table, read_decoder, read_rope, resolve_layer_types
from jaxllm.convert.gemma2 import GEMMA_FIELDS, IGNORED, write_gemma
from jaxllm.convert.tables import Architecture, Field
from jaxllm.models.gemma3_text import Gemma3Config

GEMMA3 = make_table(
    "Gemma3",
    *GEMMA_FIELDS,
    Field("final_logit_softcapping", "final_logit_softcapping", None),
    Field("max_position_embeddings", "max_position_embeddings", 131072),
    Field("sliding_window_pattern", "sliding_window_pattern", 6),
    Field("_sliding_window_pattern", "_sliding_window_pattern", None),
    ignored_fields=IGNORED | {"rope_local_base_freq"},
    heads_divide_width=True,
)

READS = {"gemma3_text": GEMMA3}
LOCAL_THETA = 10000.0  # the default base of sliding-window layers
GLOBAL_THETA = 1000000.0


def read_config(table: Architecture, data: Mapping[str, Any]) -> Gemma3Config:
    """Return the configuration; raise ConfigError with everything that is wrong."""
    both = data.get("rope_parameters")
    local: Mapping[str, Any] = {"rope_theta": data.get("rope_local_base_freq", LOCAL_THETA)}
    if isinstance(both, Mapping) and {"full_attention", "sliding_attention"} & set(both):
        local = {"rope_theta": LOCAL_THETA, "rope_parameters": both.get("sliding_attention")}
        if isinstance(both.get("sliding_attention"), Mapping):
            local = {"rope_parameters": {"rope_theta": LOCAL_THETA, **both["sliding_attention"]}}
        data = {**data, "rope_parameters": both.get("full_attention")}

    def finish(fields: dict[str, Any], complaints: list[str]) -> None:
        pattern = fields.pop("_sliding_window_pattern") or fields["sliding_window_pattern"]
        del fields["sliding_window_pattern"]
        if fields["layer_types"] is None and (type(pattern) is not int or pattern < 1):
            complaints.append(f"sliding_window_pattern must be positive, got {pattern!r:.40}")
            return
        resolve_layer_types(lambda _, i: (i + 1) % pattern != 0)(fields, complaints)
        context = fields["max_position_embeddings"]
        fields["local_rope"] = read_rope(local, context, complaints)

    return read_decoder(Gemma3Config, table, data, theta=GLOBAL_THETA, finish=finish)


def write_config(config: Gemma3Config) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields, and the table."""
    data = write_gemma(config, GEMMA3, "gemma3_text")
    if config.local_rope == Rope(rope_type="default", rope_theta=config.local_rope.rope_theta):
        return {**data, "rope_local_base_freq": config.local_rope.rope_theta}, GEMMA3
    return {**data, **_write_both_ropes(config)}, GEMMA3


def _write_both_ropes(config: Gemma3Config) -> dict[str, Any]:
    """Return transformers 5's fields, if the sliding-window layers are scaled too."""

    def settings(rope: Rope) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(rope).items() if v is not None}

    both = {
        "full_attention": settings(config.rope),
        "sliding_attention": settings(config.local_rope),
    }
    return {"rope_theta": None, "rope_scaling": None, "rope_parameters": both}
