"""GLM-4.7-Flash checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.deepseek_v3 import (
    V3_FIELDS,
    V3_VALUES,
    derive_cache,
    latent_fields,
    make_moe_table,
    write_heads,
)
from jaxllm.convert.tables import Field
from jaxllm.models.glm4_moe_lite import Glm4MoeLiteConfig

TYPES = "mlp_layer_types"


def _derive(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    if fields[TYPES] is None:
        fields[TYPES] = ("dense", *["sparse"] * (fields["num_hidden_layers"] - 1))
    derive_cache(fields, complaints, data)


TABLES = (
    make_moe_table(
        "Glm4MoeLite",
        Glm4MoeLiteConfig,
        *latent_fields(768, 512, 192, 64, 256),
        Field("max_position_embeddings", "max_position_embeddings", 202752),
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field("n_routed_experts", "num_experts", 64),
        *V3_FIELDS,
        Field("moe_intermediate_size", "moe_intermediate_size", 1536),
        Field("num_experts_per_tok", "num_experts_per_tok", 4),
        Field("n_group", "n_group", 1),
        Field("topk_group", "topk_group", 1),
        Field("routed_scaling_factor", "routed_scaling_factor", 1.8),
        Field(TYPES, TYPES, None),
        allowed_values={**V3_VALUES, "partial_rotary_factor": (1,), "first_k_dense_replace": (1,)},
        aliases={"num_local_experts": "n_routed_experts"},
        classifier=None,
        derive=_derive,
        finish=write_heads,
    ),
)
