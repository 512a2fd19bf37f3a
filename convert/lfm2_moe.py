"""LFM2-MoE checkpoints: the table."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from jaxllm.convert.decoders import make_table
from jaxllm.convert.experts import ROUTER_FIELDS, ExpertLayout
from jaxllm.convert.fused_layouts import RenamedLayout
from jaxllm.convert.glm4_moe import DENSE, resolve_dense_layers, write_dense_layers
from jaxllm.convert.lfm2 import ABSENT, CONV_FIELDS, NAMES, UNUSED
from jaxllm.convert.tables import REQUIRED, Field
from jaxllm.models.lfm2_moe import Lfm2MoeConfig


def _resolve(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    fields["hidden_act"] = "silu"
    resolve_dense_layers(fields, complaints, data)


def _finish(config: Lfm2MoeConfig, data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "num_dense_layers": write_dense_layers(config, data)[DENSE]}


TABLES = (
    make_table(
        "Lfm2Moe",
        Lfm2MoeConfig,
        *CONV_FIELDS,
        Field("layer_types", "layer_types", REQUIRED),
        Field("num_key_value_heads", "num_key_value_heads", 8),
        Field("num_experts", "num_experts", 32),
        Field("num_experts_per_tok", "num_experts_per_tok", 4),
        Field("moe_intermediate_size", "moe_intermediate_size", 1792),
        Field("norm_topk_prob", "norm_topk_prob", True),
        Field("use_expert_bias", "use_expert_bias", True),
        Field("routed_scaling_factor", "routed_scaling_factor", 1.0),
        Field("num_dense_layers", DENSE, 2, Annotated[int, Meta(ge=0)]),  # into mlp_layer_types
        omit=ABSENT,
        aliases={"tie_embedding": "tie_word_embeddings"},
        ignored_fields=UNUSED | ROUTER_FIELDS,
        layouts=(
            RenamedLayout(NAMES),
            ExpertLayout("feed_forward", names=("w1", "w3", "w2"), bias="expert_bias"),
        ),
        derive=_resolve,
        finish=_finish,
        theta=1e6,
        classifier=None,
    ),
)
