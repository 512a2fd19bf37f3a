"""Ministral 3 (Mistral AI 2025): Mistral, with queries that grow with the position."""

import dataclasses
from typing import Annotated, ClassVar

from msgspec import Meta

from jaxllm.config.model import TokenCount
from jaxllm.models.decoder import decoder_family
from jaxllm.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """Ministral 3.

    Attributes:
        llama_4_scaling_beta: A query at position p is multiplied by 1 + beta ln(1 + floor(p / L)),
            L being the context before scaling (`query_growth`).
    """

    model_type: ClassVar[str] = "ministral3"

    sliding_window: TokenCount | None = None
    llama_4_scaling_beta: Annotated[float, Meta(ge=0, le=100)] = 0.0

    def query_growth(self, layer: int) -> tuple[float, int] | None:
        length = self.rope.original_max_position_embeddings
        beta = self.llama_4_scaling_beta
        return (beta, length) if beta and length is not None else None


FAMILY = decoder_family(Ministral3Config)
