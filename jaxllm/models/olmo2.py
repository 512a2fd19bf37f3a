"""OLMo 2 (OLMo Team 2025): Llama with post-norms only, and normalized queries and keys."""

import dataclasses
from typing import ClassVar

from jaxllm.models import decoder
from jaxllm.models.decoder import Decoder, DecoderConfig, decoder_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """OLMo 2."""

    model_type: ClassVar[str] = "olmo2"

    attention_bias: bool = False

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, self.attention_bias, False)


class Block(decoder.Block):
    """One layer."""

    norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    qk_norm = "all heads"


class Olmo2(Decoder):
    """The model."""

    config: Olmo2Config
    block = Block


FAMILY = decoder_family(Olmo2Config, Olmo2)
