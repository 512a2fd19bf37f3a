"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on queries, keys and values."""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.hybrid_attention import HybridAttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(HybridAttentionConfig):
    """Qwen2."""

    model_type: ClassVar[str] = "qwen2"

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (True, False, False)


FAMILY = decoder_family(Qwen2Config)
