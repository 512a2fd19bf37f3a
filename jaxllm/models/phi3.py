"""Phi-3, 3.5 and 4 (Abdin et al. 2024): Llama; LongRoPE, and heads that may be turned in part.

Checkpoints keep queries, keys and values as one matrix, and gate and up; here they are apart.
LongRoPE turns texts of up to `original_max_position_embeddings` tokens by one list and longer ones
by another. transformers runs the whole text again when it crosses; here no generation begins that
would (`ModelConfig.border`): a prompt beyond the border, or a text that ends at it. With the long
list in the place of the short one there is no border, and short texts differ a little.
"""

import dataclasses
from typing import ClassVar

from jaxllm.config import Tokens
from jaxllm.models.decoder import Decoder, DecoderConfig, family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """Phi-3."""

    model_type: ClassVar[str] = "phi3"

    sliding_window: Tokens | None = None

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Phi3(Decoder):
    """The model."""

    config: Phi3Config


FAMILY = family(Phi3Config, Phi3)
