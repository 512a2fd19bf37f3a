"""Granite 3 (IBM 2024): Llama with scalar multipliers."""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import Positive
from jaxllm.models.decoder import decoder_family
from jaxllm.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMultipliers(DecoderConfig):
    """Embeddings, residual branches and scores have multipliers; logits are divided by
    `logits_scaling`.
    """

    attention_bias: bool = False
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def residual_scale(self) -> float:
        return self.residual_multiplier

    @property
    def attention_scale(self) -> float:
        return self.attention_multiplier

    @property
    def logits_scale(self) -> float:
        return 1 / self.logits_scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(GraniteMultipliers):
    """Granite."""

    model_type: ClassVar[str] = "granite"

    mlp_bias: bool = False


FAMILY = decoder_family(GraniteConfig, embeddings="embeddings")
