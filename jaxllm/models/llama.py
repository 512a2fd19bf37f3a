"""Llama (Touvron et al. 2023) and Mistral, with Hugging Face's names for the parameters."""

import dataclasses
from typing import ClassVar

from jaxllm.config import Tokens
from jaxllm.models.decoder import Block, Decoder, DecoderConfig, family


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Llama and its family: RMS norm, rotary positions, gated MLP, grouped-query attention."""

    model_type: ClassVar[str] = "llama"

    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Tokens | None = None

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, self.attention_bias, self.mlp_bias)


class Llama(Decoder):
    """The model."""

    config: LlamaConfig
    block = Block


FAMILY = family(LlamaConfig, Llama, aliases=("mistral",))
