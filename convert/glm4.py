"""GLM-4 checkpoints: the table."""

from jaxllm.convert.decoders import (
    PARTIAL_ROTARY_FACTOR,
    make_table,
    set_rotary_share,
    write_rotary_share,
)
from jaxllm.convert.fused_layouts import FUSED_GATE_AND_UP
from jaxllm.convert.rotary_pairs import PAIRED_QUERIES_AND_KEYS
from jaxllm.convert.tables import Field
from jaxllm.models.glm4 import Glm4Config

TABLES = (
    make_table(
        "Glm4",
        Glm4Config,
        Field("num_key_value_heads", "num_key_value_heads", 2),
        Field("head_dim", "head_dim", 128),
        Field("max_position_embeddings", "max_position_embeddings", 131072),
        Field("rms_norm_eps", "norm_eps", 1.5625e-7),
        Field("attention_bias", "attention_bias", True),
        ignored_fields=frozenset({PARTIAL_ROTARY_FACTOR}),
        layouts=(*PAIRED_QUERIES_AND_KEYS, FUSED_GATE_AND_UP),
        prepare=lambda data: set_rotary_share(data, 0.5),
        finish=write_rotary_share,
    ),
)
