"""Granite 4 checkpoints: the table of dense models, and what that of experts shares."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxllm.config.model import HeadCount
from jaxllm.convert.decoders import ATTENTION_BIAS, LAYER_TYPES, DecoderArchitecture, make_table
from jaxllm.convert.experts import ROUTER_FIELDS
from jaxllm.convert.fused_layouts import FusedLayout, gate_up_rows
from jaxllm.convert.granite import MULTIPLIERS
from jaxllm.convert.tables import Field
from jaxllm.models.granitemoehybrid import GraniteMoeHybridConfig

PUBLISHED_NAMES = {"full_attention": "attention", "linear_attention": "mamba"}
OUR_NAMES = {theirs: ours for ours, theirs in PUBLISHED_NAMES.items()}
NO_LIMITS = (None, [0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}])


def _rename_layers(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename layers as transformers does, and derive the size of a Mamba head."""
    types = data.get("layer_types")
    if isinstance(types, list | tuple):
        types = [OUR_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    head = data.get("mamba_d_head")
    return {
        **data,
        "layer_types": types,
        "mamba_d_head": None if head == "auto" else head,
    }


def _resolve(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    fields["uses_rope"] = fields["uses_rope"] == "rope"
    inner = fields.pop("mamba_expand") * fields["hidden_size"]
    heads = fields["mamba_n_heads"]
    if fields["mamba_d_head"] is None:
        fields["mamba_d_head"] = inner // heads
    if fields["mamba_d_head"] * heads != inner:
        complaints.append(
            f"mamba_n_heads ({heads}) * mamba_d_head ({fields['mamba_d_head']}) is not mamba_expand"
            f" * hidden_size ({inner})"
        )
    if fields["layer_types"] is None:
        fields["layer_types"] = ("linear_attention",) * fields["num_hidden_layers"]


def _finish(config: GraniteMoeHybridConfig, data: dict[str, Any]) -> dict[str, Any]:
    return {
        **data,
        "model_type": "granitemoehybrid",
        "layer_types": [PUBLISHED_NAMES[kind] for kind in config.layer_types],
        "position_embedding_type": "rope" if config.uses_rope else "nope",
        "mamba_expand": config.mamba_sizes[0] // config.hidden_size,
    }


def _finish_dense(config: GraniteMoeHybridConfig, data: dict[str, Any]) -> dict[str, Any]:
    none = {"num_local_experts": 0, "num_experts_per_tok": 0}
    return {**_finish(config, data), "intermediate_size": config.intermediate_size, **none}


def make_granite4_table(
    config: type[GraniteMoeHybridConfig],
    *fields: Field,
    ignored_fields: frozenset[str] = frozenset(),
    layouts: tuple[Any, ...],
    finish: Callable[[Any, dict[str, Any]], dict[str, Any]] = _finish,
) -> DecoderArchitecture:
    """Return the table of Granite 4 with or without experts; arguments: `make_table`."""
    return make_table(
        "GraniteMoeHybrid",
        config,
        ATTENTION_BIAS,
        *(Field(name, name, 1.0) for name in MULTIPLIERS),
        LAYER_TYPES,
        Field("mamba_n_heads", "mamba_n_heads", 128, HeadCount),
        Field("mamba_d_head", "mamba_d_head", None, HeadCount),
        Field("mamba_n_groups", "mamba_n_groups", 1),
        Field("mamba_d_state", "mamba_d_state", 256),
        Field("mamba_d_conv", "mamba_d_conv", 4),
        Field("mamba_expand", "mamba_expand", 2, HeadCount),
        Field("mamba_conv_bias", "mamba_conv_bias", True),
        Field("mamba_proj_bias", "mamba_proj_bias", False),
        Field("position_embedding_type", "uses_rope", "nope", Literal["rope", "nope"]),
        *fields,
        classifier=None,
        allowed_values={"normalization_function": ("rmsnorm",), "time_step_limit": NO_LIMITS},
        aliases={"layers_block_type": "layer_types"},
        ignored_fields=ROUTER_FIELDS | {"init_method", "mamba_chunk_size"} | ignored_fields,
        layouts=layouts,
        prepare=_rename_layers,
        derive=_resolve,
        finish=finish,
    )


def shared_mlp_layouts(
    module: str, rows: Callable[[Any], tuple[int, int]]
) -> tuple[FusedLayout, FusedLayout]:
    """Return the layouts of the MLP that all tokens use.

    module: Our name of it, within a layer. rows: Row counts of its gate and up projections.
    """
    inputs = (f"{module}.gate_proj", f"{module}.up_proj")
    return (
        FusedLayout("shared_mlp.input_linear", inputs, rows),
        FusedLayout(
            "shared_mlp.output_linear", (f"{module}.down_proj",), lambda c: (c.hidden_size,)
        ),
    )


TABLES = (
    make_granite4_table(
        GraniteMoeHybridConfig,
        Field("shared_intermediate_size", "intermediate_size", 1024),
        ignored_fields=frozenset({"intermediate_size", "num_experts_per_tok"}),
        layouts=shared_mlp_layouts("mlp", gate_up_rows),
        finish=_finish_dense,
    ),
)
