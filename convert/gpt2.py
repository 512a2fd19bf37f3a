"""GPT-2 checkpoints: the table. Conv1D matrices are `[in, out]`, ours `[out, in]`."""

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.tables import (
    COMMON_ALLOWED,
    COMMON_IGNORED,
    REQUIRED,
    Architecture,
    Field,
    divide_exactly,
    read_fields,
    refuse,
)
from jaxllm.models.gpt2 import GPT2Config

FIELDS = (
    Field("vocab_size", "vocab_size", REQUIRED),
    Field("n_embd", "hidden_size", REQUIRED),
    Field("n_inner", "intermediate_size", None),  # 4 x n_embd
    Field("n_layer", "num_hidden_layers", REQUIRED),
    Field("n_head", "num_attention_heads", REQUIRED),
    Field("n_positions", "max_position_embeddings", REQUIRED),
    Field("activation_function", "hidden_act", "gelu_new"),
    Field("layer_norm_epsilon", "norm_eps", 1e-5),
    Field("tie_word_embeddings", "tie_word_embeddings", True),
    Field("scale_attn_weights", "scale_attn_weights", True),
    Field("scale_attn_by_inverse_layer_idx", "scale_attn_by_inverse_layer_idx", False),
)


class GPT2Architecture(Architecture):
    """The table of GPT-2."""

    def parse_config(self, data: Mapping[str, Any]) -> GPT2Config:
        fields, complaints = read_fields(self, data)
        context = fields.get("max_position_embeddings")
        if data.get("n_ctx") not in (None, context):
            complaints.append(
                f"n_ctx {data['n_ctx']!r:.40} differs from n_positions {context!r:.40}"
            )
        refuse("config.json", complaints)
        head_dim = divide_exactly("hidden_size", fields, "num_attention_heads")
        if fields["intermediate_size"] is None:
            fields["intermediate_size"] = 4 * fields["hidden_size"]
        heads = fields["num_attention_heads"]
        return GPT2Config(num_key_value_heads=heads, head_dim=head_dim, **fields)


GPT2 = GPT2Architecture(
    model_type="gpt2",
    config=GPT2Config,
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    classifier="GPT2ForSequenceClassification",
    fields=FIELDS,
    allowed_values={**COMMON_ALLOWED, "layer_types": ()},
    # reorder_and_upcast_attn: attention is always in float32 here. n_ctx: a second name of
    # n_positions in older files; read_config checks that they agree.
    ignored_fields=COMMON_IGNORED
    | {
        "attn_pdrop",
        "embd_pdrop",
        "n_ctx",
        "reorder_and_upcast_attn",
        "resid_pdrop",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    conv1d=(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight",),
    buffers=(r"h\.\d+\.attn\.(bias|masked_bias)",),
    prefix="transformer.",
    writes_prefix=False,  # like the published files
)
TABLES = (GPT2,)
