"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts in all layers, or in some."""

import dataclasses
from typing import Any, ClassVar, Literal

from jaxllm.config import Tokens, Width
from jaxllm.models import experts
from jaxllm.models.decoder import Decoder
from jaxllm.models.experts import MixtureConfig, family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(MixtureConfig):
    """Qwen3-MoE.

    Attributes:
        mlp_layer_types: Which layers have experts ("sparse"), of moe_intermediate_size hidden
            channels each; the others have an MLP of intermediate_size.
    """

    model_type: ClassVar[str] = "qwen3_moe"
    by_layer: ClassVar[tuple[str, ...]] = ("mlp_layer_types",)

    moe_intermediate_size: Width
    norm_topk_prob: bool
    mlp_layer_types: tuple[Literal["sparse", "dense"], ...]
    attention_bias: bool = False
    sliding_window: Tokens | None = None

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    @property
    def renormalises(self) -> bool:
        return self.norm_topk_prob

    def routed(self, layer: int) -> bool:
        return self.mlp_layer_types[layer] == "sparse"

    def form(self, layer: int) -> int:
        return self.mlp_layer_types.index(self.mlp_layer_types[layer])

    def computes(self, layer: int) -> tuple[Any, ...]:
        """Return whether the layer has experts in place of `form`; otherwise as the base class."""
        return (self.routed(layer), *super().computes(layer)[1:])

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.attention_bias, self.attention_bias, False)


class Block(experts.Block):
    """One layer."""

    config: Qwen3MoeConfig
    qk_norm = "each head"


class Qwen3Moe(Decoder):
    """The model."""

    config: Qwen3MoeConfig
    block = Block


FAMILY = dataclasses.replace(
    family(Qwen3MoeConfig, Qwen3Moe), widths=("intermediate_size", "moe_intermediate_size")
)
