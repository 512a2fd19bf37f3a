"""OLMo 3 (Olmo Team 2025): OLMo 2 with sliding windows, and plain rotary settings there."""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.hybrid_attention import LocalRopeConfig
from jaxllm.models.olmo2 import Olmo2Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config, LocalRopeConfig):
    """OLMo 3."""

    model_type: ClassVar[str] = "olmo3"


FAMILY = decoder_family(Olmo3Config)
