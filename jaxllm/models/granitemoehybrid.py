"""Granite 4 (IBM 2025), the dense models: Granite with Mamba-2 layers, also without rotation."""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import Rope
from jaxllm.models.decoder import decoder_family
from jaxllm.models.granite import GraniteMultipliers
from jaxllm.models.mamba2 import Mamba2Config, Mamba2Decoder
from jaxllm.models.recurrent import recurrent_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(GraniteMultipliers, Mamba2Config):
    """Granite 4. uses_rope: whether there are rotary positions; else there are none at all."""

    model_type: ClassVar[str] = "granitemoehybrid"

    uses_rope: bool = False

    def layer_rope(self, layer: int) -> Rope | None:
        return super().layer_rope(layer) if self.uses_rope else None


MAMBA_INPUTS = ("mamba.in_proj",)

FAMILY = recurrent_family(
    decoder_family(GraniteMoeHybridConfig, Mamba2Decoder, embeddings="embeddings"), MAMBA_INPUTS
)
