"""Cohere 2 checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import ATTENTION_BIAS, LAYER_TYPES, make_table, resolve_layer_types
from jaxllm.convert.rotary_pairs import PAIRED_QUERIES_AND_KEYS
from jaxllm.convert.tables import Field, Interval
from jaxllm.models.cohere2 import Cohere2Config

PATTERN = "sliding_window_pattern"


def _resolve_layers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    period = fields.pop(PATTERN)
    if "sliding_window" in data and data["sliding_window"] is None:
        complaints.append("sliding_window must be a number of tokens, got null")
    if data.get("head_dim") not in (None, size := fields["head_dim"]):
        complaints.append(f"head_dim must be hidden_size / num_attention_heads ({size})")
    resolve_layer_types(fields, lambda i: (i + 1) % period != 0)


TABLES = (
    make_table(
        "Cohere2",
        Cohere2Config,
        ATTENTION_BIAS,
        LAYER_TYPES,
        Field("max_position_embeddings", "max_position_embeddings", 8192),
        Field("layer_norm_eps", "norm_eps", 1e-5),
        Field("tie_word_embeddings", "tie_word_embeddings", True),
        Field("logit_scale", "logit_scale", 0.0625),
        Field("sliding_window", "sliding_window", 4096),
        Field(PATTERN, PATTERN, 4, Interval),
        omit=("head_dim",),
        allowed_values={
            "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1,),
            "use_embedding_sharing": (True,),
            "use_parallel_block": (True,),
            "use_parallel_embedding": (False,),
            "use_qk_norm": (False,),
            "use_gated_activation": (True,),
        },
        ignored_fields=frozenset(
            {"cache_implementation", "head_dim", "layer_switch"}
        ),  # head_dim is checked
        classifier=None,
        layouts=PAIRED_QUERIES_AND_KEYS,
        derive=_resolve_layers,
    ),
)
