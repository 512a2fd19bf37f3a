"""GLM-4-MoE checkpoints: the table."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from jaxllm.convert.decoders import (
    ATTENTION_BIAS,
    PARTIAL_ROTARY_FACTOR,
    make_table,
    set_rotary_share,
    write_rotary_share,
)
from jaxllm.convert.experts import ROUTER_FIELDS, ExpertLayout, NextTokenLayers
from jaxllm.convert.tables import Field
from jaxllm.errors import ConfigError
from jaxllm.models.glm4_moe import Glm4MoeConfig
from jaxllm.models.moe import SparseLayersConfig

DENSE = "first_k_dense_replace"


def resolve_dense_layers(
    fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]
) -> None:
    """Derive which layers have experts: all but the first ones."""
    first, count = fields.pop(DENSE), fields["num_hidden_layers"]
    fields["mlp_layer_types"] = tuple("dense" if i < first else "sparse" for i in range(count))


def write_dense_layers(config: SparseLayersConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Write how many layers at the beginning are dense; there are no layers of further tokens."""
    types = config.mlp_layer_types
    if "dense" in types[(first := types.count("dense")) :]:
        raise ConfigError(f"dense layers must come first in the Hugging Face format: got {types}")
    return {**data, DENSE: first, "num_nextn_predict_layers": 0}


TABLES = (
    make_table(
        "Glm4Moe",
        Glm4MoeConfig,
        ATTENTION_BIAS,
        Field("num_key_value_heads", "num_key_value_heads", 8),
        Field("max_position_embeddings", "max_position_embeddings", 131072),
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field("use_qk_norm", "use_qk_norm", False),
        Field("n_routed_experts", "num_experts", 128),
        Field("num_experts_per_tok", "num_experts_per_tok", 8),
        Field("moe_intermediate_size", "moe_intermediate_size", 1408),
        Field("n_shared_experts", "n_shared_experts", 1),
        Field("n_group", "n_group", 1),
        Field("topk_group", "topk_group", 1),
        Field("norm_topk_prob", "norm_topk_prob", True),
        Field("routed_scaling_factor", "routed_scaling_factor", 1.0),
        Field(DENSE, DENSE, 1, Annotated[int, Meta(ge=0)]),  # read into mlp_layer_types
        classifier=None,
        allowed_values={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        ignored_fields=ROUTER_FIELDS
        | {PARTIAL_ROTARY_FACTOR, "num_mtp_layers", "num_nextn_predict_layers"},
        aliases={"num_local_experts": "n_routed_experts"},
        layouts=(NextTokenLayers(), ExpertLayout("mlp")),
        prepare=lambda data: set_rotary_share(data, 0.5),
        derive=resolve_dense_layers,
        finish=lambda config, data: write_dense_layers(config, write_rotary_share(config, data)),
    ),
)
