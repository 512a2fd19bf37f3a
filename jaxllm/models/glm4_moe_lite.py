"""GLM-4.7-Flash: DeepSeek-V3's layers."""

import dataclasses
from typing import ClassVar

from jaxllm.models.latent_attention import LatentMoEConfig, latent_moe_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(LatentMoEConfig):
    """GLM-4.7-Flash."""

    model_type: ClassVar[str] = "glm4_moe_lite"


FAMILY = latent_moe_family(Glm4MoeLiteConfig)
