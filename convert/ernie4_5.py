"""ERNIE 4.5 checkpoints: the table of dense models."""

from jaxllm.convert.decoders import make_table
from jaxllm.convert.rotary_pairs import PAIRED_QUERIES_AND_KEYS
from jaxllm.convert.tables import Field
from jaxllm.models.ernie4_5 import Ernie45Config

TABLES = (
    make_table(
        "Ernie4_5",
        Ernie45Config,
        Field("num_key_value_heads", "num_key_value_heads", 2),
        Field("head_dim", "head_dim", 128),
        Field("max_position_embeddings", "max_position_embeddings", 131072),
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field("tie_word_embeddings", "tie_word_embeddings", True),
        Field("use_bias", "use_bias", False),
        architectures=("Ernie4_5ForCausalLM", "Ernie4_5Model", "Ernie4_5_ForCausalLM"),
        classifier=None,
        layouts=PAIRED_QUERIES_AND_KEYS,
        theta=500000.0,
    ),
)
