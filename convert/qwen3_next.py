"""Qwen3-Next checkpoints: the table. The inputs of DeltaNet are fused by key head."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import write_rotary_share
from jaxllm.convert.experts import ROUTER_FIELDS, ExpertLayout, NextTokenLayers
from jaxllm.convert.fused_layouts import FusedLayout, RenamedLayout
from jaxllm.convert.qwen3_5_moe_text import NAMES
from jaxllm.convert.qwen3_5_text import make_qwen3_5_table, resolve_layers
from jaxllm.convert.qwen3_moe import SPARSE_FIELDS, resolve_sparse_layers, write_sparse_layers
from jaxllm.convert.tables import Field
from jaxllm.models.qwen3_next import Qwen3NextConfig


def _sizes(config: Any) -> tuple[int, int, int, int]:
    """Return the numbers of rows of queries, keys, values and gates."""
    keys, values = config.linear_sizes
    return keys, keys, values, values


def _resolve(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    resolve_layers(fields, complaints, data)
    resolve_sparse_layers(fields)


FUSED_BETA_AND_ALPHA = FusedLayout(
    "linear_attn.in_proj_ba",
    ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    lambda c: (c.linear_num_value_heads,) * 2,
    lambda c: c.linear_num_key_heads,
)
FUSED = (
    FusedLayout(
        "linear_attn.in_proj_qkvz",
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        _sizes,
        lambda c: c.linear_num_key_heads,
        pieces=(3, 1),
    ),
    FUSED_BETA_AND_ALPHA,
)

TABLES = (
    make_qwen3_5_table(
        "Qwen3Next",
        Qwen3NextConfig,
        *SPARSE_FIELDS,
        Field("num_key_value_heads", "num_key_value_heads", 2),
        Field("num_experts", "num_experts", 512),
        Field("num_experts_per_tok", "num_experts_per_tok", 10),
        Field("moe_intermediate_size", "moe_intermediate_size", 512),
        Field("shared_expert_intermediate_size", "shared_expert_intermediate_size", 512),
        Field("norm_topk_prob", "norm_topk_prob", True),
        ignored_fields=ROUTER_FIELDS,
        layouts=(NextTokenLayers(), RenamedLayout(NAMES), *FUSED, ExpertLayout("mlp")),
        derive=_resolve,
        finish=lambda config, data: write_sparse_layers(config, write_rotary_share(config, data)),
    ),
)
