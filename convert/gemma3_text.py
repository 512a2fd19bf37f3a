"""Gemma 3 text checkpoints: the table, and rotary settings of local and global layers."""

from collections.abc import Mapping
from typing import Any

from jaxllm.config.model import Rope
from jaxllm.convert.decoders import (
    make_table,
    read_rope,
    resolve_layer_types,
    split_ropes,
    write_ropes,
)
from jaxllm.convert.gemma2 import GEMMA_FIELDS, IGNORED, write_scalar
from jaxllm.convert.tables import Field, Interval
from jaxllm.models.gemma3_text import Gemma3Config

LOCAL_THETA = 10000.0  # the default base of sliding-window layers
GLOBAL_THETA = 1000000.0


def _resolve_layers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    pattern = fields.pop("_sliding_window_pattern") or fields["sliding_window_pattern"]
    del fields["sliding_window_pattern"]
    resolve_layer_types(fields, lambda i: (i + 1) % pattern != 0)
    context = fields["max_position_embeddings"]
    local = split_ropes(data, data.get("rope_local_base_freq", LOCAL_THETA))[1]
    fields["local_rope"] = read_rope(local, context, complaints)


def _write_ropes(config: Gemma3Config, data: dict[str, Any]) -> dict[str, Any]:
    """Write transformers 5's fields if the sliding-window layers are scaled too."""
    data, local = write_scalar(config, data), config.local_rope
    if local == Rope(rope_type="default", rope_theta=local.rope_theta):
        return {**data, "rope_local_base_freq": local.rope_theta}
    return write_ropes(config, data)


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
    prepare=lambda data: split_ropes(data, LOCAL_THETA)[0],
    derive=_resolve_layers,
    finish=_write_ropes,
)
TABLES = (GEMMA3,)
