"""Decoders whose layers differ: some see the whole text, others a window (`layer_types`)."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Self

from jaxllm.config import Tokens
from jaxllm.models.decoder import DecoderConfig

LayerType = Literal["full_attention", "sliding_attention"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedConfig(DecoderConfig):
    """A decoder of which some layers see a window. layer_types: which, one for each layer."""

    layer_types: tuple[LayerType, ...]
    sliding_window: Tokens | None = None

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if complaints:
            return complaints
        if len(self.layer_types) != self.num_hidden_layers:
            complaints.append(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers}"
                " layers"
            )
        elif "sliding_attention" in self.layer_types and self.sliding_window is None:
            complaints.append("layers of sliding_attention need sliding_window")
        return complaints

    def slides(self, layer: int) -> bool:
        """Whether a layer sees a window."""
        return self.layer_types[layer] == "sliding_attention"

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.slides(layer) else None

    def with_layers(self, numbers: Sequence[int]) -> Self:
        kept = tuple(self.layer_types[i] for i in numbers)
        return dataclasses.replace(self, num_hidden_layers=len(kept), layer_types=kept)
