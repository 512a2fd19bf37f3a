"""Granite checkpoints: the table."""

from jaxllm.convert.decoders import ATTENTION_BIAS, MLP_BIAS, make_table
from jaxllm.convert.tables import Field
from jaxllm.models.granite import GraniteConfig

MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
TABLES = (
    make_table(
        "Granite",
        GraniteConfig,
        ATTENTION_BIAS,
        MLP_BIAS,
        *(Field(name, name, 1.0) for name in MULTIPLIERS),
        classifier=None,
    ),
)
