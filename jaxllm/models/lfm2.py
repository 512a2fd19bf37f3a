"""LFM2 (Liquid AI 2025, arXiv 2511.23404): short convolutions between layers with attention."""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.family import LinearGroup
from jaxllm.models.recurrent import ShortConvConfig, ShortConvDecoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(ShortConvConfig):
    """LFM2."""

    model_type: ClassVar[str] = "lfm2"
    qk_norm: ClassVar[str | None] = "each head"


_ROW = decoder_family(Lfm2Config, ShortConvDecoder)
FAMILY = dataclasses.replace(
    _ROW,
    linear_groups=(
        LinearGroup("attn_norm", ("conv.in_proj",), "attn.output", "input_layernorm"),
        *_ROW.linear_groups,
    ),
)
