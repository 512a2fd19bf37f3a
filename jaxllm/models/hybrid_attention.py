"""Decoders that mix layers with full and with sliding-window attention (`layer_types`)."""

import dataclasses
from typing import ClassVar, Literal

from jaxllm.config.model import Rope, TokenCount
from jaxllm.models.decoder_config import DecoderConfig

LayerType = Literal["full_attention", "sliding_attention"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridAttentionConfig(DecoderConfig):
    """A decoder some of whose layers have a sliding window. layer_types: one per layer."""

    per_layer_fields: ClassVar[tuple[str, ...]] = ("layer_types",)

    layer_types: tuple[LayerType, ...]
    sliding_window: TokenCount | None = None

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        sliding = "sliding_attention" in self.layer_types
        if not complaints and sliding and self.sliding_window is None:
            complaints.append("layers of type sliding_attention need sliding_window")
        return complaints

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer has a sliding window."""
        return self.layer_types[layer] == "sliding_attention"

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.is_sliding(layer) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingRopeConfig(HybridAttentionConfig):
    """Layers without a sliding window have no rotary positions."""

    def layer_rope(self, layer: int) -> Rope | None:
        return self.rope if self.is_sliding(layer) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalRopeConfig(HybridAttentionConfig):
    """Sliding-window layers have rotary settings of their own, `local_rope`."""

    local_rope: Rope

    def layer_rope(self, layer: int) -> Rope | None:
        return self.local_rope if self.is_sliding(layer) else self.rope

    def _ropes(self) -> tuple[Rope, ...]:
        return (self.rope, self.local_rope)
