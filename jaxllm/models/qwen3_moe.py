"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts in all layers, or in some."""

import dataclasses
from typing import Any, ClassVar, Literal

from jaxllm.config.model import HiddenSize, TokenCount
from jaxllm.models.moe import MoEConfig, moe_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(MoEConfig):
    """Qwen3-MoE.

    Attributes:
        mlp_layer_types: Which layers have experts ("sparse"), of moe_intermediate_size hidden
            channels each; the others have an MLP of intermediate_size.
    """

    model_type: ClassVar[str] = "qwen3_moe"
    qk_norm: ClassVar[str | None] = "each head"
    per_layer_fields: ClassVar[tuple[str, ...]] = ("mlp_layer_types",)

    moe_intermediate_size: HiddenSize
    norm_topk_prob: bool
    mlp_layer_types: tuple[Literal["sparse", "dense"], ...]
    attention_bias: bool = False
    sliding_window: TokenCount | None = None

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    @property
    def normalize_topk(self) -> bool:
        return self.norm_topk_prob

    def is_moe_layer(self, layer: int) -> bool:
        return self.mlp_layer_types[layer] == "sparse"

    def layer_template(self, layer: int) -> int:
        return self.mlp_layer_types.index(self.mlp_layer_types[layer])

    def layer_signature(self, layer: int) -> tuple[Any, ...]:
        """Return whether the layer has experts in place of `form`; otherwise as the base class."""
        return (self.is_moe_layer(layer), *super().layer_signature(layer)[1:])


FAMILY = dataclasses.replace(
    moe_family(Qwen3MoeConfig),
    width_fields=("intermediate_size", "moe_intermediate_size"),
)
