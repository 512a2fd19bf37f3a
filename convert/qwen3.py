"""Qwen3 checkpoints: the table."""

from jaxllm.convert.decoders import ATTENTION_BIAS
from jaxllm.convert.qwen2 import make_qwen_table
from jaxllm.convert.tables import Field
from jaxllm.models.qwen3 import Qwen3Config

HEAD_DIM = Field("head_dim", "head_dim", 128)
TABLES = (make_qwen_table("Qwen3", Qwen3Config, HEAD_DIM, ATTENTION_BIAS),)
