"""DeepSeek-V3 and R1 checkpoints: the table, and fields that models with latent attention share."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from jaxllm.convert.decoders import ATTENTION_BIAS, DecoderArchitecture, make_table
from jaxllm.convert.experts import ROUTER_FIELDS, ExpertLayout, NextTokenLayers
from jaxllm.convert.glm4_moe import DENSE, resolve_dense_layers, write_dense_layers
from jaxllm.convert.latent_layouts import PAIRED_LATENTS, HeadStackLayout
from jaxllm.convert.tables import Field
from jaxllm.models.deepseek_v3 import DeepseekV3Config
from jaxllm.models.latent_attention import LatentConfig, LatentMoEConfig

QUERY_RANK = "q_lora_rank"


def latent_fields(q: int, kv: int, nope: int, rope: int, v: int | None) -> tuple[Field, ...]:
    """Return the fields of latent attention, with their defaults; v None: it is derived."""
    return (
        ATTENTION_BIAS,
        Field(QUERY_RANK, QUERY_RANK, q),
        Field("kv_lora_rank", "kv_lora_rank", kv),
        Field("qk_nope_head_dim", "qk_nope_head_dim", nope),
        Field("qk_rope_head_dim", "qk_rope_head_dim", rope),
        Field("v_head_dim", "v_head_dim", v),
        Field("head_dim", "head_dim", rope),  # this and the next: see `derive_cache`
        Field("qk_head_dim", "qk_head_dim", None),
    )


def derive_cache(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    """Derive the cache's head; and check the fields that the others imply."""
    nope, rope = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
    heads = fields["num_attention_heads"]
    implied = {"head_dim": rope, "num_key_value_heads": heads, "qk_head_dim": nope + rope}
    for name, value in implied.items():
        fields.pop(name)
        if data.get(name) not in (None, value):
            complaints.append(f"{name} must be {value}, got {data[name]!r:.40}")
    if QUERY_RANK in data and data[QUERY_RANK] is None:  # not the default
        fields[QUERY_RANK] = None
    fields["head_dim"], fields["num_key_value_heads"] = fields["kv_lora_rank"] + rope, 1


def write_heads(config: LatentConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Write the heads that transformers expands latents to."""
    heads, rope = config.num_attention_heads, config.qk_rope_head_dim
    return {**data, "num_key_value_heads": heads, "head_dim": rope}


def derive_moe(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    """Derive the cache's head, and which layers have experts."""
    resolve_dense_layers(fields, complaints, data)
    derive_cache(fields, complaints, data)


def write_moe(config: LatentMoEConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Write which layers have experts, and the number of key heads."""
    return write_heads(config, write_dense_layers(config, data))


def make_moe_table(
    architecture: str,
    config: type[LatentMoEConfig],
    *fields: Field,
    ignored_fields: frozenset[str] = frozenset(),
    allowed_values: Mapping[str, tuple[Any, ...]] | None = None,
    **options: Any,
) -> DecoderArchitecture:
    """Return the table of a family with latent attention and experts; arguments: `make_table`."""
    return make_table(
        architecture,
        config,
        *fields,
        allowed_values={
            "rope_interleave": (True,),
            "moe_layer_freq": (1,),
            **(allowed_values or {}),
        },
        ignored_fields=ROUTER_FIELDS
        | {"aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers", "seq_aux"}
        | ignored_fields,
        layouts=(NextTokenLayers(), *PAIRED_LATENTS, HeadStackLayout(), ExpertLayout("mlp")),
        **{"derive": derive_moe, "finish": write_moe, **options},
    )


V3_FIELDS = (
    Field("n_shared_experts", "n_shared_experts", 1),
    Field("norm_topk_prob", "norm_topk_prob", True),
)
V3_VALUES = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}

TABLES = (
    make_moe_table(
        "DeepseekV3",
        DeepseekV3Config,
        *latent_fields(1536, 512, 128, 64, 128),
        *V3_FIELDS,
        Field("n_routed_experts", "num_experts", 256),
        Field(DENSE, DENSE, 3, Annotated[int, Meta(ge=0)]),  # read into mlp_layer_types
        Field("max_position_embeddings", "max_position_embeddings", 4096),
        Field("moe_intermediate_size", "moe_intermediate_size", 2048),
        Field("num_experts_per_tok", "num_experts_per_tok", 8),
        Field("n_group", "n_group", 8),
        Field("topk_group", "topk_group", 4),
        Field("routed_scaling_factor", "routed_scaling_factor", 2.5),
        allowed_values=V3_VALUES,
        aliases={"num_local_experts": "n_routed_experts"},
    ),
)
