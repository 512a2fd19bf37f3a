"""The text model of Gemma 3 (Kamath et al. 2025): Gemma 2 with normalized queries and keys.

Sliding-window layers have separate rotary settings; attention scores are not soft-capped.
"""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import Rope
from jaxllm.models.decoder import decoder_family
from jaxllm.models.gemma2 import GemmaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """Gemma 3. local_rope: rotary settings of sliding-window layers."""

    model_type: ClassVar[str] = "gemma3_text"
    qk_norm: ClassVar[str | None] = "each head"

    local_rope: Rope

    def layer_rope(self, layer: int) -> Rope | None:
        return self.local_rope if self.is_sliding(layer) else self.rope

    def _ropes(self) -> tuple[Rope, ...]:
        return (self.rope, self.local_rope)


FAMILY = decoder_family(Gemma3Config)
