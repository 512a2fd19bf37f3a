"""GGUF's tensor names and row orders: a table with a row per module.

llama.cpp's names are uniform, so families share rows. For the architecture `llama` its RoPE rotates
adjacent pairs, ours the two halves of a head. `interleave_rows` gives the row order that converts
between them; it works for every tensor type, since a row is whole blocks.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.convert.fused_layouts import gate_up_rows, qkv_rows
from jaxllm.convert.latent_layouts import latent_rows, query_rows
from jaxllm.convert.rotary_pairs import head_rows

RowOrder = Callable[[ModelConfig], np.ndarray]  # our row for each of GGUF's
RowRange = Callable[[ModelConfig], tuple[int, int, int]]  # a tensor's rows: first, end, total


class ModuleRow(NamedTuple):
    """A module, or one of its parameters: our path and GGUF's name, with `*` for the layer number.

    Attributes:
        row_order: Our row for each row in GGUF; None: the same order.
        weight_offset: The number added to weights in GGUF (1 for norms stored as 1 + w).
        always_float32: Whether it is always written in F32, like llama.cpp does.
        row_range: The rows of this module in a tensor that fuses several.
        is_read_only: Whether it is written by another row.
    """

    path: str
    tensor: str
    row_order: RowOrder | None = None
    weight_offset: float = 0.0
    always_float32: bool = False
    row_range: RowRange | None = None
    is_read_only: bool = False


class MatchedParam(NamedTuple):
    """A parameter: our path, its GGUF name, and its module."""

    path: str
    name: str
    module: ModuleRow


def interleave_rows(heads: str) -> RowOrder:
    """Return the order that interleaves the two rotated halves of each head.

    It is `LlamaModel.permute`, which llama.cpp's converter applies to queries and keys.

    Args:
        heads: The config field with the head count.
    """

    rows = head_rows(heads)
    return lambda config: np.argsort(rows(config))


def _fuse_rows(
    rows: Callable[[ModelConfig], tuple[int, ...]], tensor: str, *paths: str
) -> tuple[ModuleRow, ...]:
    """Return modules that GGUF fuses in one tensor. rows: the row count of each module."""

    def make_row_range(number: int) -> RowRange:
        def part(config: ModelConfig) -> tuple[int, int, int]:
            counts = rows(config)
            begin = sum(counts[:number])
            return begin, begin + counts[number], sum(counts)

        return part

    return tuple(
        ModuleRow(name, tensor, row_range=make_row_range(i)) for i, name in enumerate(paths)
    )


_ATTENTION, _MLP = "layers.*.self_attn", "layers.*.mlp"
_QUERIES, _KEYS = interleave_rows("num_attention_heads"), interleave_rows("num_key_value_heads")
_EMBEDDINGS = (
    ModuleRow("embed_tokens", "token_embd"),
    ModuleRow("norm", "output_norm"),
    ModuleRow("lm_head", "output"),
)
_QKVO = (
    ModuleRow(f"{_ATTENTION}.q_proj", "blk.*.attn_q"),
    ModuleRow(f"{_ATTENTION}.k_proj", "blk.*.attn_k"),
    ModuleRow(f"{_ATTENTION}.v_proj", "blk.*.attn_v"),
    ModuleRow(f"{_ATTENTION}.o_proj", "blk.*.attn_output"),
)
_INTERLEAVED_QKVO = (
    _QKVO[0]._replace(row_order=_QUERIES),
    _QKVO[1]._replace(row_order=_KEYS),
    *_QKVO[2:],
)
_QK_NORMS = (
    ModuleRow(f"{_ATTENTION}.q_norm", "blk.*.attn_q_norm"),
    ModuleRow(f"{_ATTENTION}.k_norm", "blk.*.attn_k_norm"),
)
_NORMS = (
    ModuleRow("layers.*.input_layernorm", "blk.*.attn_norm"),
    ModuleRow("layers.*.post_attention_layernorm", "blk.*.ffn_norm"),
)
_GATED_MLP = (
    ModuleRow(f"{_MLP}.gate_proj", "blk.*.ffn_gate"),
    ModuleRow(f"{_MLP}.up_proj", "blk.*.ffn_up"),
    ModuleRow(f"{_MLP}.down_proj", "blk.*.ffn_down"),
)
_EXPERTS = (
    ModuleRow(f"{_MLP}.gate", "blk.*.ffn_gate_inp", always_float32=True),
    ModuleRow(f"{_MLP}.experts.gate_proj", "blk.*.ffn_gate_exps"),
    ModuleRow(f"{_MLP}.experts.up_proj", "blk.*.ffn_up_exps"),
    ModuleRow(f"{_MLP}.experts.down_proj", "blk.*.ffn_down_exps"),
)
_SINKS = ModuleRow(f"{_ATTENTION}.sinks", "blk.*.attn_sinks")
_POST_NORMS = (
    ModuleRow("layers.*.post_attention_layernorm", "blk.*.post_attention_norm"),
    ModuleRow("layers.*.post_feedforward_layernorm", "blk.*.post_ffw_norm"),
)
_PRE_POST_NORMS = (
    ModuleRow("layers.*.input_layernorm", "blk.*.attn_norm"),
    ModuleRow("layers.*.pre_feedforward_layernorm", "blk.*.ffn_norm"),
    *_POST_NORMS,
)


def _offset_norms(modules: tuple[ModuleRow, ...]) -> tuple[ModuleRow, ...]:
    """Return modules with norms stored as 1 + w, like llama.cpp's converter for Gemma does.

    The model multiplies by exactly the stored x: 1 + (x - 1) = x in float32 for x >= 1/2, and
    below that x - 1 is exact if x was computed as 1 + w. w itself is recovered if 1 + w was exact:
    for |w| >= 2^-16 in bfloat16 and >= 2^-13 in float16.
    """
    return tuple(m._replace(weight_offset=1.0) if "norm" in m.tensor else m for m in modules)


# In these llama.cpp rotates adjacent pairs, so query and key rows are permuted: its converter does
# this for all subclasses of its `LlamaModel` (Mistral, Mixtral, Granite, SmolLM3).
LLAMA = (*_EMBEDDINGS, *_NORMS, *_INTERLEAVED_QKVO, *_GATED_MLP)
MIXTRAL = (*_EMBEDDINGS, *_NORMS, *_INTERLEAVED_QKVO, *_EXPERTS)
# In all others it rotates the halves of a head, like jaxllm.
QWEN2 = (*_EMBEDDINGS, *_NORMS, *_QKVO, *_GATED_MLP)
QWEN3 = (*QWEN2, *_QK_NORMS)
_SHARED_EXPERT = tuple(
    ModuleRow(f"{_MLP}.shared_experts.{x}_proj", f"blk.*.ffn_{x}_shexp")
    for x in ("gate", "up", "down")
)
_SELECTION = ModuleRow(f"{_MLP}.selection", "blk.*.exp_probs_b")
GLM4_MOE = (
    *_EMBEDDINGS,
    _NORMS[0],
    _POST_NORMS[0],
    *_QKVO,
    *_QK_NORMS,
    *_GATED_MLP,
    *_EXPERTS,
    *_SHARED_EXPERT,
    _SELECTION,
)
_LATENT_QUERIES, _LATENTS = (
    lambda config: np.argsort(query_rows(config)),
    lambda config: np.argsort(latent_rows(config)),
)
LATENT_MOE = (  # pairs, as in Hugging Face's files
    *_EMBEDDINGS,
    *_NORMS,
    ModuleRow(f"{_ATTENTION}.q_proj", "blk.*.attn_q", row_order=_LATENT_QUERIES),
    ModuleRow(f"{_ATTENTION}.q_a_proj", "blk.*.attn_q_a"),
    ModuleRow(f"{_ATTENTION}.q_a_layernorm", "blk.*.attn_q_a_norm"),
    ModuleRow(f"{_ATTENTION}.q_b_proj", "blk.*.attn_q_b", row_order=_LATENT_QUERIES),
    ModuleRow(f"{_ATTENTION}.kv_a_proj_with_mqa", "blk.*.attn_kv_a_mqa", row_order=_LATENTS),
    ModuleRow(f"{_ATTENTION}.kv_a_layernorm", "blk.*.attn_kv_a_norm"),
    ModuleRow(f"{_ATTENTION}.k_b_proj", "blk.*.attn_k_b"),
    ModuleRow(f"{_ATTENTION}.v_b_proj", "blk.*.attn_v_b"),
    _QKVO[3],
    *_GATED_MLP,
    *_EXPERTS,
    *_SHARED_EXPERT,
    _SELECTION,
)
_DELTA = "layers.*.linear_attn"
QWEN3_5 = (
    *_offset_norms((*_EMBEDDINGS, _NORMS[0], _POST_NORMS[0], *_QK_NORMS)),
    *_QKVO,
    *_GATED_MLP,
    ModuleRow(f"{_DELTA}.in_proj_qkv", "blk.*.attn_qkv"),
    ModuleRow(f"{_DELTA}.in_proj_z", "blk.*.attn_gate"),
    ModuleRow(f"{_DELTA}.in_proj_b", "blk.*.ssm_beta"),
    ModuleRow(f"{_DELTA}.in_proj_a", "blk.*.ssm_alpha"),
    ModuleRow(f"{_DELTA}.conv1d", "blk.*.ssm_conv1d", always_float32=True),
    ModuleRow(f"{_DELTA}.A_log", "blk.*.ssm_a"),
    ModuleRow(f"{_DELTA}.dt_bias", "blk.*.ssm_dt.bias"),
    ModuleRow(f"{_DELTA}.norm", "blk.*.ssm_norm"),
    ModuleRow(f"{_DELTA}.out_proj", "blk.*.ssm_out"),
)
QWEN3_5_MOE = (
    *QWEN3_5,
    *_EXPERTS,
    *_SHARED_EXPERT,
    ModuleRow(f"{_MLP}.shared_expert_gate", "blk.*.ffn_gate_inp_shexp", always_float32=True),
)
QWEN3_NEXT = (
    *(row for row in QWEN3_5_MOE if not row.path.endswith(("in_proj_b", "in_proj_a"))),
    ModuleRow(f"{_DELTA}.in_proj_ba", "blk.*.ssm_ba"),
)
LFM2 = (
    ModuleRow("embed_tokens", "token_embd"),
    ModuleRow("norm", "token_embd_norm"),  # applied at the end
    ModuleRow("lm_head", "output"),
    *_NORMS,
    *_QKVO,
    *_QK_NORMS,
    *_GATED_MLP,
    ModuleRow("layers.*.conv.in_proj", "blk.*.shortconv.in_proj"),
    ModuleRow("layers.*.conv.conv", "blk.*.shortconv.conv", always_float32=True),
    ModuleRow("layers.*.conv.out_proj", "blk.*.shortconv.out_proj"),
)
LFM2_MOE = (*LFM2, *_EXPERTS, _SELECTION)
_MAMBA = "layers.*.mamba"
GRANITE_HYBRID = (
    *LLAMA,
    ModuleRow(f"{_MAMBA}.in_proj", "blk.*.ssm_in"),
    ModuleRow(f"{_MAMBA}.conv1d", "blk.*.ssm_conv1d", always_float32=True),
    ModuleRow(f"{_MAMBA}.A_log", "blk.*.ssm_a", always_float32=True),
    ModuleRow(f"{_MAMBA}.D", "blk.*.ssm_d", always_float32=True),
    ModuleRow(f"{_MAMBA}.dt_bias", "blk.*.ssm_dt.bias"),
    ModuleRow(f"{_MAMBA}.norm", "blk.*.ssm_norm", always_float32=True),
    ModuleRow(f"{_MAMBA}.out_proj", "blk.*.ssm_out"),
)
GRANITE_HYBRID_MOE = (
    *(row for row in GRANITE_HYBRID if row not in _GATED_MLP),
    *_EXPERTS,
    *_SHARED_EXPERT,
)
QWEN3_MOE = (*_EMBEDDINGS, *_NORMS, *_QKVO, *_QK_NORMS, *_EXPERTS)
GPT_OSS = (
    *_EMBEDDINGS,
    _NORMS[0],
    _POST_NORMS[0],
    *_QKVO,
    _SINKS,
    _EXPERTS[0]._replace(path=f"{_MLP}.router"),
    *_EXPERTS[1:],
)
GEMMA2 = _offset_norms((*_EMBEDDINGS[:2], *_PRE_POST_NORMS, *_QKVO, *_GATED_MLP))  # always tied
GEMMA3 = _offset_norms((*_EMBEDDINGS, *_PRE_POST_NORMS, *_QKVO, *_QK_NORMS, *_GATED_MLP))


def _expert_rows(config: Any) -> tuple[int, int]:
    return (config.expert_size,) * 2


_MOE = "layers.*.moe"
GEMMA4 = (
    *_EMBEDDINGS,
    *_PRE_POST_NORMS,
    *_QKVO,
    *_QK_NORMS,
    *_GATED_MLP,
    ModuleRow("embed_tokens_per_layer", "per_layer_token_embd"),
    ModuleRow("per_layer_model_projection", "per_layer_model_proj"),
    ModuleRow("per_layer_projection_norm", "per_layer_proj_norm"),
    ModuleRow("layers.*.per_layer_input_gate", "blk.*.inp_gate"),
    ModuleRow("layers.*.per_layer_projection", "blk.*.proj"),
    ModuleRow("layers.*.post_per_layer_input_norm", "blk.*.post_norm"),
    ModuleRow("layers.*.layer_scalar", "blk.*.layer_output_scale.weight"),
    ModuleRow("layers.*.pre_feedforward_layernorm_2", "blk.*.pre_ffw_norm_2"),
    *(
        ModuleRow(f"layers.*.post_feedforward_layernorm_{i}", f"blk.*.post_ffw_norm_{i}")
        for i in (1, 2)
    ),
    ModuleRow(f"{_MOE}.scale", "blk.*.ffn_gate_inp.scale"),
    ModuleRow(f"{_MOE}.per_expert_scale", "blk.*.ffn_down_exps.scale"),
    _EXPERTS[0]._replace(path=f"{_MOE}.proj"),
    *(row._replace(path=row.path.replace(_MLP, _MOE)) for row in _EXPERTS[1:]),
    *(
        row._replace(is_read_only=True)
        for row in _fuse_rows(
            _expert_rows,
            "blk.*.ffn_gate_up_exps",
            *(f"{_MOE}.experts.{x}_proj" for x in ("gate", "up")),
        )
    ),
)
EXAONE4 = (*_EMBEDDINGS, *_POST_NORMS, *_QKVO, *_QK_NORMS, *_GATED_MLP)
SEED_OSS = (*_EMBEDDINGS, _NORMS[0], _POST_NORMS[0], *_QKVO, *_GATED_MLP)
OLMO2 = (*_EMBEDDINGS, *_POST_NORMS, *_QKVO, *_QK_NORMS, *_GATED_MLP)
_FUSED_MLP = (
    *_fuse_rows(gate_up_rows, "blk.*.ffn_up", f"{_MLP}.gate_proj", f"{_MLP}.up_proj"),
    _GATED_MLP[2],
)
PHI3 = (
    *_EMBEDDINGS,
    *_NORMS,
    *_fuse_rows(qkv_rows, "blk.*.attn_qkv", *(f"{_ATTENTION}.{x}_proj" for x in "qkv")),
    _QKVO[3],
    *_FUSED_MLP,
)
# Hugging Face's files of these have pairs, too.
GLM4 = (
    *_EMBEDDINGS,
    *_NORMS,
    ModuleRow("layers.*.post_self_attn_layernorm", "blk.*.post_attention_norm"),
    ModuleRow("layers.*.post_mlp_layernorm", "blk.*.post_ffw_norm"),
    *_INTERLEAVED_QKVO,
    *_FUSED_MLP,
)
COHERE2 = (*_EMBEDDINGS[:2], _NORMS[0], *_INTERLEAVED_QKVO, *_GATED_MLP)  # always tied
GPT_NEOX = (  # QKV rows are per head in Hugging Face's files, concatenated in GGUF
    ModuleRow("embed_in", "token_embd"),
    ModuleRow("final_layer_norm", "output_norm"),
    ModuleRow("lm_head", "output"),
    *_NORMS,
    *_fuse_rows(qkv_rows, "blk.*.attn_qkv", *(f"layers.*.attention.{x}_proj" for x in "qkv")),
    ModuleRow("layers.*.attention.dense", "blk.*.attn_output"),
    ModuleRow("layers.*.mlp.dense_h_to_4h", "blk.*.ffn_up"),
    ModuleRow("layers.*.mlp.dense_4h_to_h", "blk.*.ffn_down"),
)
GPT2 = (
    ModuleRow("wte", "token_embd"),
    ModuleRow("wpe", "position_embd", always_float32=True),
    ModuleRow("ln_f", "output_norm"),
    ModuleRow("lm_head", "output"),
    ModuleRow("h.*.ln_1", "blk.*.attn_norm"),
    ModuleRow("h.*.attn.c_attn", "blk.*.attn_qkv"),
    ModuleRow("h.*.attn.c_proj", "blk.*.attn_output"),
    ModuleRow("h.*.ln_2", "blk.*.ffn_norm"),
    ModuleRow("h.*.mlp.c_fc", "blk.*.ffn_up"),
    ModuleRow("h.*.mlp.c_proj", "blk.*.ffn_down"),
)


def match_names(modules: Iterable[ModuleRow], names: Iterable[str]) -> Iterator[MatchedParam | str]:
    """Yield the parameter for each GGUF name, or the name itself if no row matches."""
    known: dict[str, list[ModuleRow]] = {}
    for row in modules:
        known.setdefault(row.tensor, []).append(row)
    for name in names:
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        general = name if number is None else f"{name[: number.start()]}*{name[number.end() :]}"
        stem, _, what = general.rpartition(".")
        rows, end = known.get(general), ""
        if rows is None and what in ("weight", "bias"):
            rows, end = known.get(stem), f".{what}"
        if rows is None:
            yield name
            continue
        for row in rows:
            path = row.path.replace("*", number[0] if number else "*")
            yield MatchedParam(f"{path}{end}", name, row)


def match_paths(modules: Iterable[ModuleRow], paths: Iterable[str]) -> Iterator[MatchedParam | str]:
    """Yield the parameter for each of our paths, or the path itself if no row matches."""
    rows = {row.path: row for row in modules if not row.is_read_only}
    back = {row: row._replace(path=row.tensor, tensor=row.path) for row in rows.values()}
    for match in match_names(back.values(), paths):
        if isinstance(match, str):
            yield match
        else:
            yield MatchedParam(match.name, match.path, rows[match.module.tensor])
