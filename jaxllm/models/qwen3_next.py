"""Qwen3-Next (Qwen 2025): Qwen3.5-MoE, also with dense layers."""

import dataclasses
from typing import ClassVar

from jaxllm.models import moe
from jaxllm.models.qwen3_5_moe_text import Qwen3_5MoeConfig, Qwen3_5MoeDecoder
from jaxllm.models.qwen3_5_text import LINEAR_INPUTS
from jaxllm.models.recurrent import recurrent_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(moe.SparseLayersConfig, Qwen3_5MoeConfig):
    """Qwen3-Next."""

    model_type: ClassVar[str] = "qwen3_next"
    per_layer_fields: ClassVar[tuple[str, ...]] = ("layer_types", "mlp_layer_types")


FAMILY = dataclasses.replace(
    recurrent_family(
        moe.moe_family(Qwen3NextConfig, Qwen3_5MoeDecoder, (moe.SHARED_GATE,)), LINEAR_INPUTS
    ),
    width_fields=("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
