"""MiniCPM3 checkpoints: the table."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.decoders import MLP_BIAS, make_table
from jaxllm.convert.deepseek_v3 import derive_cache, latent_fields, write_heads
from jaxllm.convert.latent_layouts import HeadStackLayout
from jaxllm.convert.tables import Field, divide_exactly
from jaxllm.models.minicpm3 import MiniCPM3Config


def _derive(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    if fields["v_head_dim"] is None:
        fields["v_head_dim"] = divide_exactly("hidden_size", fields, "num_attention_heads")
    if "scale_depth" in data and data["scale_depth"] is None:  # not the default: no factor
        fields["scale_depth"] = fields["num_hidden_layers"] ** 0.5
    if "dim_model_base" in data and data["dim_model_base"] is None:
        fields["dim_model_base"] = fields["hidden_size"]
    derive_cache(fields, complaints, data)


TABLES = (
    make_table(
        "MiniCPM3",
        MiniCPM3Config,
        *latent_fields(768, 256, 64, 32, None),
        MLP_BIAS,
        Field("max_position_embeddings", "max_position_embeddings", 32768),
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field("tie_word_embeddings", "tie_word_embeddings", True),
        Field("scale_emb", "scale_emb", 12),
        Field("scale_depth", "scale_depth", 1.4),
        Field("dim_model_base", "dim_model_base", 256),
        layouts=(HeadStackLayout(),),
        derive=_derive,
        finish=write_heads,
    ),
)
