"""Granite 4 checkpoints: the table of dense models; Mamba layers and experts are refused."""

from collections.abc import Mapping
from typing import Any, Literal

from jaxllm.convert.decoders import ATTENTION_BIAS, make_table
from jaxllm.convert.experts import ROUTER_FIELDS
from jaxllm.convert.fused_layouts import FusedLayout, gate_up_rows
from jaxllm.convert.granite import MULTIPLIERS
from jaxllm.convert.tables import Field
from jaxllm.models.granitemoehybrid import GraniteMoeHybridConfig

# Without Mamba layers and experts, nothing reads these.
UNUSED = frozenset(
    f"mamba_{name}"
    for name in (
        "n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size", "conv_bias",
        "proj_bias",
    )
) | {"intermediate_size", "num_experts_per_tok", "time_step_limit", "init_method"}  # fmt: skip


def _rename_layers(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename attention layers as transformers does. Without layer_types, all are Mamba layers."""
    types = data.get("layer_types") or ["mamba"]
    if isinstance(types, list | tuple):
        types = ["full_attention" if kind == "attention" else kind for kind in types]
    return {**data, "layer_types": types}


def _check_layers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    if (experts := fields.pop("num_local_experts")) != 0:
        complaints.append(f"num_local_experts must be 0, got {experts}")
    fields["uses_rope"] = fields["uses_rope"] == "rope"


def _write_layers(config: GraniteMoeHybridConfig, data: dict[str, Any]) -> dict[str, Any]:
    return {
        **data,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["attention"] * config.num_hidden_layers,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope" if config.uses_rope else "nope",
        "mamba_n_heads": 1,  # unused, but transformers' default must divide 2 hidden_size
    }


TABLES = (
    make_table(
        "GraniteMoeHybrid",
        GraniteMoeHybridConfig,
        ATTENTION_BIAS,
        *(Field(name, name, 1.0) for name in MULTIPLIERS),
        Field("shared_intermediate_size", "intermediate_size", 1024),
        Field("num_local_experts", "num_local_experts", 8, int),
        Field("position_embedding_type", "uses_rope", "nope", Literal["rope", "nope"]),
        classifier=None,
        allowed_values={"layers_block_type": (), "normalization_function": ("rmsnorm",)},
        ignored_fields=UNUSED | ROUTER_FIELDS,
        layouts=(
            FusedLayout("shared_mlp.input_linear", ("mlp.gate_proj", "mlp.up_proj"), gate_up_rows),
            FusedLayout(
                "shared_mlp.output_linear", ("mlp.down_proj",), lambda config: (config.hidden_size,)
            ),
        ),
        prepare=_rename_layers,
        derive=_check_layers,
        finish=_write_layers,
    ),
)
