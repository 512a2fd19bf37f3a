"""GLM-4.5 to 4.7 (GLM Team 2025, arXiv 2508.06471): experts after some dense layers.

A sigmoid router selects with a bias, and one expert is shared by all tokens. Half of each head is
rotated.
"""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import Positive
from jaxllm.models.moe import ExpertCount, Routing, SparseLayersConfig, moe_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(SparseLayersConfig):
    """GLM-4-MoE.

    Attributes:
        n_group, topk_group, routed_scaling_factor: `Routing.groups`, `top_groups` and `scale`.
        n_shared_experts: The shared expert's size in that of the others.
        attention_bias: Whether queries, keys and values have biases.
    """

    model_type: ClassVar[str] = "glm4_moe"
    qk_norm: ClassVar[str | None] = "each head"  # if use_qk_norm

    n_group: ExpertCount
    topk_group: ExpertCount
    n_shared_experts: ExpertCount
    routed_scaling_factor: Positive
    attention_bias: bool = False
    use_qk_norm: bool = False

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, False, False)

    @property
    def shared_expert_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def routing(self) -> Routing:
        return Routing(
            count=self.num_experts_per_tok,
            uses_sigmoid=True,
            has_bias=True,
            groups=self.n_group,
            top_groups=self.topk_group,
            normalized=self.norm_topk_prob,
            eps=1e-20,
            scale=self.routed_scaling_factor,
        )


FAMILY = dataclasses.replace(
    moe_family(Glm4MoeConfig), width_fields=("intermediate_size", "moe_intermediate_size")
)
