"""SmolLM3 (Bakouch et al. 2025): Llama of which some layers turn nothing (NoPE)."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

from jaxllm.config import Rope
from jaxllm.models.decoder import Decoder, family
from jaxllm.models.layer_types import MixedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(MixedConfig):
    """SmolLM3. turns: whether each layer turns its queries and keys."""

    model_type: ClassVar[str] = "smollm3"

    turns: tuple[bool, ...]
    attention_bias: bool = False
    mlp_bias: bool = False

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if not complaints and len(self.turns) != self.num_hidden_layers:
            complaints.append(
                f"turns has {len(self.turns)} entries for {self.num_hidden_layers} layers"
            )
        return complaints

    def rotary(self, layer: int) -> Rope | None:
        return self.rope if self.turns[layer] else None

    def with_layers(self, numbers: Sequence[int]) -> Self:
        kept = tuple(self.layer_types[i] for i in numbers)
        turns = tuple(self.turns[i] for i in numbers)
        count = len(kept)
        return dataclasses.replace(self, num_hidden_layers=count, layer_types=kept, turns=turns)

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, self.attention_bias, self.mlp_bias)


class SmolLM3(Decoder):
    """The model."""

    config: SmolLM3Config


FAMILY = family(SmolLM3Config, SmolLM3)
