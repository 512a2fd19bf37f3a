"""Seed-OSS checkpoints: the table."""

from jaxllm.convert.decoders import MLP_BIAS, make_table
from jaxllm.convert.tables import Field
from jaxllm.models.seed_oss import SeedOssConfig

TABLES = (
    make_table(
        "SeedOss",
        SeedOssConfig,
        MLP_BIAS,
        Field("num_key_value_heads", "num_key_value_heads", 8),
        Field("head_dim", "head_dim", 128),
        Field("max_position_embeddings", "max_position_embeddings", 524288),
        Field("attention_bias", "attention_bias", True),
        Field("attention_out_bias", "attention_out_bias", False),
        ignored_fields=frozenset({"residual_dropout"}),
    ),
)
