"""GLM-4 (GLM Team 2024; the 0414 models): norms before and after attention and the MLP.

Only half of each head is rotated.
"""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4Config(DecoderConfig):
    """GLM-4. attention_bias: whether queries, keys and values have biases."""

    model_type: ClassVar[str] = "glm4"
    norms: ClassVar[tuple[str | None, ...]] = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )

    attention_bias: bool = True

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, False, False)


FAMILY = decoder_family(Glm4Config)
