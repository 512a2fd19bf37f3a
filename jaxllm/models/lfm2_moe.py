"""LFM2-MoE (Liquid AI 2025, arXiv 2511.23404): LFM2 with experts after some dense layers."""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import Positive
from jaxllm.models import moe
from jaxllm.models.decoder import Decoder
from jaxllm.models.lfm2 import Lfm2Config
from jaxllm.models.recurrent import ShortConvBlock, recurrent_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(moe.SparseLayersConfig, Lfm2Config):
    """LFM2-MoE.

    Attributes:
        use_expert_bias, routed_scaling_factor: `Routing.has_bias` and `scale`.
    """

    model_type: ClassVar[str] = "lfm2_moe"
    per_layer_fields: ClassVar[tuple[str, ...]] = ("layer_types", "mlp_layer_types")

    use_expert_bias: bool = True
    routed_scaling_factor: Positive = 1.0

    @property
    def routing(self) -> moe.Routing:
        return moe.Routing(
            count=self.num_experts_per_tok,
            uses_sigmoid=True,
            has_bias=self.use_expert_bias,
            normalized=self.norm_topk_prob,
            eps=1e-6,
            scale=self.routed_scaling_factor,
        )


class Lfm2MoeBlock(ShortConvBlock, moe.Block):
    """A layer with attention or a short convolution, and an MLP or experts."""

    config: Lfm2MoeConfig


class Lfm2MoeDecoder(Decoder):
    """LFM2-MoE."""

    block = Lfm2MoeBlock


FAMILY = dataclasses.replace(
    recurrent_family(moe.moe_family(Lfm2MoeConfig, Lfm2MoeDecoder), ("conv.in_proj",)),
    width_fields=("intermediate_size", "moe_intermediate_size"),
)
