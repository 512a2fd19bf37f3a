"""Gemma 3 text checkpoints: the table, and rotary settings of local and global layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config.model import Rope
from jaxllm.convert.decoders import make_table, read_rope, resolve_layer_types
from jaxllm.convert.gemma2 import GEMMA_FIELDS, IGNORED, write_scalar
from jaxllm.convert.tables import Field, Interval
from jaxllm.models.gemma3_text import Gemma3Config

LOCAL_THETA = 10000.0  # the default base of sliding-window layers
GLOBAL_THETA = 1000000.0


def _split_ropes(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return config.json with the rotary settings of full layers, and those of the others."""
    ropes = data.get("rope_parameters")
    if not isinstance(ropes, Mapping) or not {"full_attention", "sliding_attention"} & set(ropes):
        return data, {"rope_theta": data.get("rope_local_base_freq", LOCAL_THETA)}
    local: Mapping[str, Any]
    local = {"rope_theta": LOCAL_THETA, "rope_parameters": ropes.get("sliding_attention")}
    if isinstance(ropes.get("sliding_attention"), Mapping):
        local = {"rope_parameters": {"rope_theta": LOCAL_THETA, **ropes["sliding_attention"]}}
    return {**data, "rope_parameters": ropes.get("full_attention")}, local


def _resolve_layers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    pattern = fields.pop("_sliding_window_pattern") or fields["sliding_window_pattern"]
    del fields["sliding_window_pattern"]
    resolve_layer_types(fields, lambda i: (i + 1) % pattern != 0)
    context = fields["max_position_embeddings"]
    fields["local_rope"] = read_rope(_split_ropes(data)[1], context, complaints)


def _write_ropes(config: Gemma3Config, data: dict[str, Any]) -> dict[str, Any]:
    """Write transformers 5's fields if the sliding-window layers are scaled too."""
    data, local = write_scalar(config, data), config.local_rope
    if local == Rope(rope_type="default", rope_theta=local.rope_theta):
        return {**data, "rope_local_base_freq": local.rope_theta}
    both = {
        kind: {k: v for k, v in dataclasses.asdict(rope).items() if v is not None}
        for kind, rope in (("full_attention", config.rope), ("sliding_attention", local))
    }
    return {**data, "rope_theta": None, "rope_scaling": None, "rope_parameters": both}


GEMMA3 = make_table(
    "Gemma3",
    Gemma3Config,
    *GEMMA_FIELDS,
    Field("final_logit_softcapping", "final_logit_softcapping", None),
    Field("max_position_embeddings", "max_position_embeddings", 131072),
    Field("sliding_window_pattern", "sliding_window_pattern", 6, Interval),
    Field("_sliding_window_pattern", "_sliding_window_pattern", None, Interval),
    ignored_fields=IGNORED | {"rope_local_base_freq"},
    # Gemma3Model has vision too, but jaxllm 1.0 wrote its name.
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3Model"),
    classifier="Gemma3TextForSequenceClassification",
    heads_divide_width=True,
    theta=GLOBAL_THETA,
    prepare=lambda data: _split_ropes(data)[0],
    derive=_resolve_layers,
    finish=_write_ropes,
)
TABLES = (GEMMA3,)
