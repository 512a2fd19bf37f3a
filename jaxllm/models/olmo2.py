"""OLMo 2 (OLMo Team 2025): Llama with post-norms only, and normalized queries and keys."""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """OLMo 2."""

    model_type: ClassVar[str] = "olmo2"
    norms: ClassVar[tuple[str | None, ...]] = (
        None,
        "post_attention_layernorm",
        None,
        "post_feedforward_layernorm",
    )
    qk_norm: ClassVar[str | None] = "all heads"

    attention_bias: bool = False


FAMILY = decoder_family(Olmo2Config)
