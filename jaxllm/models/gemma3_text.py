"""The text model of Gemma 3 (Kamath et al. 2025): Gemma 2 with normalized queries and keys.

Sliding-window layers have separate rotary settings; attention scores are not soft-capped.
"""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import Rope
from jaxllm.models import gemma2
from jaxllm.models.decoder import Decoder, decoder_family
from jaxllm.models.gemma2 import GemmaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """Gemma 3. local_rope: rotary settings of sliding-window layers."""

    model_type: ClassVar[str] = "gemma3_text"

    local_rope: Rope

    def layer_rope(self, layer: int) -> Rope | None:
        return self.local_rope if self.is_sliding(layer) else self.rope

    def _ropes(self) -> tuple[Rope, ...]:
        return (self.rope, self.local_rope)


class Block(gemma2.Block):
    """One layer."""

    qk_norm = "each head"


class Gemma3(Decoder):
    """The model."""

    config: Gemma3Config
    block = Block


FAMILY = decoder_family(Gemma3Config, Gemma3)
