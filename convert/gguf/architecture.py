"""The columns of the table of GGUF architectures, and parts shared by all rows."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxllm.convert.fused_layouts import Layout
from jaxllm.convert.gguf.names import ModuleRow
from jaxllm.convert.tables import REQUIRED, Field
from jaxllm.models.family import Family

KV_HEADS = "attention.head_count_kv"
NEXT_TOKEN_LAYERS = "nextn_predict_layers"  # further tokens' (MTP), counted as blocks
MAX_LAYERS = 1024
SILU = {"hidden_act": "silu"}
# From fields and from keys (without the architecture) to derived fields.
DeriveFields = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """A row of the table: one `general.architecture`.

    Attributes:
        family: The family of models.
        modules: Its tensors.
        fields: GGUF's keys, our fields, and defaults.
        constants: Fields that llama.cpp supports with one value only.
        tensor_flags: Fields that are true if a tensor is present.
        read_names: Returns fields that the names of the tensors decide.
        head_dim: The field of the head size that rotary settings and `attention.key_length` have.
        allowed_values: Keys that may only have these values.
        uses_rope: Whether it uses RoPE.
        partial_rotary: Whether RoPE may rotate only a part of each head.
        derive: Derives fields from other fields and, when reading, from the keys in `derive_keys`.
        derive_keys: Keys that only `derive` reads.
        truncates_yarn: Whether YaRN's correction range has whole numbers. llama.cpp always rounds
            it; False: the model was trained otherwise.
        layouts: Convert tensors whose numbers or shapes differ from ours; read in this order.
        writes_pattern: Whether the layers with a sliding window are listed in the file.
        write_keys: Returns further keys of a configuration, with values.
    """

    family: Family
    modules: tuple[ModuleRow, ...]
    fields: tuple[Field, ...]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=lambda: SILU)
    tensor_flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read_names: Callable[[Collection[str]], dict[str, Any]] = lambda names: {}
    head_dim: str = "head_dim"
    allowed_values: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    uses_rope: bool = True
    partial_rotary: bool = False
    derive: DeriveFields = lambda fields, data: {}
    derive_keys: frozenset[str] = frozenset()
    truncates_yarn: bool = True
    layouts: tuple[Layout, ...] = ()
    writes_pattern: bool = False
    write_keys: Callable[[Any], dict[str, Any]] = lambda config: {}


def layer_range(count: Any) -> range:
    """Return the layer numbers; none for an invalid count, which is refused later."""
    return range(count) if type(count) is int and count <= MAX_LAYERS else range(0)


def layer_types(count: Any, slides: Callable[[int], bool]) -> tuple[str, ...]:
    kinds = ("full_attention", "sliding_attention")
    return tuple(kinds[slides(i)] for i in layer_range(count))


def read_pattern(data: Mapping[str, Any], count: Any, period: int) -> tuple[str, ...]:
    """Return the layer types by the file's pattern, or of layers of which each `period`th is full.

    An invalid pattern gives none.
    """
    pattern = data.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, tuple) and len(pattern) == count:  # per layer: whether it has a window
        return layer_types(count, lambda i: pattern[i])
    if type(pattern) is int and pattern > 0:
        return layer_types(count, lambda i: (i + 1) % pattern != 0)
    return ()


# Fields that all architectures share.
SIZE_FIELDS = (
    Field("embedding_length", "hidden_size", REQUIRED),
    Field("feed_forward_length", "intermediate_size", REQUIRED),
    Field("block_count", "num_hidden_layers", REQUIRED),
    Field("attention.head_count", "num_attention_heads", REQUIRED),
    Field(KV_HEADS, "num_key_value_heads", None),  # as many as query heads
    Field("attention.key_length", "head_dim", None),  # embedding_length / attention.head_count
    Field("context_length", "max_position_embeddings", REQUIRED),
)
RMS_NORM = (*SIZE_FIELDS, Field("attention.layer_norm_rms_epsilon", "norm_eps", REQUIRED))
LAYER_NORM = (*SIZE_FIELDS, Field("attention.layer_norm_epsilon", "norm_eps", REQUIRED))
MULTIPLIERS = (  # Granite's
    Field("attention.scale", "attention_multiplier", None),  # 1 / sqrt(head_dim)
    Field("embedding_scale", "embedding_multiplier", 1.0),
    Field("residual_scale", "residual_multiplier", 1.0),
    Field("logit_scale", "logits_scaling", 1.0),  # what logits are divided by
)
EXPERTS = (
    Field("expert_count", "num_experts", REQUIRED),
    Field("expert_used_count", "num_experts_per_tok", REQUIRED),
)
RECURRENT_LAYERS = "attention.recurrent_layers"
DENSE_LAYERS = "leading_dense_block_count"
# Keys of expert routing, with the values that match what llama.cpp computes.
ROUTING: dict[str, tuple[Any, ...]] = {
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
}

IGNORED = frozenset({"vocab_size", "attention.value_length", "rope.dimension_count"})  # see below
# Prefixes of keys that change llama.cpp's results: unknown keys that begin so are refused.
MATH_PREFIXES = ("attention.", "rope.", "expert", "shortconv.", "ssm.", "wkv.", "xielu.")
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
    NEXT_TOKEN_LAYERS: (0,),
    "pooling_type": (0,),
    "rescale_every_n_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "router_logit_softcapping": (0.0,),
    "swin_norm": (False,),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
    "use_parallel_residual": (False,),
}


def without_next_tokens(count: Any, data: Mapping[str, Any]) -> Any:
    """Return the number of layers without those of further tokens, which are counted as blocks."""
    further = data.get(NEXT_TOKEN_LAYERS, 0)
    if type(count) is int and type(further) is int and 0 < further < count:
        return count - further
    return count


def derive_dense_layers(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Exclude the layers of further tokens; the first layers are dense."""
    count = without_next_tokens(fields["num_hidden_layers"], data)
    dense = data.get(DENSE_LAYERS, fields.get("mlp_layer_types", ()).count("dense"))
    kinds = ("sparse", "dense")
    types = tuple(kinds[type(dense) is int and i < dense] for i in layer_range(count))
    return {"num_hidden_layers": count, "mlp_layer_types": types}
