"""Qwen3 (Yang et al. 2025): Llama with normalized queries and keys (per head)."""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.hybrid_attention import HybridAttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(HybridAttentionConfig):
    """Qwen3."""

    model_type: ClassVar[str] = "qwen3"
    qk_norm: ClassVar[str | None] = "each head"

    attention_bias: bool = False


FAMILY = decoder_family(Qwen3Config)
