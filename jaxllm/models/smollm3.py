"""SmolLM3 (Bakouch et al. 2025): Llama with RoPE disabled in some layers (NoPE)."""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import Rope
from jaxllm.models.decoder import decoder_family
from jaxllm.models.hybrid_attention import HybridAttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(HybridAttentionConfig):
    """SmolLM3. turns: whether each layer uses RoPE."""

    model_type: ClassVar[str] = "smollm3"
    per_layer_fields: ClassVar[tuple[str, ...]] = (*HybridAttentionConfig.per_layer_fields, "turns")

    turns: tuple[bool, ...]
    attention_bias: bool = False
    mlp_bias: bool = False

    def layer_rope(self, layer: int) -> Rope | None:
        return self.rope if self.turns[layer] else None


FAMILY = decoder_family(SmolLM3Config)
