"""Granite 4 (IBM 2025), the dense models without Mamba layers: Granite, also without rotation."""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import Rope
from jaxllm.models.decoder import decoder_family
from jaxllm.models.granite import GraniteMultipliers


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(GraniteMultipliers):
    """Granite 4. uses_rope: whether there are rotary positions; else there are none at all."""

    model_type: ClassVar[str] = "granitemoehybrid"

    uses_rope: bool = False

    def layer_rope(self, layer: int) -> Rope | None:
        return self.rope if self.uses_rope else None


FAMILY = decoder_family(GraniteMoeHybridConfig, embeddings="embeddings")
