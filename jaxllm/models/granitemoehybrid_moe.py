"""Granite 4 with experts, beside an MLP that all tokens share: H-Tiny and H-Small.

Hugging Face's files have the model_type of the dense models.
"""

import dataclasses
from typing import ClassVar

from jaxllm.config.model import HiddenSize
from jaxllm.models import moe
from jaxllm.models.decoder import Decoder
from jaxllm.models.granitemoehybrid import MAMBA_INPUTS, GraniteMoeHybridConfig
from jaxllm.models.mamba2 import Mamba2Block
from jaxllm.models.recurrent import recurrent_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridMoeConfig(moe.MoEConfig, GraniteMoeHybridConfig):
    """Granite 4 with experts of intermediate_size, and a shared MLP."""

    model_type: ClassVar[str] = "granitemoehybrid_moe"

    shared_intermediate_size: HiddenSize

    @property
    def shared_expert_size(self) -> int:
        return self.shared_intermediate_size


class GraniteMoeHybridMoeBlock(Mamba2Block, moe.Block):
    """A layer with attention or Mamba-2, and experts."""

    config: GraniteMoeHybridMoeConfig


class GraniteMoeHybridMoeDecoder(Decoder):
    """Granite 4 with experts."""

    block = GraniteMoeHybridMoeBlock


FAMILY = dataclasses.replace(
    recurrent_family(
        moe.moe_family(GraniteMoeHybridMoeConfig, GraniteMoeHybridMoeDecoder), MAMBA_INPUTS
    ),
    embeddings="embeddings",
    width_fields=("intermediate_size", "shared_intermediate_size"),
)
