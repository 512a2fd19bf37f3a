"""Qwen3 (Yang et al. 2025): Llama with normalized queries and keys (per head)."""

import dataclasses
from typing import ClassVar

from jaxllm.models import decoder
from jaxllm.models.decoder import Decoder, decoder_family
from jaxllm.models.hybrid_attention import HybridAttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(HybridAttentionConfig):
    """Qwen3."""

    model_type: ClassVar[str] = "qwen3"

    attention_bias: bool = False

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, self.attention_bias, False)


class Block(decoder.Block):
    """One layer."""

    config: Qwen3Config
    qk_norm = "each head"


class Qwen3(Decoder):
    """The model."""

    config: Qwen3Config
    block = Block


FAMILY = decoder_family(Qwen3Config, Qwen3)
