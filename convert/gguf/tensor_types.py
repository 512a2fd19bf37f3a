"""Types of a GGUF file's matrices: one type for all, or one of llama-quantize's mixtures.

A mixture gives more bits to the most sensitive matrices: the head, and value and down projections
in the first and last eighth of the layers and in every third layer between.
"""

import re

from jaxllm.config.model import ModelConfig
from jaxllm.convert.gguf.blocks import BY_NAME, WRITABLE, TensorType

MIXTURES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}  # mixture: the type of most matrices
KINDS = (*WRITABLE, *MIXTURES)
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 14, "Q4_K_M": 15,
    "Q5_K": 16, "Q5_K_M": 17, "Q6_K": 18, "BF16": 32,
}  # general.file_type  # fmt: skip
# Replacements for rows that are not whole super-blocks, like in llama-quantize.
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def choose_block(kind: str, name: str, columns: int, config: ModelConfig) -> TensorType:
    """Return the type of a matrix.

    Args:
        kind: A name of `KINDS`.
        name: The tensor's name in GGUF.
        columns: The row length. A type whose blocks do not divide it is replaced by one with
            smaller blocks, or by F16.
        config: The model's configuration.
    """
    block = BY_NAME[_choose_mixture_type(kind, name, config) if kind in MIXTURES else kind]
    if columns % block.columns and block.name in _FALLBACK:
        block = BY_NAME[_FALLBACK[block.name]]
    return BY_NAME["F16"] if columns % block.columns else block


def _choose_mixture_type(kind: str, name: str, config: ModelConfig) -> str:
    most = MIXTURES[kind]
    layers, experts = config.num_hidden_layers, getattr(config, "num_experts", 0)
    number = re.match(r"blk\.(\d+)\.", name)
    more = number is not None and _needs_more_bits(int(number[1]), layers)
    module = name.removesuffix(".weight").rpartition(".")[2]
    tables = ("token_embd", "per_layer_token_embd")
    if module == "output" or (module in tables and config.tie_word_embeddings):
        return "Q6_K"
    if module == "per_layer_model_proj":  # not quantized
        return "BF16"
    if module in ("attn_v", "attn_k") and experts == 8:
        return "Q8_0"
    if module == "attn_v":
        grouped = config.num_attention_heads > getattr(config, "num_key_value_heads", 1 << 30)
        few = "Q5_K" if layers == 80 and grouped else most  # 70B with GQA: small matrices
        return "Q6_K" if more else few
    if module in ("ffn_down", "ffn_down_exps") and more:
        return "Q6_K"
    if module == "attn_qkv":
        return {"Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}[kind]
    if module == "attn_output" and experts == 8 and kind == "Q4_K_M":
        return "Q5_K"
    return most


def _needs_more_bits(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
