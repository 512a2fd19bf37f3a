"""The text model of Gemma 3 (Kamath et al. 2025): Gemma 2 with normalized queries and keys.

Sliding-window layers have separate rotary settings; attention scores are not soft-capped.
"""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.gemma2 import GemmaConfig
from jaxllm.models.hybrid_attention import LocalRopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig, LocalRopeConfig):
    """Gemma 3."""

    model_type: ClassVar[str] = "gemma3_text"
    qk_norm: ClassVar[str | None] = "each head"


FAMILY = decoder_family(Gemma3Config)
