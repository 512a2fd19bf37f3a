"""SmolLM3 (Bakouch et al. 2025): Llama with RoPE disabled in some layers (NoPE)."""

import dataclasses
from typing import ClassVar

from jaxllm.config import Rope
from jaxllm.models.decoder import Decoder, family
from jaxllm.models.layer_types import MixedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(MixedConfig):
    """SmolLM3. turns: whether each layer uses RoPE."""

    model_type: ClassVar[str] = "smollm3"
    by_layer: ClassVar[tuple[str, ...]] = (*MixedConfig.by_layer, "turns")

    turns: tuple[bool, ...]
    attention_bias: bool = False
    mlp_bias: bool = False

    def rotary(self, layer: int) -> Rope | None:
        return self.rope if self.turns[layer] else None

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, self.attention_bias, self.mlp_bias)


class SmolLM3(Decoder):
    """The model."""

    config: SmolLM3Config


FAMILY = family(SmolLM3Config, SmolLM3)
