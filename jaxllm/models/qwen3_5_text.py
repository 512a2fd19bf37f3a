"""The text model of Qwen3.5, 3.6 and 3.8: gated DeltaNet layers between layers with attention.

Attention's output is gated; a quarter of each head is rotated.
"""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.recurrent import DeltaNetConfig, RecurrentDecoder, recurrent_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(DeltaNetConfig):
    """Qwen3.5."""

    model_type: ClassVar[str] = "qwen3_5_text"
    qk_norm: ClassVar[str | None] = "each head"

    attention_bias: bool = False

    @property
    def norm_weight_offset(self) -> float:
        return 1.0

    @property
    def gates_attention(self) -> bool:
        return True


LINEAR_INPUTS = tuple(f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a"))

FAMILY = recurrent_family(decoder_family(Qwen3_5Config, RecurrentDecoder), LINEAR_INPUTS)
