"""OLMo 2 checkpoints: the table."""

from jaxllm.convert.decoders import ATTENTION_BIAS, make_table
from jaxllm.convert.tables import Field
from jaxllm.models.olmo2 import Olmo2Config

TABLES = (
    make_table("Olmo2", Olmo2Config, ATTENTION_BIAS, Field("rms_norm_eps", "norm_eps", 1e-5)),
)
