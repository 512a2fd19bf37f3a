"""What an architecture's row is made of, and what all rows share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.models.family import Family

from ..tables import REQUIRED, Field
from .names import Module

# Of fields, and of keys without the architecture; what follows from them.
Follows = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A `general.architecture`.

    family: the models that it is. modules: its tensors. fields: their key, our field, what a
    missing one means. constants: fields that have one value here, since llama.cpp computes nothing
    else. follows: more of these, which follow from fields and, as they are read, from keys that
    are no field. says: fields that a tensor's presence decides. allowed: keys of one meaning only.
    ignored: without effect on what a model computes. known: keys that follows reads. partial:
    whether heads may be turned in part.
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


# Ours from theirs where they agree in all that is read here.
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
# Where llama.cpp has what changes the mathematics: unknown keys that begin so are refused.
MATHEMATICS = ("attention.", "rope.", "expert", "ssm.", "wkv.", "xielu.")
ALLOWED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),  # none of its own
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
