"""Phi-3, 3.5 and 4 (Abdin et al. 2024): Llama with LongRoPE and optional partial rotary embedding.

Checkpoints store queries, keys and values as one matrix, and gate and up as another; here they are
separate. LongRoPE uses one list of divisors for texts of up to `original_max_position_embeddings`
tokens and another for longer ones. When a text crosses this length
(`ModelConfig.original_context`), transformers runs all of it again; here a generation that would
cross it is refused. Replacing the short list by the long one removes the limit, and changes outputs
of short texts slightly.
"""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import TokenCount
from jaxllm.models.decoder import decoder_family
from jaxllm.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """Phi-3."""

    model_type: ClassVar[str] = "phi3"

    sliding_window: TokenCount | None = None


FAMILY = decoder_family(Phi3Config)
