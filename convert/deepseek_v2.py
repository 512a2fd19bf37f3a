"""DeepSeek-V2 checkpoints: the table."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxllm.convert.decoders import MLP_BIAS
from jaxllm.convert.deepseek_v3 import derive_moe, latent_fields, make_moe_table, write_moe
from jaxllm.convert.glm4_moe import DENSE
from jaxllm.convert.tables import REQUIRED, Field
from jaxllm.models.deepseek_v2 import DeepseekV2Config

METHOD = "topk_method"
GREEDY, GROUPS = "greedy", "group_limited_greedy"


def _derive(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    method = fields.pop(METHOD)
    if method not in (GREEDY, GROUPS):
        complaints.append(f"{METHOD} must be {GREEDY!r} or {GROUPS!r}, got {method!r:.40}")
    for name in ("n_group", "topk_group"):
        if method == GREEDY:
            fields[name] = 1
        elif fields[name] is None:
            complaints.append(f"{name} is missing")
    derive_moe(fields, complaints, data)


def _write(config: DeepseekV2Config, data: dict[str, Any]) -> dict[str, Any]:
    return {**write_moe(config, data), METHOD: GREEDY if config.n_group == 1 else GROUPS}


TABLES = (
    make_moe_table(
        "DeepseekV2",
        DeepseekV2Config,
        *latent_fields(1536, 512, 128, 64, 128),
        MLP_BIAS,
        Field("n_routed_experts", "num_experts", 64),
        Field("n_shared_experts", "n_shared_experts", 2),
        Field("moe_intermediate_size", "moe_intermediate_size", 1407),
        Field("num_experts_per_tok", "num_experts_per_tok", REQUIRED),
        Field("n_group", "n_group", None),
        Field("topk_group", "topk_group", None),
        Field("norm_topk_prob", "norm_topk_prob", False, Literal[False]),
        Field("routed_scaling_factor", "routed_scaling_factor", 1.0),
        Field(METHOD, METHOD, GREEDY, str),
        Field(DENSE, DENSE, 0, Annotated[int, Meta(ge=0)]),  # read into mlp_layer_types
        allowed_values={"scoring_func": ("softmax",)},
        aliases={"num_experts": "n_routed_experts"},
        heads_divide_width=True,
        derive=_derive,
        finish=_write,
    ),
)
