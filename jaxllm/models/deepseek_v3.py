"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv 2412.19437): latent attention, sigmoid router."""

import dataclasses
from typing import ClassVar

from jaxllm.models.latent_attention import LatentMoEConfig, latent_moe_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(LatentMoEConfig):
    """DeepSeek-V3."""

    model_type: ClassVar[str] = "deepseek_v3"


FAMILY = latent_moe_family(DeepseekV3Config)
