"""The text model of Qwen3.5-MoE: Qwen3.5 with experts, and a gated one that all tokens share."""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import HiddenSize
from jaxllm.models import moe
from jaxllm.models.decoder import Decoder
from jaxllm.models.qwen3_5_text import LINEAR_INPUTS, Qwen3_5Config
from jaxllm.models.recurrent import RecurrentBlock, recurrent_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(moe.MoEConfig, Qwen3_5Config):
    """Qwen3.5-MoE."""

    model_type: ClassVar[str] = "qwen3_5_moe_text"

    shared_expert_intermediate_size: HiddenSize

    @property
    def shared_expert_size(self) -> int:
        return self.shared_expert_intermediate_size

    @property
    def gates_shared_expert(self) -> bool:
        return True


class Qwen3_5MoeBlock(RecurrentBlock, moe.Block):
    """A layer with attention or a gated DeltaNet, and experts."""

    config: Qwen3_5MoeConfig


class Qwen3_5MoeDecoder(Decoder):
    """Qwen3.5-MoE."""

    block = Qwen3_5MoeBlock


FAMILY = dataclasses.replace(
    recurrent_family(
        moe.moe_family(Qwen3_5MoeConfig, Qwen3_5MoeDecoder, (moe.SHARED_GATE,)), LINEAR_INPUTS
    ),
    width_fields=("intermediate_size", "shared_expert_intermediate_size"),
)
