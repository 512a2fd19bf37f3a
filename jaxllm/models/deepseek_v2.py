"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, softmax router."""

import dataclasses
from typing import ClassVar

from jaxllm.models.latent_attention import LatentMoEConfig, latent_moe_family
from jaxllm.models.moe import Routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(LatentMoEConfig):
    """DeepSeek-V2."""

    model_type: ClassVar[str] = "deepseek_v2"

    mlp_bias: bool = False

    @property
    def routing(self) -> Routing:
        return dataclasses.replace(
            super().routing, uses_sigmoid=False, has_bias=False, best_of_group=1
        )


FAMILY = latent_moe_family(DeepseekV2Config)
