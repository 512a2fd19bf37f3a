"""Llama (Touvron et al. 2023) and Mistral, with Hugging Face's parameter names."""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import TokenCount
from jaxllm.models.decoder import decoder_family
from jaxllm.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Llama-like models: RMS norm, rotary positions, gated MLP, grouped-query attention."""

    model_type: ClassVar[str] = "llama"

    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: TokenCount | None = None


FAMILY = decoder_family(LlamaConfig)
