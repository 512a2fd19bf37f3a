"""GLM-4.5 to 4.7 (GLM Team 2025, arXiv 2508.06471): experts after some dense layers.

A sigmoid router selects with a bias, and one expert is shared by all tokens. Half of each head is
rotated.
"""

import dataclasses
from typing import ClassVar

from jaxllm.models.moe import GroupedExpertsConfig, moe_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(GroupedExpertsConfig):
    """GLM-4-MoE.

    Attributes:
        attention_bias: Whether queries, keys and values have biases.
    """

    model_type: ClassVar[str] = "glm4_moe"
    qk_norm: ClassVar[str | None] = "each head"  # if use_qk_norm

    attention_bias: bool = False
    use_qk_norm: bool = False

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, False, False)


FAMILY = dataclasses.replace(
    moe_family(Glm4MoeConfig), width_fields=("intermediate_size", "moe_intermediate_size")
)
