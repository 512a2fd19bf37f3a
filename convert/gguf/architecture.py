"""The columns of the table of GGUF architectures, and parts shared by all rows."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.models.family import Family

from ..tables import REQUIRED, Field
from .names import Module

# From fields and from keys (without the architecture) to derived fields.
Follows = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row of the table: one `general.architecture`.

    Attributes:
        family: The family of models.
        modules: Its tensors.
        fields: GGUF's keys, our fields, and defaults.
        constants: Fields that llama.cpp supports with one value only.
        says: Fields that are true if a tensor is present.
        allowed: Keys that may only have these values.
        ignored: Keys without effect on results.
        rotary: Whether it uses RoPE.
        partial: Whether RoPE may rotate only a part of each head.
        follows: Derives fields from other fields and, when reading, from the keys in `known`.
        known: Keys that only `follows` reads.
    """

    family: Family
    modules: tuple[Module, ...]
    fields: tuple[Field, ...]
    constants: Mapping[str, Any]
    says: Mapping[str, str]
    allowed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    rotary: bool = True
    partial: bool = False
    follows: Follows = lambda fields, data: {}
    known: frozenset[str] = frozenset()


# Fields that all architectures share.
SIZES = (
    Field("embedding_length", "hidden_size", REQUIRED),
    Field("feed_forward_length", "intermediate_size", REQUIRED),
    Field("block_count", "num_hidden_layers", REQUIRED),
    Field("attention.head_count", "num_attention_heads", REQUIRED),
    Field("attention.head_count_kv", "num_key_value_heads", None),  # as many as query heads
    Field("attention.key_length", "head_dim", None),  # embedding_length / attention.head_count
    Field("context_length", "max_position_embeddings", REQUIRED),
)
IGNORED = frozenset({"vocab_size", "attention.value_length", "rope.dimension_count"})  # see below
# Prefixes of keys that change llama.cpp's results: unknown keys that begin so are refused.
MATHEMATICS = ("attention.", "rope.", "expert", "ssm.", "wkv.", "xielu.")
ALLOWED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),  # the default, 1 / sqrt(head size)
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "interleave_moe_layer_step": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rescale_every_n_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "router_logit_softcapping": (0.0,),
    "swin_norm": (False,),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
    "use_parallel_residual": (False,),
}
