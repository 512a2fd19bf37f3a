"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts in all layers, or in some."""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import TokenCount
from jaxllm.models.moe import SparseLayersConfig, moe_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(SparseLayersConfig):
    """Qwen3-MoE."""

    model_type: ClassVar[str] = "qwen3_moe"
    qk_norm: ClassVar[str | None] = "each head"

    attention_bias: bool = False
    sliding_window: TokenCount | None = None


FAMILY = dataclasses.replace(
    moe_family(Qwen3MoeConfig),
    width_fields=("intermediate_size", "moe_intermediate_size"),
)
