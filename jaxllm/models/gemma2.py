"""Gemma 2 (Riviere et al. 2024): alternating sliding-window layers, soft-capped scores and logits.

There are norms before and after attention and the MLP; their stored weights are offset by -1.
"""

import dataclasses
import math
from typing import ClassVar

from jaxllm.config.model import Positive
from jaxllm.models.decoder import decoder_family
from jaxllm.models.hybrid_attention import HybridAttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(HybridAttentionConfig):
    """Shared by Gemma 2 and 3. query_pre_attn_scalar: scores are divided by its square root."""

    norms: ClassVar[tuple[str | None, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    query_pre_attn_scalar: Positive
    attention_bias: bool = False
    final_logit_softcapping: Positive | None = None

    @property
    def attention_scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    def norm_weight_offset(self) -> float:
        return 1.0

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_size)

    @property
    def logits_cap(self) -> float | None:
        return self.final_logit_softcapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """Gemma 2. attn_logit_softcapping: soft cap on attention scores."""

    model_type: ClassVar[str] = "gemma2"

    attn_logit_softcapping: Positive | None = None

    @property
    def attention_cap(self) -> float | None:
        return self.attn_logit_softcapping


FAMILY = decoder_family(Gemma2Config)
