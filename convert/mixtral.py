"""Mixtral checkpoints: the table."""

from jaxllm.convert.decoders import SLIDING_WINDOW, make_table
from jaxllm.convert.experts import ROUTER_FIELDS, ExpertLayout
from jaxllm.convert.tables import Field
from jaxllm.models.mixtral import MixtralConfig

MIXTRAL = make_table(
    "Mixtral",
    MixtralConfig,
    SLIDING_WINDOW,
    Field("num_key_value_heads", "num_key_value_heads", 8),
    Field("max_position_embeddings", "max_position_embeddings", 4096 * 32),
    Field("rms_norm_eps", "norm_eps", 1e-5),
    Field("num_local_experts", "num_experts", 8),
    Field("num_experts_per_tok", "num_experts_per_tok", 2),
    ignored_fields=ROUTER_FIELDS,
    aliases={"num_experts": "num_local_experts"},
    layouts=(ExpertLayout("block_sparse_moe", ("w1", "w3", "w2")),),
    theta=1e6,
)
TABLES = (MIXTRAL,)
