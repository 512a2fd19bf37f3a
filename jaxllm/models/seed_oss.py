"""Seed-OSS (ByteDance Seed 2025): Llama with biases on queries, keys and values."""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedOssConfig(DecoderConfig):
    """Seed-OSS. attention_out_bias: whether attention's output has a bias."""

    model_type: ClassVar[str] = "seed_oss"

    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, self.attention_out_bias, self.mlp_bias)


FAMILY = decoder_family(SeedOssConfig)
