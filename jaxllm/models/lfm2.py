"""LFM2 (Liquid AI 2025, arXiv 2511.23404): short convolutions between layers with attention."""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.recurrent import ShortConvConfig, ShortConvDecoder, recurrent_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(ShortConvConfig):
    """LFM2."""

    model_type: ClassVar[str] = "lfm2"
    qk_norm: ClassVar[str | None] = "each head"


FAMILY = recurrent_family(decoder_family(Lfm2Config, ShortConvDecoder), ("conv.in_proj",))
