"""Qwen3-MoE checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import ATTENTION_BIAS, SLIDING_WINDOW, make_table
from jaxllm.convert.experts import ROUTER_FIELDS, ExpertLayout
from jaxllm.convert.qwen2 import CONTEXT
from jaxllm.convert.tables import Field, Interval
from jaxllm.models.moe import SparseLayersConfig
from jaxllm.models.qwen3_moe import Qwen3MoeConfig

# Read into mlp_layer_types.
SPARSE_FIELDS = (
    Field("decoder_sparse_step", "decoder_sparse_step", 1, Interval),
    Field("mlp_only_layers", "mlp_only_layers", (), tuple[int, ...]),
)


def resolve_sparse_layers(fields: dict[str, Any]) -> None:
    """Give each `decoder_sparse_step`th layer experts, except for `mlp_only_layers`."""
    count, step = fields["num_hidden_layers"], fields.pop("decoder_sparse_step")
    dense = set(fields.pop("mlp_only_layers"))
    fields["mlp_layer_types"] = tuple(
        "dense" if i in dense or (i + 1) % step else "sparse" for i in range(count)
    )


def write_sparse_layers(config: SparseLayersConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Write which layers have no experts."""
    dense = [i for i in range(config.num_hidden_layers) if not config.is_moe_layer(i)]
    return {**data, "decoder_sparse_step": 1, "mlp_only_layers": dense}


def _resolve(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    if not fields.pop("use_sliding_window"):
        fields["sliding_window"] = None
    resolve_sparse_layers(fields)


def _finish(config: Qwen3MoeConfig, data: dict[str, Any]) -> dict[str, Any]:
    slides = config.sliding_window is not None
    return {**write_sparse_layers(config, data), "use_sliding_window": slides}


QWEN3_MOE = make_table(
    "Qwen3Moe",
    Qwen3MoeConfig,
    CONTEXT,
    ATTENTION_BIAS,
    SLIDING_WINDOW,
    Field("num_key_value_heads", "num_key_value_heads", 4),
    Field("use_sliding_window", "use_sliding_window", False, bool),
    Field("num_experts", "num_experts", 128),
    Field("num_experts_per_tok", "num_experts_per_tok", 8),
    Field("moe_intermediate_size", "moe_intermediate_size", 768),
    Field("norm_topk_prob", "norm_topk_prob", False),
    *SPARSE_FIELDS,
    allowed_values={
        "qkv_bias": (False,),
        "shared_expert_intermediate_size": (0,),
        "use_qk_norm": (True,),
    },
    ignored_fields=ROUTER_FIELDS | {"max_window_layers"},
    aliases={"num_local_experts": "num_experts"},
    layouts=(ExpertLayout("mlp"),),
    derive=_resolve,
    finish=_finish,
)
TABLES = (QWEN3_MOE,)
