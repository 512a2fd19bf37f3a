"""LFM2 checkpoints: the table, and the names of its modules."""

from collections.abc import Mapping
from typing import Any

from jaxllm.config.model import HiddenSize, Positive
from jaxllm.convert.decoders import LAYER_TYPES, make_table
from jaxllm.convert.fused_layouts import RenamedLayout
from jaxllm.convert.tables import Field
from jaxllm.models.lfm2 import Lfm2Config

_LAYER = "layers.*."
NAMES = {
    "norm": "embedding_norm",
    f"{_LAYER}input_layernorm": f"{_LAYER}operator_norm",
    f"{_LAYER}post_attention_layernorm": f"{_LAYER}ffn_norm",
    f"{_LAYER}self_attn.o_proj": f"{_LAYER}self_attn.out_proj",
    f"{_LAYER}self_attn.q_norm": f"{_LAYER}self_attn.q_layernorm",
    f"{_LAYER}self_attn.k_norm": f"{_LAYER}self_attn.k_layernorm",
    f"{_LAYER}mlp.gate_proj": f"{_LAYER}feed_forward.w1",
    f"{_LAYER}mlp.up_proj": f"{_LAYER}feed_forward.w3",
    f"{_LAYER}mlp.down_proj": f"{_LAYER}feed_forward.w2",
}
# Fields of published files that transformers does not read.
UNUSED = frozenset({
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
    "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out",
    "conv_use_xavier_init", "num_heads", "theta", "use_pos_enc",
})  # fmt: skip
# Fields that only give the width of the MLP.
WIDTH = ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")
# Common fields that the families lack, and their own.
ABSENT = ("rms_norm_eps", "hidden_act", "head_dim")
CONV_FIELDS = (
    Field("conv_L_cache", "conv_L_cache", 3),
    Field("conv_bias", "conv_bias", False),
    Field("norm_eps", "norm_eps", 1e-5),
    Field("max_position_embeddings", "max_position_embeddings", 128000),
    Field("tie_word_embeddings", "tie_word_embeddings", True),
)


def _resolve(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    """Derive missing layer_types from the numbers of the layers with attention; and the width."""
    count, given = fields["num_hidden_layers"], fields.pop("full_attn_idxs")
    if fields["layer_types"] is None:
        full = range(count) if given is None else given
        fields["layer_types"] = tuple(
            "full_attention" if i in full else "conv" for i in range(count)
        )
    fields["hidden_act"] = "silu"
    adjusts, factor, multiple = (fields.pop(name) for name in WIDTH)
    if adjusts:
        width = int(factor * int(2 * fields["intermediate_size"] / 3))
        fields["intermediate_size"] = -(-width // multiple) * multiple


def _finish(config: Lfm2Config, data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "block_auto_adjust_ff_dim": False}


TABLES = (
    make_table(
        "Lfm2",
        Lfm2Config,
        LAYER_TYPES,
        Field("full_attn_idxs", "full_attn_idxs", None, tuple[int, ...]),
        *CONV_FIELDS,
        Field("block_auto_adjust_ff_dim", "block_auto_adjust_ff_dim", True, bool),
        Field("block_ffn_dim_multiplier", "block_ffn_dim_multiplier", 1.0, Positive),
        Field("block_multiple_of", "block_multiple_of", 256, HiddenSize),
        omit=ABSENT,
        aliases={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
        ignored_fields=UNUSED,
        layouts=(RenamedLayout(NAMES),),
        derive=_resolve,
        finish=_finish,
        theta=1e6,
        classifier=None,
    ),
)
