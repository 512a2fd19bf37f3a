"""Phi-3 checkpoints: the table, and its fused linears."""

from typing import Any

from jaxllm.convert.decoders import SLIDING_WINDOW, make_table
from jaxllm.convert.fused_layouts import FUSED_GATE_AND_UP, FusedLayout, qkv_rows
from jaxllm.convert.tables import Field
from jaxllm.errors import ConfigError
from jaxllm.models.phi3 import Phi3Config


def _finish_fields(config: Phi3Config, data: dict[str, Any]) -> dict[str, Any]:
    # transformers' class expects divisors for hidden_size / heads, whatever head_dim is.
    divisors = (data["rope_scaling"] or {}).get("short_factor")
    size = config.hidden_size // config.num_attention_heads
    if divisors is not None and config.rope.rotary_dim(size) // 2 != len(divisors):
        raise ConfigError(
            "num_attention_heads is invalid in the Hugging Face format: got"
            f" {config.num_attention_heads}, which makes heads of {size} from hidden_size"
            f" {config.hidden_size}, expected heads of {config.head_dim}, since LongRoPE has"
            f" {len(divisors)} divisors. Save the model in the native format"
        )
    if config.rope.original_max_position_embeddings is not None:
        data["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    return data


PHI3 = make_table(
    "Phi3",
    Phi3Config,
    SLIDING_WINDOW,
    Field("max_position_embeddings", "max_position_embeddings", 4096),
    Field("rms_norm_eps", "norm_eps", 1e-5),
    ignored_fields=frozenset(
        {"embd_pdrop", "original_max_position_embeddings", "partial_rotary_factor", "resid_pdrop"}
    ),
    layouts=(
        FusedLayout(
            "self_attn.qkv_proj",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            qkv_rows,
        ),
        FUSED_GATE_AND_UP,
    ),
    finish=_finish_fields,
)
TABLES = (PHI3,)
