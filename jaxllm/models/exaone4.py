"""EXAONE 4 (LG AI Research 2025): post-norms only, normalized queries and keys.

If some layers have a sliding window, only these have rotary positions.
"""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import Rope
from jaxllm.models.decoder import decoder_family
from jaxllm.models.hybrid_attention import SlidingRopeConfig
from jaxllm.models.olmo2 import Olmo2Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exaone4Config(SlidingRopeConfig):
    """EXAONE 4."""

    model_type: ClassVar[str] = "exaone4"
    norms: ClassVar[tuple[str | None, ...]] = Olmo2Config.norms
    qk_norm: ClassVar[str | None] = "each head"

    def layer_rope(self, layer: int) -> Rope | None:
        return self.rope if self.sliding_window is None else super().layer_rope(layer)


FAMILY = decoder_family(Exaone4Config)
