"""Llama (Touvron et al. 2023) and Mistral, with Hugging Face's parameter names."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from jaxllm.config.attention_kind import AttentionKind
from jaxllm.config.model import TokenCount
from jaxllm.models.decoder import decoder_family
from jaxllm.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Llama-like models: RMS norm, rotary positions, gated MLP, grouped-query attention.

    Attributes:
        attention: A kind of attention of another package; no published checkpoint has one.
    """

    model_type: ClassVar[str] = "llama"

    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: TokenCount | None = None
    attention: AttentionKind | None = None

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if complaints or self.attention is None:
            return complaints
        if self.sliding_window is not None:
            complaints.append(
                f"attention of kind {self.attention.kind!r} excludes sliding_window: remove one"
                " of them"
            )
        segment = self.attention.segment_length
        if segment is not None and segment > self.max_position_embeddings:
            complaints.append(
                f"segments of {segment} tokens exceed max_position_embeddings"
                f" ({self.max_position_embeddings})"
            )
        if segment is not None and self.rope.depends_on_length:
            complaints.append(
                f"rotary settings of type {self.rope.rope_type!r} follow the text's length, but"
                " segments have a fixed length"
            )
        if self.rope.is_self_extended:
            complaints.append(
                f"attention of kind {self.attention.kind!r} excludes Self-Extend (group_size,"
                " neighbor_window): remove one of them"
            )
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        return complaints + self.attention.complaints(layers, heads)

    @property
    def context_length(self) -> int:
        """Unlimited with a memory: only one segment is attended to at a time."""
        return super().context_length if self.segment_length is None else self.position_limit

    def attention_kind(self, layer: int) -> AttentionKind | None:
        kind = self.attention
        return kind.with_layers([layer]) if kind is not None else None

    def with_layers(self, indices: Sequence[int]) -> Self:
        kind = self.attention and self.attention.with_layers(indices)
        return dataclasses.replace(self, num_hidden_layers=len(indices), attention=kind)

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        if self.attention is None:  # keep the files of models without it unchanged
            return {name: value for name, value in fields.items() if name != "attention"}
        return {**fields, "attention": self.attention.to_dict()}


FAMILY = decoder_family(LlamaConfig)
