"""Checkpoints of Granite 4 with experts: the table."""

from jaxllm.convert.fused_layouts import FusedLayout, RenamedLayout, gate_up_rows
from jaxllm.convert.granitemoehybrid import make_granite4_table, shared_mlp_layouts
from jaxllm.convert.tables import Field
from jaxllm.models.granitemoehybrid_moe import GraniteMoeHybridMoeConfig

NAMES = {
    "layers.*.mlp.gate": "layers.*.block_sparse_moe.router.layer",
    "layers.*.mlp.experts.down_proj": "layers.*.block_sparse_moe.output_linear",
}

EXPERT_INPUTS = ("mlp.experts.gate_proj", "mlp.experts.up_proj")

TABLES = (
    make_granite4_table(
        GraniteMoeHybridMoeConfig,
        Field("shared_intermediate_size", "shared_intermediate_size", 1024),
        Field("num_local_experts", "num_experts", 8),
        Field("num_experts_per_tok", "num_experts_per_tok", 2),
        layouts=(
            RenamedLayout(NAMES),
            FusedLayout("block_sparse_moe.input_linear", EXPERT_INPUTS, gate_up_rows),
            *shared_mlp_layouts("mlp.shared_experts", lambda c: (c.shared_intermediate_size,) * 2),
        ),
    ),
)
