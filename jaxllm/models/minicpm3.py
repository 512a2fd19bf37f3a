"""MiniCPM3 (Hu et al. 2024, arXiv 2404.06395): latent attention, and scales that keep its width.

Embeddings, what layers add to the stream, and logits have factors.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Self

from jaxllm.config.model import HiddenSize, Positive
from jaxllm.models.decoder import decoder_family
from jaxllm.models.latent_attention import LatentConfig, LatentDecoder, latent_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniCPM3Config(LatentConfig):
    """MiniCPM3.

    Attributes:
        scale_emb: `embedding_scale`.
        scale_depth: `residual_scale`, times the square root of the number of layers.
        dim_model_base: `logits_scale`, times the hidden size.
    """

    model_type: ClassVar[str] = "minicpm3"

    scale_emb: Positive
    scale_depth: Positive
    dim_model_base: HiddenSize
    mlp_bias: bool = False

    @property
    def embedding_scale(self) -> float:
        return float(self.scale_emb)

    @property
    def residual_scale(self) -> float:
        return float(self.scale_depth / math.sqrt(self.num_hidden_layers))

    @property
    def logits_scale(self) -> float:
        return self.dim_model_base / self.hidden_size

    def with_layers(self, indices: Sequence[int]) -> Self:
        """Return the configuration with these layers; what they add keeps its factor."""
        depth = self.residual_scale * math.sqrt(len(indices))
        return dataclasses.replace(super().with_layers(indices), scale_depth=depth)


FAMILY = latent_family(decoder_family(MiniCPM3Config, LatentDecoder))
