"""Qwen3.5-MoE checkpoints: the table."""

from jaxllm.convert.experts import PROJECTIONS, ROUTER_FIELDS, ExpertLayout
from jaxllm.convert.fused_layouts import RenamedLayout
from jaxllm.convert.qwen3_5_text import make_qwen3_5_table
from jaxllm.convert.tables import Field
from jaxllm.models.qwen3_5_moe_text import Qwen3_5MoeConfig

NAMES = {
    f"layers.*.mlp.shared_experts.{name}": f"layers.*.mlp.shared_expert.{name}"
    for name in PROJECTIONS
}

TABLES = (
    make_qwen3_5_table(
        "Qwen3_5Moe",
        Qwen3_5MoeConfig,
        Field("num_key_value_heads", "num_key_value_heads", 2),
        Field("num_experts", "num_experts", 256),
        Field("num_experts_per_tok", "num_experts_per_tok", 8),
        Field("moe_intermediate_size", "intermediate_size", 512),
        Field("shared_expert_intermediate_size", "shared_expert_intermediate_size", 512),
        ignored_fields=ROUTER_FIELDS,
        layouts=(RenamedLayout(NAMES), ExpertLayout("mlp")),
        classifier=None,
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
    ),
)
