"""Mixtral (Jiang et al. 2024): Mistral with experts in place of MLPs."""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import TokenCount
from jaxllm.models.moe import MoEConfig, moe_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(MoEConfig):
    """Mixtral. intermediate_size: hidden channels of each expert."""

    model_type: ClassVar[str] = "mixtral"

    sliding_window: TokenCount | None = None


FAMILY = moe_family(MixtralConfig)
