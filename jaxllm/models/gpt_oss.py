"""gpt-oss (OpenAI 2025): experts in all layers, every other layer with a window, and sinks."""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import Positive
from jaxllm.models.family import ParallelLinear
from jaxllm.models.hybrid_attention import HybridAttentionConfig
from jaxllm.models.moe import MoEConfig, moe_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoEConfig, HybridAttentionConfig):
    """gpt-oss.

    Attributes:
        swiglu_alpha, swiglu_limit: See `clamped_swiglu`.
    """

    model_type: ClassVar[str] = "gpt_oss"
    router: ClassVar[str] = "router"

    attention_bias: bool = True
    swiglu_alpha: Positive
    swiglu_limit: Positive

    @property
    def attention_sinks(self) -> bool:
        return True

    @property
    def expert_bias(self) -> bool:
        return True

    @property
    def clamped_swiglu(self) -> tuple[float, float] | None:
        return self.swiglu_alpha, self.swiglu_limit


_ROW = moe_family(GptOssConfig)
FAMILY = dataclasses.replace(
    _ROW, head_linears=(*_ROW.head_linears, ParallelLinear("self_attn.sinks", 0))
)
